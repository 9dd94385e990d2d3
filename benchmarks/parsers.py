"""Which parser redis-py uses for replies: its own one, or hiredis.

redis-py uses hiredis if it can import it, and decides this at its own import. So each process of
the benchmark has one parser, which is chosen before anything else.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

PYTHON, HIREDIS = "python", "hiredis"
PARSERS = {PYTHON: "without hiredis", HIREDIS: "with hiredis"}
"""The names of the parsers in the tables."""

VARIABLE = "BENCH_PARSER"
"""The environment variable that passes the choice on to child processes."""

DIRECTORY = Path(sys.prefix) / "hiredis"
"""Where the Makefile installs hiredis, so that nothing finds it by accident."""


def use(parser: str) -> None:
    """Choose the parser of this process and its children, before redis is imported."""
    os.environ[VARIABLE] = parser
    if parser == HIREDIS:
        sys.path.append(str(DIRECTORY))
    else:
        # Importing a module whose entry is ``None`` fails.
        sys.modules["hiredis"] = None  # type: ignore[assignment]


def hiredis_version() -> str | None:
    """``None`` if hiredis is not installed."""
    found = metadata.distributions(name="hiredis", path=[*sys.path, str(DIRECTORY)])
    return next((one.version for one in found), None)
