"""Keeps SQLite's files of leases closed while this process forks.

A child inherits SQLite's notes of the file locks that its parent has, but not the locks. Its own
connections to the same file would rely on locks that do not exist, so another process could delete
the write-ahead log while the child uses it; then two processes would hold one lock.

So all connections are closed before a fork, and new ones wait until it is over. Statements that
are under way are waited for, and interrupted if they take long; they are repeated after the fork.
If a connection is open nevertheless, the child refuses to use its file.

Nothing here takes a lock that a fork in another thread could find held.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

from .. import clock, process

PATIENCE = 1.0
"""Seconds for which a fork waits before it interrupts statements, and as long again after it."""
LONGEST_FORK = 10.0
"""Seconds after which a fork no longer keeps other threads from connecting, even if it hangs."""
POLL_INTERVAL = 0.001
"""Seconds. An event would have a lock that the fork of another thread could find held."""


class Closable(Protocol):
    def close(self) -> None:
        """Close connections that are idle now, and the others when their calls end."""


class Interruptible(Protocol):
    def interrupt(self) -> None:
        """Make the statement that is under way fail; called from another thread."""


_numbers = itertools.count()
_open: dict[int, tuple[Path, Interruptible | None]] = {}
"""The files that are open, by a number for each connection; ``None`` while it is being made."""
_closable: dict[int, weakref.ref[Closable]] = {}
_forking: dict[int, float] = {}
"""The threads that fork, and since when."""
_inherited: set[Path] = set()
"""Files that were open at the fork that made this process."""


def connect() -> None:
    """Take part in forks; called when the apps are ready.

    Hooks before a fork run in reverse order. So those that are registered later, and may use locks,
    run before all files are closed.
    """
    process.at_fork(before=_before, after_in_parent=_go_on, after_in_child=_begin)


def close_before_forks(pool: Closable) -> None:
    """Close the connections of a pool before every fork, for as long as the pool exists."""
    # Also without Django's apps.
    connect()
    number = next(_numbers)
    _closable[number] = weakref.ref(pool, lambda _: _closable.pop(number, None))


def announce(path: Path) -> int:
    """Say that a connection is about to be made, once no fork is under way.

    Returns the number for ``note`` and ``withdraw``.
    """
    number = next(_numbers)
    while True:
        # Announce first, then check: a fork that begins after the check sees the number.
        _open[number] = path, None
        if not _others_fork():
            return number
        withdraw(number)
        time.sleep(POLL_INTERVAL)


def note(number: int, raw: Interruptible) -> None:
    """Note the connection that was announced, so that a fork can interrupt its statement."""
    path, _ = _open[number]
    _open[number] = path, raw


def withdraw(number: int) -> None:
    """Note that the connection is closed, or was not made."""
    _open.pop(number, None)


def is_inherited(path: Path) -> bool:
    """Whether SQLite's notes of this file are those of the parent process."""
    return path in _inherited


def _others_fork() -> bool:
    now, me = clock.now(), threading.get_ident()
    # A hook of another package may take a lock, and so connect, in the thread that forks.
    return any(
        thread != me and now - since < LONGEST_FORK for thread, since in _forking.copy().items()
    )


def _before() -> None:
    began = _forking[threading.get_ident()] = clock.now()
    while True:
        for reference in _closable.copy().values():
            pool = reference()
            if pool is not None:
                pool.close()
        waited = clock.now() - began
        if not _open or waited > 2 * PATIENCE:
            return
        if waited > PATIENCE:
            for _, raw in _open.copy().values():
                # It may have been closed by now.
                with contextlib.suppress(Exception):
                    if raw is not None:
                        raw.interrupt()
        time.sleep(POLL_INTERVAL)


def _go_on() -> None:
    _forking.pop(threading.get_ident(), None)


def _begin() -> None:
    _forking.clear()
    _inherited.update(path for path, _ in _open.values())
    _open.clear()
