"""Forks while another thread makes a connection."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django_dlock.process import forks
from tests.support.points import at

PATIENCE = 20.0


@contextmanager
def noted_forks() -> Iterator[threading.Event]:
    """An event that is set as soon as a fork waits for a thread."""
    event = threading.Event()
    usual = forks.PATIENCE
    # A busy machine may take longer than a fork waits.
    forks.PATIENCE = PATIENCE
    try:
        with at("fork.waits", lambda _: event.set()):
            yield event
    finally:
        forks.PATIENCE = usual


class TlsLock:
    """A lock that a TLS library holds while it makes a connection, until this may end."""

    def __init__(self, may_end: threading.Event) -> None:
        self._lock, self._may_end = threading.Lock(), may_end
        self.taken = threading.Event()

    def hold(self) -> None:
        with self._lock:
            self.taken.set()
            assert self._may_end.wait(PATIENCE)

    def is_free_in_child(self) -> bool:
        code = exit_code(lambda: 0 if self._lock.acquire(blocking=False) else 1)
        # If the fork has not waited.
        self._may_end.set()
        return code == 0


def exit_code(in_child: Callable[[], int]) -> int:
    """Fork; the child ends with what ``in_child`` returns."""
    pid = os.fork()
    if pid == 0:
        # The test runner's own handler raises, which a hook before a fork would ignore.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(round(PATIENCE))
        code = 2
        try:
            code = in_child()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
