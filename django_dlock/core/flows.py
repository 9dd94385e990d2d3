"""What a ``Lock`` does, written once for threads and coroutines.

Each flow is a generator that yields the calls of the backend; ``acquire`` has the drivers.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from .. import clock, process, signals
from ..backends.base import BaseLockBackend
from ..exceptions import (
    AcquireTimeout,
    AlreadyHeld,
    BackendUnavailable,
    LeaseLost,
    LockError,
    LockNotAcquired,
    NotHeld,
)
from ..lease import Contention, LeaseInfo, LeaseRequest
from . import acquire, cleanup, dispatch, transactions, watchdog
from .acquire import Flow, drive
from .held_lease import HeldLease, registry
from .lock_leases import Caller, HandleLeases
from .options import LockOptions, Seconds, lease_ttl

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LockFlows"]

logger = logging.getLogger("django_dlock")

# After these the backend has nothing of ours left to be released.
_NOTHING_TO_RELEASE = ("broken", "exit", "fork", "refused")


class LockFlows:
    """The mechanics of a ``Lock``, and what to do if an interrupt cuts one of its flows short.

    Attributes:
        name: The lock's name.
        contention: The last holder that an acquire of this handle met.
        _sender: Whom signals name, subclasses of ``Lock`` included.
    """

    __slots__ = ("__weakref__", "_backend", "_leases", "_options", "contention", "name")

    _sender: ClassVar[type]

    def __init__(
        self, name: str, backend: BaseLockBackend, leases: HandleLeases, options: LockOptions
    ) -> None:
        self.name = name
        self.contention: Contention | None = None
        self._backend = backend
        self._leases = leases
        self._options = options

    @property
    def alias(self) -> str:
        """The alias in ``DLOCKS``."""
        return self._backend.alias

    def _current(self, verb: str) -> HeldLease:
        """The held lease, of which a loss may not have been noticed yet."""
        held = self._leases.current()
        if held is None:
            raise NotHeld(f"It is not held, so it cannot be {verb}", self.name, self.alias)
        return held

    # -- acquire -----------------------------------------------------------------------

    def _request(self, patience: float | None) -> LeaseRequest:
        options = self._options
        # Positional arguments take half the time, and every acquire passes here.
        return LeaseRequest(
            self.name,
            os.urandom(16).hex(),
            min(options.ttl, options.max_hold),
            "held",
            options.metadata_json,
            patience != 0,
            "",
            options.renew,
        )

    def _enter_flow(
        self, caller: Caller, patience: float | None, requests: list[LeaseRequest]
    ) -> Flow[Self]:
        """Like ``_acquire_flow``, for a ``with`` block, which needs the lock.

        Raises:
            LockNotAcquired: The patience ended.
        """
        entered = yield from self._acquire_flow(caller, patience, requests)
        if entered is not None:
            return entered
        if self._found(caller) is not None:
            raise LockNotAcquired(
                "It is held by this very thread, task or handle", self.name, self.alias
            )
        try:
            info: LeaseInfo | None = yield "get", (self.name,), {}
        except BackendUnavailable:
            info = None
        holder = "" if info is None else info.holder
        if patience:
            text = f"The lock is held by someone else; not free within {patience:g} s"
            refusal: LockNotAcquired = AcquireTimeout(text, self.name, self.alias, holder)
        else:
            refusal = LockNotAcquired(
                "The lock is held by someone else", self.name, self.alias, holder
            )
        refusal.info = info
        raise refusal

    def _found(self, caller: Caller) -> HeldLease | None:
        """The caller's own lease, if it has one: waiting for it would never end."""
        key, _, meets = caller
        held = registry.find(self._backend, self.name, key)
        if held is None and meets is not None:
            held = registry.find(self._backend, self.name, meets)
        return held

    def _acquire_flow(
        self, caller: Caller, patience: float | None, requests: list[LeaseRequest]
    ) -> Flow[Self | None]:
        """Returns ``None`` if the patience ended.

        Args:
            requests: The one to begin with; more are added, and only the last one may be granted.
        """
        key, known_as, _ = caller
        held = self._found(caller)
        if held is not None:
            if self._options.reentrant and held.entries is not None:
                self._leases.enter(held, requests[-1].owner)
                return self
            if patience == 0:
                return None
            raise AlreadyHeld(
                "Already held by this thread, task or handle; waiting for it would never end",
                self.name,
                self.alias,
            )
        started, outer = clock.now(), transactions.outermost()
        self.contention = None
        left = patience
        while True:
            lease = yield from acquire.grant_flow(
                self._backend, requests[-1], patience=left, met=self._met, broke=self._broke
            )
            if lease is not None:
                break
            if patience is not None and (left := started + patience - clock.now()) <= 0:
                return None
            # This attempt was granted and ended before we knew. Its owner is granted nothing more.
            requests.append(self._request(patience))
        held = HeldLease(lease, self._backend, key, self._options, handle=self, sender=self._sender)
        held.known_as, held.outer_transactions = known_as, outer
        self._leases.add(held)
        waited = held.acquired_at - started
        if dispatch.has_receivers(signals.acquired, self._sender):
            dispatch.send(signals.acquired, self._sender, waited=waited, **held.signal_kwargs())
        if waited >= signals.LONG_WAIT:
            dispatch.send(signals.waited_long, self._sender, waited=waited, **held.signal_kwargs())
        return self

    def _cancel(self, request: LeaseRequest, error: BaseException) -> None:
        """Take back an acquire that was interrupted or not answered; it may have been granted."""
        if not isinstance(error, AlreadyHeld | LockNotAcquired):
            self._leases.cancel(request.owner)
            cleanup.cancel_later(self._backend, request)

    def _met(self, contention: Contention) -> None:
        first, self.contention = self.contention is None, contention
        if first:
            logger.info("Lock %r (alias %r) is held by someone else", self.name, self.alias)
            if dispatch.has_receivers(signals.contended, self._sender):
                dispatch.send(signals.contended, self._sender, owner=None, **self._signal_kwargs())

    def _broke(self, contention: Contention) -> None:
        dispatch.send(
            signals.broken,
            self._sender,
            owner=contention.owner,
            reason="holder_dead",
            **self._signal_kwargs(),
        )

    def _signal_kwargs(self) -> dict[str, Any]:
        """The arguments of a signal while this handle holds nothing."""
        metadata = self._options.metadata
        return {"name": self.name, "alias": self.alias, "token": None, "metadata": metadata}

    # -- renew -------------------------------------------------------------------------

    def _renew_flow(self, ttl: Seconds | None) -> Flow[None]:
        held = self._current("renewed")
        held.check()
        seconds = None if ttl is None else lease_ttl(self._backend, ttl, renewed=held.renews)
        sent_at = clock.now()
        if seconds is None:
            renewal = held.renewal(sent_at)
        else:
            renewal = held.renewal_by_holder(seconds, sent_at)
            # It may be due, or end, before the watchdog next wakes.
            watchdog.watch(held)
        (result,) = yield (
            "renew",
            ([renewal],),
            {"process": process.current().id, "deadline": self._backend.call_deadline()},
        )
        if result.outcome == "renewed":
            held.confirm(sent_at, result.ttl, clock.now())
        elif result.outcome == "unanswered":
            text = "A part of the backend that has this lease did not answer"
            raise BackendUnavailable(text, self.name, self.alias)
        else:
            held.lose_by_outcome(result.outcome)
        held.check()

    # -- release -----------------------------------------------------------------------

    def _exit_flow(self, held: HeldLease | None, error: BaseException | None) -> Flow[None]:
        """What the end of a block does, whose body ended with ``error``."""
        if held is None:
            return
        if held.ended and held.lost_reason == "fork":
            # Owned by the parent process.
            self._leases.discard(held, lost=True)
            return
        try:
            yield from self._release_flow(held)
        except BackendUnavailable as trouble:
            # The body ran under a lease that was good to the end. Failing it now would make
            # its caller repeat work that is done.
            logger.warning("%s", trouble)
        except LeaseLost as loss:
            if error is None:
                raise
            if sys.version_info >= (3, 11) and not isinstance(error, LeaseLost):
                error.add_note(f"The lock was lost meanwhile: {loss}")

    def _release_flow(self, held: HeldLease) -> Flow[None]:
        if self._options.hold_until == "commit" and transactions.run_after(
            partial(self._release_late, held)
        ):
            return
        if not self._leases.exit(held):
            return
        self._warn_of_transaction(held)
        # From here on it is not renewed, and its handle says that it is not held.
        self._leases.discard(held)
        reason, deadline = held.lost_reason, self._backend.call_deadline()
        if reason not in _NOTHING_TO_RELEASE:
            try:
                options = {"min_hold": held.options.min_hold, "deadline": deadline}
                outcome = yield "release", (held.name, held.owner), options
            except BaseException as error:
                # It may be done or not: it is repeated in the background.
                request = LeaseRequest(held.name, held.owner, held.ttl)
                cleanup.cancel_later(self._backend, request, min_hold=held.options.min_hold)
                held.end_released()
                if reason is None or not isinstance(error, BackendUnavailable):
                    raise
            else:
                if reason is None:
                    held.end_by_release(outcome)
        if held.state == "lost":
            self._leases.ended = held
            raise held.end_error()

    def _warn_of_transaction(self, held: HeldLease) -> None:
        database = transactions.open_since(held.outer_transactions)
        if database is not None:
            logger.warning(
                "Lock %r (alias %r) is released inside a transaction on database %r that began "
                "before it was acquired: the next holder will not see what was written. Acquire "
                "it before the transaction, or use hold_until='commit'",
                self.name,
                self.alias,
                database,
            )

    def _release_late(self, held: HeldLease) -> None:
        """Release after a transaction; there is no caller left to raise to."""
        try:
            drive(self._release_flow(held), self._backend)
        except (LeaseLost, BackendUnavailable) as error:
            logger.warning("After the transaction: %s", error)
        except BaseException as error:
            # Django goes on after a soft limit, too, and nobody would release it any more.
            self._stop(held, error)
            raise

    def _stop(self, held: HeldLease | None, error: BaseException) -> None:
        """After an interrupted release: nothing is renewed any more."""
        if not isinstance(error, LockError):
            held = held or self._leases.current()
            if held is not None:
                held.stop_renewing("interrupted")
