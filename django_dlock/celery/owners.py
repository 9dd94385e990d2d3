"""The owner of a delivery's lease: a nonce, the child that runs it, and a mark of the task.

One to a child: where a child died before its parent had read that it began, Celery hands the
message to another one, whose lease must not be taken for the dead one's.

Whoever meets the lease sees by the mark whether it is of a copy of its own message, at that very
moment: when it asks the backend afterwards, the lease may have ended or changed hands.
"""

from __future__ import annotations

import hashlib
import secrets

__all__ = ["in_child", "is_of", "new"]


def new(task_id: str | None) -> str:
    """An owner for one delivery of the task."""
    return f"{secrets.token_hex(16)}:{_mark(task_id)}"


def in_child(owner: str, pid: int) -> str:
    """The owner under which that child of a pool acquires for the delivery."""
    nonce, colon, mark = owner.partition(":")
    return f"{nonce}.{pid}{colon}{mark}"


def is_of(owner: str, task_id: str | None) -> bool | None:
    """Whether it was made for a delivery of the task; ``None`` for an owner without a mark."""
    _, colon, mark = owner.partition(":")
    return mark == _mark(task_id) if colon else None


def _mark(task_id: str | None) -> str:
    # A digest, for an id may be of any length, and an owner is stored in a column.
    return hashlib.blake2b((task_id or "").encode(), digest_size=8).hexdigest()
