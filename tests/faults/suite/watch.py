"""Watches a run: reads its journal, and notices dead processes and freed locks."""

from __future__ import annotations

import os
import selectors
import threading
import time
from typing import Any

from django_dlock.backends.base import BaseLockBackend
from django_dlock.exceptions import BackendUnavailable

from .journal import Event, Journal
from .kinds import GUARDED

PAUSE = 0.01


class Watch:
    """A context manager; reads the journal until it ends.

    Args:
        locks: Used to ask who holds the lock of a body whose process died. Only with ``get``, which
            returns what is stored and cannot prove a death.
    """

    def __init__(self, journal: Journal, locks: BaseLockBackend) -> None:
        self._journal, self._locks = journal, locks
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._open: dict[str, Event] = {}
        self._last: dict[int, Event] = {}
        self._pending: list[Event] = []
        self._selector = selectors.DefaultSelector()
        self._pids: set[int] = set()
        # For systems whose kernel does not report it.
        self._polled: list[int] = []
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._read_and_see, self._ask_for_locks)
        ]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def events(self, *names: str) -> list[Event]:
        """The events with these names, so far."""
        with self._lock:
            return [event for event in self._events if not names or event["event"] in names]

    def count(self, *names: str) -> int:
        return len(self.events(*names))

    def running(self) -> list[Event]:
        """The ``begin`` events of the bodies that have not ended and whose process lives."""
        with self._lock:
            return list(self._open.values())

    def pending(self) -> bool:
        """Whether the lock of a dead process is not free yet."""
        with self._lock:
            return bool(self._pending)

    # -- internals ------------------------------------------------------------------------

    def _read_and_see(self) -> None:
        while not self._stopped.is_set():
            for event in self._journal.new():
                self._take(event)
            for key, _ in self._selector.select(PAUSE):
                self._selector.unregister(key.fd)
                os.close(key.fd)
                self._dead(key.data)
            for pid in [pid for pid in self._polled if not _is_there(pid)]:
                self._polled.remove(pid)
                self._dead(pid)
            if not self._selector.get_map():
                time.sleep(PAUSE)

    def _take(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            if event["event"] == "begin":
                self._open[event["run"]] = self._last[event["pid"]] = event
            elif event["event"] == "end":
                self._open.pop(event["run"], None)
        if event["event"] == "begin" and event["pid"] not in self._pids:
            self._follow(event["pid"])

    def _follow(self, pid: int) -> None:
        if not hasattr(os, "pidfd_open"):
            self._pids.add(pid)
            self._polled.append(pid)
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dead(pid)
            return
        self._pids.add(pid)
        self._selector.register(descriptor, selectors.EVENT_READ, pid)

    def _dead(self, pid: int) -> None:
        self._pids.discard(pid)
        self._journal.write("death", pid=pid)
        # Its last lines are in the file, but may not have been read yet.
        for event in self._journal.new():
            self._take_last(event, pid)
        with self._lock:
            gone = {run: event for run, event in self._open.items() if event["pid"] == pid}
            for run in gone:
                del self._open[run]
            # A process whose body has ended may still hold the lock.
            if last := self._last.pop(pid, None):
                gone[last["run"]] = last
            self._pending += [
                {**event, "died": time.monotonic()}
                for event in gone.values()
                if event["kind"] == GUARDED
            ]

    def _take_last(self, event: Event, pid: int) -> None:
        if event["event"] == "begin" and event["pid"] == pid:
            with self._lock:
                self._events.append(event)
                self._open[event["run"]] = self._last[pid] = event
            return
        self._take(event)

    def _ask_for_locks(self) -> None:
        while not self._stopped.wait(PAUSE):
            with self._lock:
                pending = list(self._pending)
            for event in pending:
                if self._is_free(event):
                    self._journal.write(
                        "freed", run=event["run"], key=event["key"], after=self._since(event)
                    )
                    with self._lock:
                        self._pending.remove(event)

    @staticmethod
    def _since(event: Event) -> float:
        return time.monotonic() - float(event["died"])

    def _is_free(self, event: dict[str, Any]) -> bool:
        try:
            lease = self._locks.get(str(event["key"]))
        except BackendUnavailable:
            return False
        return lease is None or lease.owner != event["owner"]


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
