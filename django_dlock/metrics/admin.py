"""Counts for the page of lock statistics in the admin.

What a process counts is added up in memory, and written to a table about every minute, if there is
anything new, by a thread that ends when there is nothing to count. A database that is down delays
nothing; what could not be written for ten minutes is discarded.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping

from django.db import Error, OperationalError
from django.db.utils import InterfaceError

from .. import clock, process
from ..backends.failover.own_connection import OwnConnection
from ..core import dispatch
from ..databases.errors import explained
from ..log import logger
from ..operators.audit import is_defined, not_while_forking
from ..records import retention
from . import table
from .config import MetricsSettings
from .counts import Counts, Minutes
from .instruments import ATTEMPTS, Instrument

EVERY = (30.0, 60.0)
"""Seconds between two statements; random, so that processes do not write at the same time."""
WITHIN = 10.0
"""Seconds for a statement."""
PURGED_ONCE_IN = 100
"""On average, one statement in this many is followed by the deletion of old rows. By chance, so
that no process keeps count, and processes that live for seconds take part."""


class AdminExporter:
    """The counts of this process, and the thread that writes them."""

    def __init__(self) -> None:
        self._closed = False
        self._begin()
        process.at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()
        self._thread: threading.Thread | None = None
        # Set for what must be written at once.
        self._due = threading.Event()
        self._failing = False
        # Before the first count, because a process may end while that is still in the queue.
        process.at_exit(self._end_of_process)

    def add(self, instrument: Instrument, value: float, labels: Mapping[str, str]) -> None:
        if self._closed or (instrument is ATTEMPTS and labels["outcome"] == "acquired"):
            # Each acquired lock also has a waiting time, and those are counted.
            return
        if instrument.kind == "counter" and not value:
            # What has no row counts as 0.
            return
        with self._lock:
            self._counts.add(instrument, value, labels)
            if self._thread is None or not self._thread.is_alive():
                self._start()

    def close(self) -> None:
        self._closed = True
        self._finish()
        with self._lock:
            # What could not be written now is not tried again at the end of the process.
            self._counts = Counts()

    def _start(self) -> None:
        # Again: multiprocessing forgets in a child what was registered at the fork.
        process.at_exit(self._end_of_process)
        self._thread = threading.Thread(target=self._run, name="dlock-statistics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # The interpreter is ending.
            self._thread = None

    def _end_of_process(self) -> None:
        # The last events may not have been counted yet.
        dispatch.settle(dispatch.PATIENCE_AT_EXIT)
        self._finish()
        if self._thread is None and not self._counts.is_idle:
            # No thread can start any more; see ``supervisor``.
            dispatch.rows.post(self._flush_or_tell, "The lock statistics of the last minute")
            dispatch.settle(dispatch.PATIENCE_AT_EXIT)

    def _finish(self) -> None:
        """Let the thread write what there is, and end; in a second at most."""
        thread = self._thread
        self._due.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(dispatch.PATIENCE_AT_EXIT)

    def _run(self) -> None:
        while True:
            last = self._due.wait(random.uniform(*EVERY))
            self._flush_or_tell()
            with self._lock:
                if last or self._counts.is_idle:
                    self._due.clear()
                    self._thread = None
                    break
        process.thread_ends()

    def _flush_or_tell(self) -> None:
        try:
            self._flush()
        except BaseException as error:
            if not self._failing:
                # Once, until it works again.
                self._failing = True
                # With what to run, if the table is missing.
                told = explained(error, table.database()) if isinstance(error, Error) else error
                trace = None if isinstance(error, Error) else error
                logger.warning("Lock statistics are not written: %s", told, exc_info=trace)

    def _flush(self) -> None:
        """Write what there is; one statement, or none."""
        with self._lock:
            minutes = self._counts.take()
        database = table.database()
        if not minutes or not is_defined(database):
            return
        # A connection that is cut if the database says nothing.
        own = OwnConnection(lambda: database, WITHIN)
        with not_while_forking(database):
            try:
                self._write(minutes, own)
                self._failing = False
                if not random.randrange(PURGED_ONCE_IN):
                    with own.until(clock.now() + WITHIN):
                        retention.purge_statistics(using=database)
            finally:
                own.close()

    def _write(self, minutes: Minutes, own: OwnConnection) -> None:
        try:
            with own.until(clock.now() + WITHIN):
                table.write(minutes)
        except (OperationalError, InterfaceError):
            # The database is down or silent, or another process has locked the rows.
            with self._lock:
                self._counts.put_back(minutes)
            raise


def make(settings: MetricsSettings) -> AdminExporter:
    """The exporter of this process."""
    return AdminExporter()
