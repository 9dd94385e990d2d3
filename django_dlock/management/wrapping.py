"""Text that is wrapped to the width of a terminal, so that no word is cut."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

from .cells import room

# A quoted name may have spaces. An apostrophe follows a letter.
_TOKEN = re.compile(r"""(?:(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\S)+""")

_PAINTED = re.compile(r"\x1b\[[0-9;]*m")


def width_of(out: Any) -> int | None:
    """The columns of a terminal; of a pipe those that ``COLUMNS`` says, as ``watch`` sets it.

    ``None``: Lines may have any length.
    """
    if out.isatty():
        return shutil.get_terminal_size().columns
    try:
        out.fileno()
    except (OSError, AttributeError):
        # A program reads it, not a person.
        return None
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def wrapped(text: str, width: int | None, *, first: str = "", indent: str = "") -> Iterator[str]:
    """Lines that are broken at spaces only; a longer word, name, path or key gets a longer line.

    Args:
        first, indent: What the first line, and what the others begin with.
    """
    if width is None:
        yield first + text
        return
    line, empty, beyond = first, True, room(_PAINTED.sub("", first)) - room(first)
    for token in _TOKEN.findall(text):
        if not empty and room(line) + beyond + 1 + room(token) > width:
            yield line
            line, empty, beyond = indent, True, 0
        line += token if empty else f" {token}"
        empty = False
    yield line
