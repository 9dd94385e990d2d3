"""Lock names, and the keys that templates, argument lists and callables make of a call."""

from __future__ import annotations

import re

__all__ = ["check_name"]

MAX_NAME = 255

# Control characters break lists and logs; a lone surrogate cannot be encoded.
_REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_name(name: str) -> str:
    """The name itself, if it may name a lock.

    Raises:
        TypeError: Not a string.
        ValueError: Empty, longer than 255 characters, or with a control character or a lone
            surrogate.
    """
    if not isinstance(name, str):
        raise TypeError(f"A lock's name is a string, not {name!r}")
    if not 1 <= len(name) <= MAX_NAME:
        raise ValueError(
            f"A lock's name has 1 to {MAX_NAME} characters, not {len(name)}: {name[:80]!r}"
        )
    found = _REFUSED.search(name)
    if found is not None:
        raise ValueError(
            f"A lock's name has no control characters and no lone surrogates, "
            f"but {name!r} has {found.group()!r}"
        )
    return name
