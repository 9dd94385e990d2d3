"""The contract between lock handle, watchdog and backend.

A backend grants, renews, releases, waits, lists and breaks leases. It knows nothing of
handles, threads or signals; those who call it know nothing of servers.

Rules that hold for every method and every backend:

* "Held by another" is an answer (``Contention``), "lost" is an answer (``Fate``), "no answer"
  is ``BackendUnavailable``. They never share a value.
* Every write names the owner, and does nothing to a lease of another owner.
* Every command is idempotent for its owner: a caller that repeats it because the reply was
  lost gets the answer of the first one.
* ``deadline`` is a moment on ``clock.now()``. The call has returned or raised by then, over
  resolving, connecting, handshake, command and retries together.
* Methods are called from many threads at once. An instance is made once per process and
  forgets its connections in a forked child.
* The backend's clock alone decides when a lease ends; no wall clock of a client is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from .. import clock
from ..lease import (
    Contention,
    Fate,
    Lease,
    LeaseInfo,
    LeasePage,
    LeaseQuery,
    LeaseRequest,
    Renewal,
)

__all__ = ["AliasOptions", "BaseLockBackend", "Fates", "LeaseInfos", "PendingRenewal"]

# Named here because inside the class ``list`` is a method.
Fates = list[Fate]
LeaseInfos = list[LeaseInfo]


@dataclass(frozen=True)
class AliasOptions:
    """One validated entry of ``DLOCKS``; a backend is built from it alone.

    Attributes:
        cache: Alias in ``CACHES`` whose parameters to connect with, or ``None``.
        location: URL to connect to, or ``None``.
        ttl, wait, max_hold: Seconds; ``wait`` of ``None`` waits for ever.
        options: ``OPTIONS``, untouched but for ``command_timeout``.
        command_timeout: Seconds that one command may take.
    """

    alias: str
    backend: str
    cache: str | None = None
    location: str | None = None
    key_prefix: str = "dlock"
    ttl: float = 30.0
    wait: float | None = 10.0
    max_hold: float = 86400.0
    command_timeout: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


class PendingRenewal(Protocol):
    """A renewal that was sent and may not be answered yet.

    The one renewal thread serves many aliases; it must be able to turn to the next while this
    one does not answer.
    """

    def wait(self, timeout: float) -> bool:
        """Block for at most ``timeout`` seconds; true once ``result`` will not block."""

    def result(self) -> Fates:
        """One fate per renewal, in order.

        Raises:
            BackendUnavailable: No answer; each lease may or may not be prolonged.
        """

    def abandon(self) -> None:
        """Give up on the answer and free what it holds; never blocks, never raises."""


class BaseLockBackend(ABC):
    """Grants leases over one store. See the module for the rules."""

    supports_wakeup: ClassVar[bool] = False
    """A waiter is woken by the release instead of asking again."""
    supports_listing: ClassVar[bool] = False
    """``page`` and what is built upon it, and ``get``, work."""
    is_shared: ClassVar[bool] = True
    """Other processes see the leases."""

    def __init__(self, options: AliasOptions) -> None:
        """Keep the options; connect to nothing.

        Raises:
            InvalidLockBackend: ``OPTIONS`` has an unknown key or a bad value.
        """
        self.options = options
        self.alias = options.alias
        self.command_timeout = options.command_timeout

    # -- leases ------------------------------------------------------------------------

    @abstractmethod
    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        """Grant the name if it is free, or held by ``request.replaces``, in one step; try once.

        Repeated with the same owner it finds its own grant. An owner whose ``undo`` came first
        is answered with contention, so that a late packet cannot bring an orphan to life.

        Raises:
            BackendUnavailable: The outcome is unknown; the caller will ``undo``.
        """

    @abstractmethod
    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        """Block until the name may be free, at the latest until ``until`` (``clock.now()``).

        Sleeps no longer than the holder's remaining TTL. ``None`` says "try again" and may be
        wrong. A lease is returned where the release itself handed it over. ``interrupted`` does
        no I/O at the backend; it is asked about twice a second and ends the wait when true.

        Raises:
            BackendUnavailable: The backend cannot be reached.
        """

    @abstractmethod
    def renew(self, renewals: Sequence[Renewal], *, process: str, deadline: float) -> Fates:
        """Prolong each lease whose owner still holds it, and note that ``process`` lives.

        One round trip for up to 500 leases. An empty sequence is a bare heartbeat. A shorter
        TTL takes nothing away from what an earlier renewal gave: they may overtake each other.

        Args:
            process: ``ProcessIdentity.id``.

        Returns:
            One fate per renewal, in order; ``renewed`` or why not.

        Raises:
            BackendUnavailable: No answer; each lease may or may not be prolonged.
        """

    def start_renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> PendingRenewal:
        """Send a renewal without waiting for its answer.

        This default waits on a thread of its own; a backend whose client can send and read
        apart does without.
        """
        return _ThreadedRenewal(lambda: self.renew(renewals, process=process, deadline=deadline))

    @abstractmethod
    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Fate:
        """Free the name if ``owner`` still holds it, and wake a waiter.

        Args:
            min_hold: Seconds since the grant during which the name stays taken all the same
                (kind ``cooling``).

        Returns:
            ``released``, also where an earlier release of the same owner did it; else
            ``expired``, ``broken`` or ``refused``.

        Raises:
            BackendUnavailable: The outcome is unknown.
        """

    @abstractmethod
    def undo(self, request: LeaseRequest, *, deadline: float) -> None:
        """Take back an attempt of which nobody waits for the answer any more.

        Frees the name if the attempt was granted, keeps it from being granted later, forgets
        it as a waiter and passes on a wake-up that it may have received.

        Raises:
            BackendUnavailable: Not known to be done; the caller repeats it.
        """

    @abstractmethod
    def locked(self, name: str, *, deadline: float) -> bool:
        """Whether anybody holds the name now, of whatever kind."""

    # -- operators ---------------------------------------------------------------------

    @abstractmethod
    def get(self, name: str) -> LeaseInfo | None:
        """What is known of the name, ``None`` where it is free."""

    @abstractmethod
    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        """Leases that live now, damaged ones included, and how many the query finds in all.

        Ends of leases that nobody has seen yet may count until they are.

        Args:
            limit: At most so many; ``None`` for all, 0 to count them only.
        """

    def list(
        self,
        *,
        prefix: str = "",
        contains: str = "",
        kind: str = "",
        holder_state: str = "",
        sort: Sequence[str] = (),
        offset: int = 0,
        limit: int | None = None,
    ) -> LeaseInfos:
        """The leases that live now; see ``LeaseQuery``."""
        query = LeaseQuery(prefix, contains, kind, holder_state, sort)
        return self.page(query, offset=offset, limit=limit).infos

    def count(
        self, *, prefix: str = "", contains: str = "", kind: str = "", holder_state: str = ""
    ) -> int:
        """How many leases ``list`` would give without a limit."""
        return self.page(LeaseQuery(prefix, contains, kind, holder_state), limit=0).total

    @abstractmethod
    def break_(self, name: str, *, owner: str, reason: str = "broken") -> bool:
        """End the lease of ``owner`` whoever runs it; its next renewal is told ``broken``.

        Returns:
            False where the name has another owner by now, or none: nothing was changed.
        """

    @abstractmethod
    def last_end(self, name: str) -> tuple[str, Fate] | None:
        """Last owner of a name and how its lease ended, remembered for one TTL or more.

        ``None`` while somebody holds it, or where nothing is remembered.
        """

    @abstractmethod
    def goodbye(self, process: str, *, deadline: float) -> None:
        """Note that the process has ended in order; proof of its death from now on."""

    def eviction_policy(self) -> str | None:
        """How the store drops data of ours when it is full; ``None`` where it does not.

        For a check before a deployment.

        Raises:
            BackendUnavailable: No answer.
        """
        return None

    # -- coroutines --------------------------------------------------------------------

    async def acall(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await one of the methods above, by its name.

        This default runs it on a thread of its own: a pool would let many waiters keep the
        holder's release from getting a thread. A backend with an asynchronous client overrides
        it. A cancelled call may still be carried out; its caller will ``undo`` it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(settler: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                settler(value)

        def run() -> None:
            try:
                outcome, settler = getattr(self, method)(*args, **kwargs), future.set_result
            except BaseException as error:
                outcome, settler = error, future.set_exception
            # The loop may be closed by now: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, settler, outcome)

        threading.Thread(target=run, name=f"dlock-{method}", daemon=True).start()
        return await future

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        """Forget connections and thread locks of the parent; runs in the child, before
        anything else there. Never talks to the server."""

    def close(self) -> None:
        """Close idle connections. The backend may be used again."""

    def call_deadline(self) -> float:
        """The deadline of a call that has no patience of its own."""
        return clock.now() + self.command_timeout


class _ThreadedRenewal:
    """A blocking ``renew`` on a thread of its own."""

    def __init__(self, renew: Callable[[], Fates]) -> None:
        self._done = threading.Event()
        self._fates: Fates = []
        self._error: BaseException | None = None
        thread = threading.Thread(
            target=self._run, args=(renew,), name="dlock-renewal-call", daemon=True
        )
        thread.start()

    def _run(self, renew: Callable[[], Fates]) -> None:
        try:
            self._fates = renew()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, timeout: float) -> bool:
        return self._done.wait(timeout)

    def result(self) -> Fates:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._fates

    def abandon(self) -> None:
        """The thread ends by itself at its deadline; its answer is nobody's."""
