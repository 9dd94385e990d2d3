"""The keys of the records of ``idempotent_view``, and the names of its locks.

The view makes them, and the commands that erase make them again to find what belongs to a client.
"""

from __future__ import annotations

import hashlib
from urllib.parse import quote

OF_VIEWS = "idempotent:"
"""What the names of these locks begin with."""
LONGEST_KEY = 255
"""Characters of a record's key; a longer one is stored as a digest."""


def beginning_of_key(client: str) -> str:
    """What the keys of a client begin with, unless they are too long."""
    # Quoted, so that the first slash always ends the client.
    return f"{quote(client, safe='')}/"


def record_key(client: str, sent: str) -> str:
    """The key of the record of what ``client`` has sent as ``Idempotency-Key``."""
    key = f"{beginning_of_key(client)}{sent}"
    return key if len(key) <= LONGEST_KEY else _digest(key)


def lock_name_of(scope: str, key: str) -> str:
    """The name of the lock of a record with this key."""
    return OF_VIEWS + _digest(f"{scope}\n{key}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
