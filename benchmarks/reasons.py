"""Why a peer may be ahead."""

from __future__ import annotations

WHY: dict[str, str] = {
    "celery-once": "it locks when the message is published, which costs a command and its round "
    "trip there (see “total”); nothing is renewed, and a task that ends deletes the lock even "
    "if another task holds it by then",
    "celery-singleton": "the same reasons as for celery-once",
    "redis-py Lock": "a `SET` and a script that compares one string: no token, no index for "
    "operators, no memory of how the last lease ended, no renewal",
    "django-redis": "redis-py's lock on the cache's connections",
    "python-redis-lock": "its release pushes a token that the waiter blocks on, as the floor does; "
    "a lock that is not renewed costs no more than two scripts",
    "django-pglock": "a session's advisory lock lives in PostgreSQL's memory and in the session: "
    "no lease, no renewal, nothing that outlives a connection pooler",
    "pottery Redlock": "its lock object does less",
    "select_for_update": "a row lock lives in PostgreSQL's memory until the transaction ends: no "
    "lease, no token, no list, and the connection is taken for as long as the lock is held",
    "redlock-py": "two commands for each server, one server after the other: no token that rises, "
    "no list, no memory of how the last lease ended, and a server that was restarted with an empty "
    "memory votes at once",
    "kazoo Lock": "its waiter reads the queue once it is woken, and asks no majority; ours also "
    "writes, because a server that is cut off from the others could give an outdated answer",
    "etcd's lock service": "its wait is one call that etcd answers when the name is free; nothing "
    "is renewed, and no deadline cuts the call",
    "etcd3gw": "it leaves its lease behind at etcd after each release, until that ends by itself",
    "SCAN": "it reads names only",
}
"""By name; a test requires a reason for each peer that is ahead."""
