"""What happens at a fork, and the threads for which a fork waits.

TLS libraries have locks of their own. OpenSSL takes one whenever a thread begins or ends that uses
it, and others while it prepares a connection. A child that is forked while a thread of its parent
holds one would wait for it for ever at its own first connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["at_fork", "connecting", "forks_wait", "thread_ends"]

PATIENCE = 0.5
"""Seconds for which a fork waits. An attempt to connect may take longer while the server cannot be
reached, but then it holds no such lock."""
POLL_INTERVAL = 0.001
"""Seconds. An event would have a lock that the fork of another thread could find held."""

_at_fork: list[dict[str, Callable[[], object]]] = []
_threads: dict[int, float] = {}
"""The threads for which a fork waits, by their numbers at the system, and until when: a number may
be used again once its thread has ended."""


def at_fork(**hooks: Callable[[], object]) -> None:
    """As ``os.register_at_fork``, if there is one; registers the same hooks only once.

    Call it at first use and not at import, because importing the package has no side effects.
    """
    if hooks not in _at_fork and hasattr(os, "register_at_fork"):
        _at_fork.append(hooks)
        os.register_at_fork(**hooks)


def forks_wait() -> None:
    """Let forks wait for threads; called when the apps are ready, or earlier by hooks that connect.

    Hooks before a fork run in reverse order, so those that are registered later run before this.
    """
    at_fork(before=_before_fork, after_in_child=_threads.clear)


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """For a thread that makes a connection and then ends: a fork waits for both."""
    forks_wait()
    _forget_earlier_ones()
    _threads[threading.get_native_id()] = math.inf
    try:
        yield
    finally:
        thread_ends()


def thread_ends() -> None:
    """Say that this thread, which has used connections, is about to end."""
    _threads[threading.get_native_id()] = time.monotonic() + PATIENCE


def _before_fork() -> None:
    give_up_at = time.monotonic() + PATIENCE
    while time.monotonic() < give_up_at:
        _forget_earlier_ones()
        # Python says that a thread has ended before its libraries have finished with it.
        if not any(until == math.inf or _runs(it) for it, until in _threads.copy().items()):
            return
        time.sleep(POLL_INTERVAL)


def _forget_earlier_ones() -> None:
    now = time.monotonic()
    for thread, until in _threads.copy().items():
        if until < now:
            _threads.pop(thread, None)


def _runs(thread: int) -> bool:
    """Whether the system still knows the thread; always false without Linux's ``/proc``."""
    return os.path.exists(f"/proc/self/task/{thread}")
