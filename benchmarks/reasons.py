"""Why a peer may be ahead."""

from __future__ import annotations

__all__ = ["WHY"]

WHY: dict[str, str] = {
    "celery-once": "it locks when the message is published, which costs a command and its round "
    "trip there (see “total”); nothing is renewed, and a task that ends deletes the lock even "
    "if another one holds it by then",
    "celery-singleton": "as celery-once",
    "redis-py Lock": "a `SET` and a script that compares one string: no token, no index for "
    "operators, no memory of how the last lease ended, no renewal",
    "django-redis": "redis-py's lock on the cache's connections",
    "python-redis-lock": "its release pushes a token that the waiter blocks on, as the floor does; "
    "one that is not renewed costs no more than two scripts",
    "django-pglock": "a session's advisory lock lives in PostgreSQL's memory and in the session: "
    "no lease, no renewal, nothing that outlives a connection pooler",
    "pottery Redlock": "its handle does less",
    "select_for_update": "a row lock lives in PostgreSQL's memory until the transaction ends: no "
    "lease, no token, no list, and the connection is taken for as long as the lock is held",
    "SCAN": "it reads names only",
}
"""By name; a test requires a reason for each peer that is ahead."""
