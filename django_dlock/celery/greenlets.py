"""Greenlets, where gevent has put them in the place of threads.

gevent is never imported here: where it is not loaded, nobody runs in a greenlet of its.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["Greenlet", "current"]


@dataclass(frozen=True, slots=True)
class Greenlet:
    """One greenlet of gevent's, and the loop that wakes it."""

    _greenlet: Any
    _loop: Any

    def call_from_hub(self, function: Callable[[], object]) -> None:
        """Have the greenlet's hub call ``function`` soon, while all its greenlets wait."""
        self._loop.run_callback_threadsafe(function)

    @property
    def frame(self) -> FrameType | None:
        """Where the greenlet waits; ``None`` while it runs."""
        found: FrameType | None = self._greenlet.gr_frame
        return found

    def throw(self, kind: type[BaseException]) -> None:
        """Raise ``kind`` where the greenlet waits; only from its hub."""
        self._greenlet.throw(kind)


def current() -> Greenlet | None:
    """The greenlet that runs; ``None`` where threads are threads."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return None
    gevent: Any = sys.modules["gevent"]
    return Greenlet(gevent.getcurrent(), gevent.get_hub().loop)
