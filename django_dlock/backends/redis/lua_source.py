"""Makes scripts of the files in ``lua/``, when the package is imported.

A file begins with what the script does, its ``KEYS``, ``ARGV`` and answer. ``--- include read`` in
a line of its own stands for ``lua/shared/read.lua``, which says what it needs before it. A word of
``CONSTANTS`` stands for its value, also in a string: the code that a server gets is the same as if
the value had been written there. Comments are not sent, so they stand in lines of their own.

Numbers in messages and answers are formatted explicitly, because Lua's ``tostring`` keeps 14
digits and a token has 16. The server itself writes numbers in commands in full.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from ...lease import SEARCHED
from ..holder_state import LONGEST
from .keys import CHANNELS, LOCKS

LUA = Path(__file__).parent / "lua"

MEMORY_MS = 60_000
"""The end of a lease is remembered for at least this long, or for its TTL if that is longer."""
KNOWN_FOR_MS = 86_400_000
"""How long the identity of a process is kept after its last heartbeat."""
MARGIN_MS = 20_000
"""How long a waiter that is late to ask again keeps its position."""
PAST_BYTES = 512
"""Room for the ends of about 14 leases. Beyond that, releases are dropped first."""
EXACT = 2**53
"""From here on Lua's numbers are not exact; our times and tokens are smaller."""
WRONG_TYPE = "!type"
"""The kind of a row whose key has a value of another type."""

CONSTANTS: Mapping[str, str | int] = {
    "CHANNELS": CHANNELS,
    "EXACT": EXACT,
    "KEPT_BYTES": PAST_BYTES * 3 // 4,
    "KNOWN_FOR_MS": KNOWN_FOR_MS,
    "LOCKS": LOCKS,
    "LONGEST": LONGEST,
    "MARGIN_MS": MARGIN_MS,
    "MEMORY_MS": MEMORY_MS,
    "PAST_BYTES": PAST_BYTES,
    "SEARCHED": ", ".join(f"'{key}'" for key in SEARCHED),
    "WRONG_TYPE": WRONG_TYPE,
}

_INCLUDE = re.compile(r"--- include (\w+)")
_WORD = re.compile(r"\b[A-Z][A-Z_]+\b")


class Script:
    """Lua source, and the digest by which the server knows it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def code(file: Path, constants: Mapping[str, str | int] = CONSTANTS) -> str:
    """What is sent of a file: its code, with what it includes and the values of constants."""

    def value(word: re.Match[str]) -> str:
        return str(constants.get(word[0], word[0]))

    lines = []
    for line in _lines(file):
        if include := _INCLUDE.fullmatch(line):
            lines.append(code(LUA / "shared" / f"{include[1]}.lua", constants))
        elif line and not line.lstrip().startswith("--"):
            lines.append(_WORD.sub(value, line))
    return "\n".join(lines)


@functools.cache
def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()
