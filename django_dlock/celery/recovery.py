"""Takes away what a delivery held whose process has died.

The parent of a pool knows of a dead child before anybody could prove it. It gave each delivery
its owner, so that it can name the one lease that nobody will ever release; locks that the body
took for itself have owners of their own, and are left to whoever meets them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import connections

from .. import clock, operations, process, undo
from ..exceptions import BackendUnavailable
from ..handler import locks
from ..keys import Key
from ..lease import LeaseRequest

if TYPE_CHECKING:
    from .task import LockedTask

__all__ = ["Recovery", "Suspect"]

logger = logging.getLogger("django_dlock")

START = 0.2
"""Seconds that a recovery waits at the most for the worker's loop to let it go."""
LOOK_AGAIN = 0.02
"""Seconds between two looks at a process that is to die."""
DYING = 10.0
"""Seconds that a process may take to die. One that goes on, goes on with its lease."""
CALLS = 3
"""Calls of the backend that a recovery consists of; who waits for it waits as long as they may."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A delivery whose process is said to be dead, or about to be.

    Attributes:
        key: Finds the name of its lock from ``args`` and ``kwargs``, those of its message.
        owner: Of the delivery in that process, under which alone it acquires there.
        process: What has to be seen gone before anything is taken away.
    """

    task: LockedTask
    task_id: str
    key: Key
    args: Any
    kwargs: Any
    owner: str
    process: process.ProcessIdentity

    def __str__(self) -> str:
        return f"Task {self.task.name}[{self.task_id}]"


class Recovery:
    """Breaks one suspect's lease, on a thread of its own.

    Finding the lock's name may run code of the project, and the backend may not answer: neither
    may keep a worker's loop, nor another recovery.
    """

    def __init__(self, suspect: Suspect) -> None:
        self._suspect = suspect
        self._backend = locks[suspect.task.dlock_options.lock["using"]]
        self._free, self._ended = threading.Event(), threading.Event()
        self._waited_for_until = clock.now() + START + CALLS * self._backend.command_timeout

    def start(self) -> None:
        """Start the thread; where there are no more threads, end at once."""
        try:
            threading.Thread(target=self._run, name="dlock-recovery", daemon=True).start()
        except RuntimeError as error:
            logger.warning("%s: its lease is not looked for: %s", self._suspect, error)
            self._ended.set()

    def go(self) -> None:
        """Let it begin.

        Not while the pool forks a new child in the dead one's place: that one would have for
        ever what this thread holds at the moment of the fork, within a C library perhaps.
        """
        self._free.set()

    @property
    def can_begin(self) -> bool:
        """Whether its process is gone, so that nothing but the backend has to be waited for."""
        return process.death_proof(self._suspect.process) is not None

    @property
    def over(self) -> bool:
        """Whether nobody needs to wait any longer: it has ended, or takes too long."""
        return self._ended.is_set() or clock.now() >= self._waited_for_until

    def wait(self, at_most: float = math.inf) -> bool:
        """Block until it is ``over``, or for so many seconds; whether it has ended."""
        return self._ended.wait(min(at_most, max(0.0, self._waited_for_until - clock.now())))

    def _run(self) -> None:
        try:
            # The loop may be busy, or wait for its broker.
            self._free.wait(START)
            try:
                self._recover()
            finally:
                # Those which a key of the project's may have used on this thread.
                connections.close_all()
        except BaseException:
            logger.exception("%s: could not find what it held", self._suspect)
        finally:
            self._ended.set()

    def _recover(self) -> None:
        suspect, backend = self._suspect, self._backend
        options = suspect.task.dlock_options
        name = suspect.key(suspect.args, suspect.kwargs)
        if not _dies(suspect.process):
            logger.warning("%s: process %d lives on", suspect, suspect.process.pid)
            return
        attempt = LeaseRequest(name, suspect.owner, options.lock.get("ttl", backend.options.ttl))
        try:
            self._break(name)
            # What the dead process has sent may still be on its way.
            backend.undo(attempt, deadline=backend.call_deadline())
        except BackendUnavailable as error:
            logger.warning("%s: what it held is taken back later: %s", suspect, error)
            undo.schedule(backend, attempt)

    def _break(self, name: str) -> None:
        if not self._backend.supports_listing:
            return
        lease = self._backend.get(name)
        if lease is None or lease.owner != self._suspect.owner or lease.kind != "held":
            return
        if operations.break_lease(lease, reason="holder_dead"):
            logger.warning(
                "Lock %r (alias %r) is free: %s died with it",
                name,
                self._backend.alias,
                self._suspect,
            )


def _dies(suspect: process.ProcessIdentity) -> bool:
    """Wait until a process is seen gone; false where it lives on."""
    patience_ends = clock.now() + DYING
    while process.death_proof(suspect) is None:
        if clock.now() >= patience_ends:
            return False
        time.sleep(LOOK_AGAIN)
    return True
