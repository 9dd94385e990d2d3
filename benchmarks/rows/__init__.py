"""The rows of the benchmark, one module per subject."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..model import Row

if TYPE_CHECKING:
    from ..bench import Bench

__all__ = ["MODULES", "all_rows"]

MODULES: tuple[str, ...] = (
    "cycle",
    "handover",
    "throughput",
    "renewal",
    "check",
    "task",
    "imports",
    "scale",
    "waiters",
    "database",
    # Last, because its servers run until the end.
    "stores",
)
"""In the order in which they run."""


def all_rows(bench: Bench) -> Iterator[Row]:
    for name in MODULES:
        yield from importlib.import_module(f"{__name__}.{name}").rows(bench)
