"""Breaks the lease of a delivery whose process has died.

The parent of a pool learns of a child's death before any other process can prove it. It made the
owner of each delivery, so it knows which lease will never be released. Locks that the body
acquired itself have other owners; the next process that waits for one of them breaks it.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from django.db import connections

from ... import clock, process, tenancy
from ...core import cleanup
from ...exceptions import BackendUnavailable
from ...handler import locks
from ...keys import Key
from ...lease import LeaseRequest
from ...log import logger
from ...operators import inspection
from .. import owners, results
from ..options import TaskWithOptions

START = 0.2
"""Seconds that a recovery waits at most for ``go``."""
POLL_INTERVAL = 0.02
"""Seconds between two checks whether a process has died."""
DYING = 10.0
"""Seconds that a process may take to die. One that survives keeps its lease."""
CALLS = 3
"""Backend calls of one recovery; their timeouts limit how long callers wait for it."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A delivery whose process is reported as dead, or is about to be killed.

    Attributes:
        key: Computes the lock's name from ``args`` and ``kwargs`` of the message.
        owner: The only owner that the delivery uses in that process.
        process: Must be proven dead before the lease is broken.
        scope: That of the message's tenant. If another one was active in the process, its lock is
            left to the next one who waits for it.
    """

    task: TaskWithOptions
    task_id: str
    key: Key
    args: Any
    kwargs: Any
    owner: str
    process: process.ProcessIdentity
    scope: str = ""

    def __str__(self) -> str:
        return f"Task {self.task.name}[{self.task_id}]"


class Recovery:
    """Breaks one suspect's lease, on its own thread.

    Finding the lock's name may run project code, and the backend may not answer. Neither may
    block the worker's event loop or another recovery.
    """

    def __init__(self, suspect: Suspect) -> None:
        self._suspect = suspect
        self._backend = locks[suspect.task.dlock_options.lock["using"]]
        self._free, self._ended = threading.Event(), threading.Event()
        self._waited_for_until = clock.now() + START + CALLS * self._backend.command_timeout

    def start(self) -> None:
        """Start the thread; if no thread can be started, the recovery ends at once."""
        try:
            threading.Thread(target=self._run, name="dlock-recovery", daemon=True).start()
        except RuntimeError as error:
            logger.warning(
                "%s: its lock could not be recovered: %s", self._suspect, error, about=self._suspect
            )
            self._ended.set()

    def go(self) -> None:
        """Let the recovery begin.

        It must not run while the pool forks a new child: a lock that this thread holds at that
        moment, perhaps inside a C library, would stay locked in the child for ever.
        """
        self._free.set()

    @property
    def can_begin(self) -> bool:
        """Whether its process is dead, so that only the backend can delay the recovery."""
        return process.death_proof(self._suspect.process) is not None

    @property
    def over(self) -> bool:
        """Whether it has ended, or has taken so long that callers stop waiting for it."""
        return self._ended.is_set() or clock.now() >= self._waited_for_until

    def wait(self, at_most: float = math.inf) -> bool:
        """Wait until it is ``over``, or for ``at_most`` seconds; returns whether it has ended."""
        return self._ended.wait(min(at_most, max(0.0, self._waited_for_until - clock.now())))

    def _run(self) -> None:
        try:
            # The loop may be busy or waiting for its broker, so wait only for a short time.
            self._free.wait(START)
            try:
                self._recover()
            finally:
                # A ``lock_key`` callable may have opened connections on this thread.
                connections.close_all()
        except BaseException as error:
            suspect, private = self._suspect, not self._suspect.task.store_arguments
            logger.error(
                "%s: its lock could not be recovered: %s",
                suspect,
                results.describe(error, private=private),
                # A traceback ends with the text of the error.
                exc_info=None if private else error,
                about=suspect,
            )
        finally:
            process.thread_ends()
            self._ended.set()

    def _recover(self) -> None:
        suspect, backend = self._suspect, self._backend
        options = suspect.task.dlock_options
        with tenancy.of_message(suspect.scope):
            name = tenancy.full(suspect.key(suspect.args, suspect.kwargs))
        if not _dies(suspect.process):
            logger.warning(
                "%s: process %d is still alive",
                suspect,
                suspect.process.pid,
                about=suspect,
                name=name,
            )
            return
        attempt = LeaseRequest(name, suspect.owner, options.lock.get("ttl", backend.options.ttl))
        try:
            self._break(name)
            # A command of the dead process may still arrive.
            backend.cancel_acquire(attempt, deadline=backend.call_deadline())
        except BackendUnavailable as error:
            logger.warning(
                "%s: its lock will be released later: %s", suspect, error, about=suspect, name=name
            )
            cleanup.cancel_later(backend, attempt)

    def _break(self, name: str) -> None:
        lease = self._backend.get(name)
        if lease is None or lease.kind != "held":
            return
        if not owners.is_of_delivery(lease.owner, self._suspect.owner):
            return
        if inspection.break_lease(lease, reason="holder_dead"):
            logger.warning(
                "Lock %r (alias %r) is free: %s died with it",
                name,
                self._backend.alias,
                self._suspect,
                about=lease,
                reason="holder_dead",
                task_id=self._suspect.task_id,
            )


def _dies(suspect: process.ProcessIdentity) -> bool:
    """Wait until a process has died; returns ``False`` if it survives."""
    patience_ends = clock.now() + DYING
    while process.death_proof(suspect) is None:
        if clock.now() >= patience_ends:
            return False
        time.sleep(POLL_INTERVAL)
    return True
