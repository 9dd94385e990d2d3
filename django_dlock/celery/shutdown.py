"""Notifies child processes when their worker shuts down; Celery notifies only the parent.

Every child inherits a pipe. The parent writes one byte that no process reads, so the pipe is
readable in all of them from then on.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

_pipe: tuple[int, int] | None = None


def wait(seconds: float) -> bool:
    """Sleep until the time is over or the worker shuts down; returns whether it shuts down."""
    if _pipe is None:
        time.sleep(seconds)
        return False
    return bool(select.select([_pipe[0]], [], [], seconds)[0])


def begin(**_: Any) -> None:
    """Receives ``worker_init``."""
    global _pipe
    previous, _pipe = _pipe, os.pipe()
    for end in previous or ():
        os.close(end)


def stop(**_: Any) -> None:
    """Receives ``worker_shutting_down``."""
    if _pipe is not None:
        # A signal handler calls this, once per signal.
        os.write(_pipe[1], b"\0")
