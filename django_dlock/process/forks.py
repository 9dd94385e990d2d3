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
"""Seconds for which a fork waits for threads, and threads that would connect wait for a fork."""
POLL_INTERVAL = 0.001
"""Seconds. An event would have a lock that the fork of another thread could find held."""

TASKS = "/proc/self/task"
"""Where Linux lists the threads of this process."""

_at_fork: list[dict[str, Callable[[], object]]] = []
_threads: dict[int, float] = {}
"""The threads for which a fork waits, by their native ids, and until when: an id may be used again
once its thread has ended."""
_forking: dict[int, float] = {}
"""The threads that fork, by their native ids, and since when."""


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
    at_fork(before=_before_fork, after_in_parent=_go_on, after_in_child=_begin)


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """For a thread that makes a connection, and may then end: a fork waits for both."""
    forks_wait()
    try:
        _enter()
        yield
    finally:
        thread_ends()


def thread_ends() -> None:
    """Say that this thread, which has used connections, is about to end."""
    _threads[threading.get_native_id()] = time.monotonic() + PATIENCE


def _enter() -> None:
    me = threading.get_native_id()
    while True:
        _forget_earlier_ones()
        # Note it first, then look: a fork that begins after the look finds the note.
        _threads[me] = math.inf
        now = time.monotonic()
        # A hook of another package may connect in the thread that forks, or wait for this one.
        if all(it == me or now - since > PATIENCE for it, since in _forking.copy().items()):
            return
        _threads.pop(me, None)
        time.sleep(POLL_INTERVAL)


def _before_fork() -> None:
    me = threading.get_native_id()
    _forking[me] = time.monotonic()
    # Turns are counted, because a test may have stopped the clock.
    for _ in range(round(PATIENCE / POLL_INTERVAL)):
        _forget_earlier_ones()
        if not any(it != me and _is_busy(it, until) for it, until in _threads.copy().items()):
            return
        time.sleep(POLL_INTERVAL)
    # Attempts that take so long wait for a server, and hold no lock meanwhile. Later forks do not
    # wait for them again.
    for thread, until in _threads.copy().items():
        if until == math.inf:
            _threads.pop(thread, None)


def _is_busy(thread: int, until: float) -> bool:
    """Whether it connects, or has not quite ended.

    Python says that a thread has ended before its libraries have finished with it, so the system
    is asked; if it does not say (without Linux's ``/proc``), the time decides.
    """
    if until == math.inf or not os.path.exists(f"{TASKS}/{threading.get_native_id()}"):
        return True
    return os.path.exists(f"{TASKS}/{thread}")


def _forget_earlier_ones() -> None:
    now = time.monotonic()
    for thread, until in _threads.copy().items():
        if until < now:
            _threads.pop(thread, None)


def _go_on() -> None:
    _forking.pop(threading.get_native_id(), None)


def _begin() -> None:
    _threads.clear()
    _forking.clear()
