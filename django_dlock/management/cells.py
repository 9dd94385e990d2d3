"""Text as it is measured on a terminal, where a character takes one column, two or none."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable


def room(text: str) -> int:
    """How many columns the text takes."""
    return len(text) if text.isascii() else sum(map(_room_of, text))


def first(text: str, size: int) -> str:
    """As much of the beginning as fits into this many columns."""
    return text[:size] if text.isascii() else text[: _fitting(text, size)]


def last(text: str, size: int) -> str:
    """As much of the end as fits into this many columns."""
    number = size if text.isascii() else _fitting(reversed(text), size)
    found = text[max(0, len(text) - number) :]
    # An accent belongs to the letter before it.
    return found.lstrip("".join(char for char in found if not _room_of(char)))


def _fitting(text: Iterable[str], size: int) -> int:
    number = 0
    for char in text:
        size -= _room_of(char)
        if size < 0:
            break
        number += 1
    return number


def _room_of(char: str) -> int:
    # Marks above, below and around a letter, and the joiners.
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1
