"""What the name of a lock may be, and how a text that may not be one becomes a name."""

from __future__ import annotations

import hashlib
import re

MAX_NAME = 255
MAX_KEY = 200
"""A longer key ends in a digest, which leaves room for a prefix within ``MAX_NAME``."""
DIGEST_LENGTH = 32
"""128 bits in hexadecimal: names stay short, and no two keys get the same digest by chance."""

# Control characters break lists and logs; lone surrogates cannot be encoded.
REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """The value of a text of any subclass, such as ``SafeString`` or a member of ``TextChoices``.

    Such a member may show its own name in an f-string, and have another hash than its value.
    """
    if not issubclass(type(text), str):
        # A lazy object, such as ``SimpleLazyObject``, only says that it is one.
        text = str(text)
    return text if type(text) is str else str.__str__(text)


def check_name(name: str) -> str:
    """Return the name if it is a valid name of a lock, as a plain string.

    Raises:
        TypeError: Not a string.
        ValueError: Empty, longer than 255 characters, or with a control character or a lone
            surrogate.
    """
    if not isinstance(name, str):
        raise TypeError(f"A lock's name must be a string, not {name!r}")
    name = plain(name)
    if not 1 <= len(name) <= MAX_NAME:
        raise ValueError(
            f"A lock's name must have 1 to {MAX_NAME} characters, not {len(name)}: {name[:80]!r}"
        )
    found = REFUSED.search(name)
    if found is not None:
        raise ValueError(
            f"A lock's name must not contain control characters or lone surrogates, "
            f"but {name!r} contains {found.group()!r}"
        )
    return name


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_LENGTH]


def fit(key: str, longest: int = MAX_KEY) -> str:
    """The key as a lock's name; if it is too long or not a valid name, it ends in a digest."""
    key = plain(key)
    name = REFUSED.sub("?", key)
    if name == key and len(key) <= longest:
        return key
    mark = digest(key)
    return f"{name[: longest - len(mark) - 1]}~{mark}"
