"""Text from outside, as a person may safely read it: on a terminal, in a log, on a page.

A path, the name of a task or a host can contain any character. Some of them would move the cursor
of a terminal, begin a second line in a log, or show text in another order than it has.
"""

from __future__ import annotations

import unicodedata

JOINERS = "\u200c\u200d"
"""They choose the form of the letters beside them, and move and hide nothing."""


def printable(text: str, *, keep: str = "") -> str:
    r"""The text, in which each character that is not visible by itself is escaped as in ``repr``.

    These are control characters, line and paragraph separators, marks and overrides of the writing
    direction, characters without width, and lone surrogates: ``\x1b``, ``\u202e``. Spaces of every
    width stay, and so do joiners, which Persian, Hindi and emoji are written with. A backslash
    stays, too, so that text may come here twice.

    Args:
        keep: Characters that stay, such as the line feeds of a text of many lines.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_safe(char) or char in keep else repr(char)[1:-1] for char in text)


def storable(text: str) -> str:
    r"""The text, in which what some database does not store is escaped: ``\x00``, ``\ud800``.

    PostgreSQL stores no NUL, in its JSON neither, and no database stores a lone surrogate.
    """
    text = text.replace("\0", "\\x00")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_safe(char: str) -> bool:
    return char.isprintable() or char in JOINERS or unicodedata.category(char) == "Zs"
