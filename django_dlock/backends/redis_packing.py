"""Commands as bytes, in the form in which they travel to Redis.

redis-py packs word by word, which costs more than all else that a client does for a lock. Most
words of our commands are the same each time: those are packed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from .redis_lua import Script

__all__ = ["BLANK", "Word", "fill", "pack", "pattern"]

Word: TypeAlias = str | int | bytes

BLANK: Final = "\udfff"
"""Stands for what is not known yet, as a word or at its end; in no text that can be encoded."""


def pack(script: Script, keys: Sequence[str], args: Sequence[Word]) -> bytes:
    """A call of the script by its digest."""
    words = _words(script, keys, args)
    if bytes not in map(type, args):
        # Lengths in characters are lengths in bytes; 500 renewals are packed in a quarter of the
        # time.
        text = "".join([f"${len(word)}\r\n{word}\r\n" for word in map(str, words)])
        if text.isascii():
            return f"*{len(words)}\r\n{text}".encode()
    return b"".join([b"*%d\r\n" % len(words), *map(_packed, words)])


def pattern(script: Script, keys: Sequence[str], args: Sequence[Word]) -> list[str]:
    """A call of the script with blanks, for ``fill``: at every other place, from the second on.

    Two for each ``BLANK``, in order: the number of bytes of the whole word, and the text in the
    blank's place.
    """
    words = _words(script, keys, args)
    parts = [f"*{len(words)}\r\n"]
    for word in map(str, words):
        known, blank, _ = word.partition(BLANK)
        if blank:
            parts[-1] += "$"
            parts += "", f"\r\n{known}", "", "\r\n"
        else:
            parts[-1] += f"${len(word)}\r\n{word}\r\n"
    return parts


def fill(parts: list[str], *blanks: str) -> str:
    """The call with its blanks filled; right if it is ASCII, where lengths are those of bytes."""
    filled = parts.copy()
    filled[1::2] = blanks
    return "".join(filled)


def _words(script: Script, keys: Sequence[str], args: Sequence[Word]) -> list[Word]:
    return ["EVALSHA", script.sha, len(keys), *keys, *args]


def _packed(word: Word) -> bytes:
    data = word if isinstance(word, bytes) else str(word).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)
