"""The contract between lock handle, watchdog and backend.

A backend grants, renews, releases, waits and breaks leases; ``listing`` has what only some can.
It knows nothing about handles, threads or signals; its callers know nothing about servers.

Rules that hold for every method and every backend:

* "Held by someone else" is an answer (``Contention``), "lost" is an answer (``Outcome``), "no
  answer" is ``BackendUnavailable``. They never share a value.
* Every write names the owner, and does not change a lease of another owner.
* Every command is idempotent for its owner: a caller that repeats it because the reply was
  lost gets the answer of the first one.
* ``deadline`` is a time on ``clock.now()``. The call returns or raises by then; this includes
  name resolution, connecting, handshake, command and retries.
* Methods are called from many threads at once. There is one instance per process; a forked
  child discards its connections.
* Only the backend's clock decides when a lease ends; no client's wall clock is sent.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal, ParamSpec, TypeVar, cast

from .. import clock
from ..lease import (
    Contention,
    Lease,
    LeaseInfo,
    LeaseRequest,
    Outcome,
    ReleaseRequest,
    Renewal,
)
from .alias import AliasOptions, BackendOptions, Fact, Problem, StoreSwitch
from .calls import Calls
from .listing import Listing
from .pauses import pause
from .pending_renewal import PendingRenewal, RenewalResults, SubmittedRenewal

__all__ = [
    "AliasOptions",
    "BackendOptions",
    "BaseLockBackend",
    "Capability",
    "Fact",
    "PendingRenewal",
    "Problem",
    "RenewalResults",
    "StoreSwitch",
]

P = ParamSpec("P")
T = TypeVar("T")

Capability = Literal["min_hold", "parking", "reservations", "memory_of_ends", "wakeup", "listing"]
"""Features that only some stores have. An option that needs a missing one is refused.

* ``min_hold``: a released name stays taken for a while, as kind ``cooling``.
* ``parking``: a lease of kind ``parked`` keeps a name for a task between its retries, and
  ``LeaseRequest.replaces`` takes the name over in one step.
* ``reservations``: a lease of kind ``reserved`` stands for a task that waits in its queue.
* ``memory_of_ends``: the last owners of a name, and how their leases ended, are remembered for
  at least one TTL. For a busy name, perhaps only the last ten are remembered, and losses longer
  than releases. Without it, a repeated release is ``unknown``, and so is the renewal of a lease
  that has ended; and a late copy of a request that was cancelled or released may still be granted,
  and then blocks the name until its TTL ends.
* ``wakeup``: a release wakes a waiter. Without it, waiters ask again, with growing pauses.
* ``listing``: ``page``, and so ``list`` and ``count``; and ``waiters``, unless
  ``LeaseInfo.unknown`` names ``waiting``. Without it, operators see only the name of the alias.
"""


class BaseLockBackend(Listing, ABC):
    """Grants leases in one store. See the module for the rules."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    """See ``Capability``."""
    own_options: ClassVar[type[BackendOptions] | None] = None
    """The table of its own keys of ``OPTIONS``; without one, ``problems`` checks them."""
    is_shared: ClassVar[bool] = True
    """Whether other processes see the leases."""
    renewals_per_call: ClassVar[int] = 500
    """The most leases that one call renews or releases."""
    heartbeat: ClassVar[float | None] = 5.0
    """Seconds after which ``renew`` is called even if nothing is due, to show that the process
    is alive; ``None`` if the store's own sessions show that."""

    other: Callable[[str], BaseLockBackend]
    """Returns the backend of another alias, one of ``aliases_named``; set by ``locks``."""

    report_end: Callable[[str, Outcome], object] = staticmethod(lambda owner, outcome: None)
    """Tells the holder at once that the lease of this owner has ended, for a store that learns
    of it before the next renewal. Set by the watchdog; any thread may call it; it never blocks."""
    report_doubt: Callable[[], object] = staticmethod(lambda: None)
    """Tells the holders of all renewed leases that the store does not answer; they are renewed as
    soon as it does again. The rules of ``report_end`` apply."""
    report_break: Callable[[str, str, str, LeaseInfo | None], object] = staticmethod(
        lambda alias, name, owner, info: None
    )
    """Tells the project that ``break_`` has ended the lease of an owner, and what is known of it;
    set by ``locks``. It never blocks."""
    report_switch: Callable[[StoreSwitch], object] = staticmethod(lambda switch: None)
    """Tells the project that the locks are kept in another store; set by ``locks``. The rules of
    ``report_end`` apply."""

    def __init__(self, options: AliasOptions) -> None:
        """Keep the options; connect to nothing.

        Raises:
            InvalidLockBackend: ``OPTIONS`` has an unknown key or a bad value.
        """
        self.options = options
        self.alias = options.alias
        self.command_timeout = options.command_timeout
        # The longest TTL that is granted; a longer one is refused where it is set.
        self.max_ttl = math.inf
        self._calls = Calls()

    # -- settings ----------------------------------------------------------------------

    @classmethod
    def problems(cls, options: AliasOptions) -> list[Problem]:
        """Errors in an alias's settings, as far as they can be found without a server."""
        return [] if cls.own_options is None else cls.own_options.problems(options)

    @classmethod
    def warnings(cls, options: AliasOptions) -> list[Problem]:
        """What valid settings put at risk, for ``check --deploy``; asks no server."""
        return []

    @classmethod
    def aliases_named(cls, options: AliasOptions) -> tuple[str, ...]:
        """The other aliases that this one uses."""
        return ()

    def require(self, capability: Capability, option: str) -> None:
        """Refuse an option that needs what the backend cannot do.

        Raises:
            ValueError: The message names the option, the capability and the alias.
        """
        if capability not in self.capabilities:
            raise ValueError(
                f"{option} needs a backend with the capability {capability!r}; that of alias "
                f"{self.alias!r}, {type(self).__name__}, does not have it"
            )

    # -- leases ------------------------------------------------------------------------

    @abstractmethod
    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        """Grant the name if it is free, or held by ``request.replaces``, in one step; try once.

        The granted TTL may be shorter than the requested one. A repeated request with the same
        owner finds its own grant. If ``cancel_acquire`` arrived first, the answer is contention,
        so that a late packet cannot create a lease that has no holder.

        Raises:
            BackendUnavailable: The outcome is unknown; the caller will ``cancel_acquire``.
        """

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        """Block until the name may be free, but not longer than ``until`` (``clock.now()``).

        ``None`` means "try again"; the name may still be held. A lease is returned if a release
        handed it over. ``interrupted`` is called about twice a second, and ends the wait if it
        returns true; it does no I/O at the backend. This default only pauses, longer the longer
        the caller has been waiting.

        Raises:
            BackendUnavailable: The backend cannot be reached.
        """
        time.sleep(pause(request, contention, until))
        return None

    @abstractmethod
    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        """Prolong each lease whose owner still holds it, and record that ``process`` is alive.

        An empty sequence is only a heartbeat. A renewal never shortens a lease, because two
        renewals may overtake each other, unless ``Renewal.shorten`` is set; such a renewal is
        the only one of its call.

        Args:
            renewals: At most ``renewals_per_call``, in one round trip.
            process: ``ProcessIdentity.id``.

        Returns:
            One result per renewal, in order: ``renewed`` with the TTL granted, or why not.

        Raises:
            BackendUnavailable: No answer; each lease may or may not be prolonged.
        """

    def start_renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> PendingRenewal:
        """Send a renewal without waiting for its answer.

        This default uses another thread. Override it if the client can send a command and read
        its reply separately.
        """
        call = partial(self.renew, renewals, process=process, deadline=deadline)
        return SubmittedRenewal(self._calls.submit(call, urgent=True))

    @abstractmethod
    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        """Free the name if ``owner`` still holds it, and wake a waiter.

        Args:
            min_hold: Seconds since the grant during which the name stays taken nevertheless
                (kind ``cooling``); 0 without the capability.

        Returns:
            ``released``, even if an earlier release of the same owner did it; else
            ``expired``, ``broken`` or ``refused``; ``unknown`` from a store that does not
            remember how leases ended, or for a repeated release that it no longer remembers.

        Raises:
            BackendUnavailable: The outcome is unknown.
        """

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        """Release many leases, at the end of a process.

        This default releases them one by one; override it if one round trip can do it.

        Args:
            releases: At most ``renewals_per_call``.

        Raises:
            BackendUnavailable: Some of them may be released and others not.
        """
        return [
            self.release(name, owner, min_hold=min_hold, deadline=deadline)
            for name, owner, min_hold in releases
        ]

    @abstractmethod
    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        """Cancel a request whose answer nobody waits for any more.

        Frees the name if the request was granted, keeps it from being granted later, removes it
        from the waiters, and passes on a wake-up that it may have received.

        Raises:
            BackendUnavailable: It may or may not be cancelled; the caller repeats it.
        """

    @abstractmethod
    def locked(self, name: str, *, deadline: float) -> bool:
        """Whether the name is taken now, by a lease of any kind."""

    # -- one lease: for operators, waiters, records and recoveries ---------------------

    @abstractmethod
    def get(self, name: str) -> LeaseInfo | None:
        """The lease on the name; ``None`` if it is free."""

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        """The leases on those of the names that are held, for pages of many names.

        This default asks for one after the other; override it if one round trip can do it.

        Raises:
            BackendUnavailable: No answer.
        """
        found = ((name, self.get(name)) for name in names)
        return {name: info for name, info in found if info is not None}

    @abstractmethod
    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        """End the lease of ``owner``; the holder's next renewal gets the outcome ``broken``.

        Args:
            deadline: ``None`` for ``command_timeout`` from now.

        Returns:
            ``False`` if the name is free or has another owner by now; then nothing has changed.
        """

    def break_(self, name: str, *, owner: str) -> bool:
        """As ``break_silently``, and report it: the signal ``broken``, and a lock event.

        Raises:
            BackendUnavailable: The outcome is unknown; you can repeat the call.
        """
        info = self.get(name)
        if not self.break_silently(name, owner=owner):
            return False
        known = info if info is not None and info.owner == owner else None
        self.report_break(self.alias, name, owner, known)
        return True

    # -- the end of a process ----------------------------------------------------------

    def deregister(self, process: str, *, deadline: float) -> None:
        """Record that the process ends normally, which is proof of its death from now on.

        This default does nothing; it suits a store whose own sessions show who is alive.
        """

    # -- operators ---------------------------------------------------------------------

    def store_problems(self) -> Sequence[Problem]:
        """Ask the store what is wrong with its own settings, for ``check --deploy``.

        Raises:
            BackendUnavailable: No answer.
        """
        return ()

    def facts(self, *, deadline: float) -> Sequence[Fact]:
        """Ask the store about itself, for ``diagnose_locks``: its version, whether it keeps leases
        through a restart, how full it is. A fact that it does not report is left out.

        Raises:
            BackendUnavailable: No answer.
        """
        return ()

    @property
    def store_epoch(self) -> int | None:
        """How often another store was made active, plus one, as far as this process knows, for
        metrics; ``None`` without fail-over."""
        return None

    def notices(self) -> Sequence[str]:
        """What operators should know now, for the admin; asks no store, and never raises."""
        return ()

    # -- coroutines --------------------------------------------------------------------

    async def acall(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await one of the methods above, such as ``self.acquire``; but see ``async_wait``.

        This default runs it on one of a few threads; urgent calls, such as releases, never
        queue behind others. A call that is cancelled before it begins is not made. One that has
        begun may complete nevertheless; the caller will ``cancel_acquire`` it.

        Raises:
            ConnectionsBusy: No thread became free by the deadline, but other calls were answered.
            BackendUnavailable: No answer by the call's deadline.
        """
        deadline = cast(float | None, kwargs.get("deadline")) or self.call_deadline()
        ends = self.break_silently, self.cancel_acquire, self.release, self.release_many
        urgent = method in (*ends, self.renew)
        call = partial(method, *args, **kwargs)
        return await self._calls.awaited(call, deadline, urgent=urgent, alias=self.alias)

    async def async_wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        """As ``wait``, for coroutines; a waiting coroutine takes no thread."""
        await asyncio.sleep(pause(request, contention, until))
        return None

    def _abandon(self, request: LeaseRequest) -> None:
        """Cancel, on another thread, an acquire that nobody waits for any more."""
        call = partial(self.cancel_acquire, request, deadline=self.call_deadline())
        self._calls.submit(call, urgent=True)

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        """Discard connections and thread locks of the parent. Runs in the child before anything
        else; never talks to the server."""

    def close_unused(self) -> None:
        """Close connections that no call has used for a minute; never waits for the store.

        Called on a background thread when this process has held nothing for a minute.
        """

    def close(self) -> None:
        """Close idle connections. The backend may be used again."""

    def call_deadline(self) -> float:
        """The deadline of a call that starts now: ``command_timeout`` from now."""
        return clock.now() + self.command_timeout
