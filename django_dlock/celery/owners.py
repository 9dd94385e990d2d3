"""The owner of a delivery's lease: a nonce, the child's pid, and a digest of the task id.

The pid is part of it because Celery may give the message to a second child, if the first dies
before the parent has read that it started. The two leases must not be confused.

The digest tells a delivery that finds the name held whether the holder is a copy of its own
message. Asking the backend later would be too late: the lease may have changed hands by then.

A delivery that acquires again adds a number to its owner: every grant has its own owner, and the
parent recognizes those of its child.
"""

from __future__ import annotations

import hashlib
import secrets

KEY = "dlock_owner"
"""The key of the request under which the parent gives a pool's child its owner."""


def new(task_id: str | None) -> str:
    """A new owner for one delivery of the task."""
    return f"{secrets.token_hex(16)}:{_mark(task_id)}"


def in_child(owner: str, pid: int) -> str:
    """The owner that this child of a pool uses for the delivery."""
    nonce, colon, mark = owner.partition(":")
    return f"{nonce}.{pid}{colon}{mark}"


def again(owner: str, number: int) -> str:
    """The owner that the delivery uses when it has acquired ``number`` times before."""
    nonce, colon, mark = owner.partition(":")
    return f"{nonce}+{number}{colon}{mark}"


def is_of_delivery(owner: str, first: str) -> bool:
    """Whether it is ``first``, or one that the same delivery uses ``again``."""
    nonce, colon, mark = owner.partition(":")
    return nonce.partition("+")[0] + colon + mark == first


def is_of(owner: str, task_id: str | None) -> bool | None:
    """Whether it was made for a delivery of the task; ``None`` if it has no digest."""
    _, colon, mark = owner.partition(":")
    return mark == _mark(task_id) if colon else None


def _mark(task_id: str | None) -> str:
    # A digest, because an id may have any length and an owner is stored in a column.
    # Whoever publishes chooses the id; the worker must not die of one that is no valid text.
    text = str(task_id or "").encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
