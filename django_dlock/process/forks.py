"""What happens at a fork, and the threads for which a fork waits.

Python calls no hooks at a fork that it does not see: a server written in C, such as uWSGI, forks
its workers itself. Then the child's hooks run when it first uses the package (``notice_fork``).

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

from .points import reached

PATIENCE = 0.5
"""Seconds for which a fork waits for threads that connect or end. Threads that would connect wait
until the fork is over, but at most this long after the fork has stopped waiting."""
POLL_INTERVAL = 0.001
"""Seconds. An event would have a lock that the fork of another thread could find held."""
MOST_INTERRUPTS = 100
"""A fork stops waiting after this many exceptions, such as those of signal handlers."""

TASKS = "/proc/self/task"
"""Where Linux lists the threads of this process."""


class _Note:
    """A thread for which a fork waits.

    Attributes:
        thread: Its native id, which another thread may have once this one has ended.
        until: Until when it may be busy; infinite while it connects.
    """

    __slots__ = ("thread", "until")

    def __init__(self) -> None:
        self.thread, self.until = threading.get_native_id(), math.inf


_at_fork: list[dict[str, Callable[[], object]]] = []
_pid = 0
"""The process that the hooks of a child have made of this one; 0 while there are no hooks."""
_noticing: dict[int, tuple[int]] = {}
"""The thread that runs them, by the pid, in a process whose fork Python has not seen."""
_notes: set[_Note] = set()
_forking: dict[int, float] = {}
"""The threads that fork, by their native ids, and when each stops waiting for other threads."""


def at_fork(**hooks: Callable[[], object]) -> None:
    """As ``os.register_at_fork``, if there is one; registers the same hooks only once.

    Call it at first use and not at import, because importing the package has no side effects.
    """
    if hooks not in _at_fork and hasattr(os, "register_at_fork"):
        if not _at_fork:
            _note_pid()
            # First, because the hooks of a child run in this order and may use the package.
            os.register_at_fork(after_in_child=_note_pid)
        _at_fork.append(hooks)
        os.register_at_fork(**hooks)


def notice_fork() -> None:
    """Run the hooks of a child if Python has not run them; whatever uses the package calls this.

    A fork that Python does not see waits for no thread of the parent. The hooks take no lock that
    such a thread may have held.
    """
    if os.getpid() != _pid and _at_fork:
        _run_hooks_of_child()


def _run_hooks_of_child() -> None:
    pid, mine = os.getpid(), (threading.get_ident(),)
    while _pid != pid:
        try:
            first = _noticing.setdefault(pid, mine)
            if first is mine:
                for hooks in _at_fork.copy():
                    if "after_in_child" in hooks:
                        hooks["after_in_child"]()
                _note_pid()
            elif first == mine:
                # A signal handler in the thread that runs them.
                return
            else:
                time.sleep(POLL_INTERVAL)
        finally:
            # After an interrupt, whoever comes next runs all of them again.
            if _noticing.get(pid) is mine:
                _noticing.pop(pid, None)


def _note_pid() -> None:
    global _pid
    _pid = os.getpid()


def take_part_in_forks() -> None:
    """Let forks wait for threads; called when the apps are ready, or earlier by hooks that connect.

    Hooks before a fork run in reverse order, so those that are registered later run before this.
    """
    at_fork(before=_before_fork, after_in_parent=_go_on, after_in_child=_begin)


@contextlib.contextmanager
def connecting(*, ends: bool = False) -> Iterator[None]:
    """For a thread that makes a connection: a fork waits for it, and it waits for a fork.

    Args:
        ends: Whether the thread ends after this, so that forks wait for that, too.
    """
    take_part_in_forks()
    note = _Note()
    try:
        _wait_for_forks(note)
        yield
    finally:
        if ends:
            note.until = time.monotonic() + PATIENCE
            # Again, because a fork that has waited in vain has removed it.
            _notes.add(note)
        else:
            _notes.discard(note)


def thread_ends() -> None:
    """Say that this thread, which has used connections, is about to end."""
    with connecting(ends=True):
        pass


def _wait_for_forks(note: _Note) -> None:
    while True:
        _forget_earlier_ones()
        # Note it first, then look: a fork that begins after the look finds the note.
        _notes.add(note)
        now = time.monotonic()
        # A hook of another package may connect in the thread that forks, or wait for this one.
        may_go = all(
            it == note.thread or now - ended > PATIENCE for it, ended in _forking.copy().items()
        )
        # A fork that ended just now may have removed the note.
        if may_go and note in _notes:
            return
        _notes.discard(note)
        time.sleep(POLL_INTERVAL)


def _before_fork() -> None:
    me, ends_at = threading.get_native_id(), time.monotonic() + PATIENCE
    interrupt: BaseException | None = None
    # Not for ever, because the clock of a test may raise in every call.
    for _ in range(MOST_INTERRUPTS):
        try:
            _wait_for_threads(me, ends_at)
            break
        except BaseException as error:  # noqa: BLE001 - raised after the wait
            # Python reports what a signal handler raises here, and forks nevertheless.
            interrupt = error
    _forking[me] = time.monotonic()
    reached("fork.goes_on", thread=me)
    if interrupt is not None:
        raise interrupt


def _wait_for_threads(me: int, ends_at: float) -> None:
    busy: list[_Note] = []
    # Turns are counted, too, because a test may have stopped the clock.
    for _ in range(round(PATIENCE / POLL_INTERVAL)):
        # In each turn, because a fork in a signal handler would remove it.
        _forking[me] = ends_at
        _forget_earlier_ones()
        busy = [note for note in _notes.copy() if note.thread != me and _is_busy(note)]
        if not busy:
            return
        if time.monotonic() >= ends_at:
            break
        reached("fork.waits", thread=me)
        time.sleep(POLL_INTERVAL)
    # Attempts that take so long usually wait for a server, and hold no lock meanwhile. Later forks
    # do not wait for them again, even if the server answers at last.
    _notes.difference_update(busy)


def _is_busy(note: _Note) -> bool:
    """Whether it connects, or has not quite ended.

    Python says that a thread has ended before its libraries have finished with it, so the system
    is asked; if it does not say, the time decides.
    """
    return note.until == math.inf or thread_exists(note.thread) is not False


def thread_exists(native_id: int) -> bool | None:
    """Whether this process has that thread; ``None`` if the system does not say.

    It does not without Linux's ``/proc``, nor with that of another PID namespace, where the threads
    of this process have other ids.
    """
    if not os.path.exists(f"{TASKS}/{threading.get_native_id()}"):
        return None
    return os.path.exists(f"{TASKS}/{native_id}")


def _forget_earlier_ones() -> None:
    now = time.monotonic()
    _notes.difference_update([note for note in _notes.copy() if note.until < now])


def _go_on() -> None:
    _forking.pop(threading.get_native_id(), None)


def _begin() -> None:
    _notes.clear()
    _forking.clear()
