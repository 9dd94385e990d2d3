"""Which parser redis-py reads replies with: its own one, or hiredis.

redis-py uses hiredis if it can import it, and decides so when it is imported itself. So each
process of the benchmark has one parser, which is chosen before anything else.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["HIREDIS", "PARSERS", "PYTHON", "VARIABLE", "hiredis_version", "use"]

PYTHON, HIREDIS = "python", "hiredis"
PARSERS = {PYTHON: "without hiredis", HIREDIS: "with hiredis"}
"""What the tables say of each."""

VARIABLE = "BENCH_PARSER"
"""Environment variable that passes the choice on to child processes."""

DIRECTORY = Path(sys.prefix) / "hiredis"
"""Where the Makefile installs hiredis, so that nothing finds it by accident."""


def use(parser: str) -> None:
    """Choose the parser of this process, before it imports redis, and of its children."""
    os.environ[VARIABLE] = parser
    if parser == HIREDIS:
        sys.path.append(str(DIRECTORY))
    else:
        # An import of a module whose entry is ``None`` fails.
        sys.modules["hiredis"] = None  # type: ignore[assignment]


def hiredis_version() -> str | None:
    """``None`` if hiredis is not installed."""
    found = metadata.distributions(name="hiredis", path=[*sys.path, str(DIRECTORY)])
    return next((one.version for one in found), None)
