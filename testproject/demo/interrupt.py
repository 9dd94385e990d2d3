"""Ctrl-C, SIGTERM and SIGHUP end the demonstration, so that it stops what it has started.

The handler raises ``KeyboardInterrupt``. If it happens to run inside a finalizer, as those of
Celery's results and redis-py's clients, Python prints the exception and goes on; ``pause`` then
raises it again.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import NoReturn

_received: list[int] = []


def listen() -> None:
    # Set SIGINT explicitly, because processes that a shell starts in the background ignore it.
    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        signal.signal(getattr(signal, name), _interrupt)


def pause(seconds: float) -> None:
    """Sleep.

    Raises:
        KeyboardInterrupt: A signal has come, now or earlier.
    """
    time.sleep(seconds)
    if _received:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt
