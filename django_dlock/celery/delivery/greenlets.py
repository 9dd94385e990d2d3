"""Interrupts bodies that run in gevent's greenlets instead of threads.

This module never imports gevent: if it is not loaded, no body runs in a greenlet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class Greenlet:
    """One greenlet, and the event loop that wakes it."""

    _greenlet: Any
    _loop: Any

    def call_from_hub(self, function: Callable[[], object]) -> None:
        """Let the greenlet's hub call ``function`` soon, while no greenlet is running."""
        self._loop.run_callback_threadsafe(function)

    @property
    def frame(self) -> FrameType | None:
        """The frame in which the greenlet waits; ``None`` while it runs."""
        found: FrameType | None = self._greenlet.gr_frame
        return found

    def throw(self, kind: type[BaseException]) -> None:
        """Raise ``kind`` where the greenlet waits; call this from its hub only."""
        self._greenlet.throw(kind)


def current() -> Greenlet | None:
    """The running greenlet; ``None`` without gevent's monkey patch."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return None
    gevent: Any = sys.modules["gevent"]
    return Greenlet(gevent.getcurrent(), gevent.get_hub().loop)


def is_end(error: BaseException, time_limit: float | None) -> bool:
    """Whether the error means that the greenlet was killed or has reached the hard time limit.

    Args:
        time_limit: Seconds; distinguishes Celery's timeout from one that the body has set.
    """
    greenlet: Any = sys.modules.get("greenlet")
    if greenlet is not None and isinstance(error, greenlet.GreenletExit):
        return True
    gevent: Any = sys.modules.get("gevent")
    if gevent is None or not isinstance(error, gevent.Timeout):
        return False
    return time_limit is not None and getattr(error, "seconds", None) == time_limit
