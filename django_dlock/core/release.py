"""How a lock is renewed by its holder, and released.

Written once for threads and coroutines; see ``acquire``.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial

from .. import clock
from ..exceptions import BackendUnavailable, LeaseLost, LockError, NotHeld
from ..lease import LeaseRequest
from ..log import logger
from . import cleanup, transactions, watchdog
from .acquire import AcquireFlows
from .flow import Flow, adrive, call, drive, in_turn, renew_flow
from .held_lease import HeldLease
from .holds import Hold
from .limits import limit_flow
from .options import Seconds, lease_ttl

# After these the backend has nothing of ours left to be released.
_NOTHING_TO_RELEASE = ("broken", "exit", "fork", "refused")


class LockFlows(AcquireFlows):
    """The mechanics of a ``Lock``, and what to do if an interrupt cuts one of its flows short."""

    __slots__ = ("_late_release",)

    _late_release: weakref.ref[transactions.AfterTransactions]
    """Releases it after a transaction; unset if no release has had to wait for one."""

    def _current(self, verb: str) -> Hold:
        """The present hold; its lease may be lost without anybody having noticed yet."""
        hold = self._holds.current()
        if hold is None:
            raise NotHeld(f"It is not held, so it cannot be {verb}", self.name, self.alias)
        return hold

    # -- renew -------------------------------------------------------------------------

    def _renew_flow(self, held: HeldLease, ttl: Seconds | None) -> Flow[None]:
        held.check()
        seconds = None if ttl is None else lease_ttl(self._backend, ttl, renewed=held.renews)
        sent_at = clock.now()
        if seconds is None:
            renewal = held.renewal(sent_at)
        else:
            renewal = held.renewal_by_holder(seconds, sent_at)
            # It may be due, or end, before the watchdog next wakes.
            watchdog.watch(held)
        try:
            result = yield from renew_flow(held.backend, renewal)
            if result.outcome == "unanswered":
                text = "A part of the backend that has this lease did not answer"
                raise BackendUnavailable(text, held.name, self.alias)
        except BackendUnavailable as error:
            held.unanswered(sent_at, error)
            raise
        if result.outcome == "renewed":
            held.renewed(sent_at, result.ttl, clock.now())
        else:
            held.refused(sent_at, result.outcome)
        held.check()

    def _end_within(self, seconds: float) -> None:
        """Let ``max_hold`` end the lease this many seconds from now, if that is earlier.

        Does nothing if other holders have entered it, too. Never raises because of the backend: if
        it does not answer, the lease ends on time for this process, and in the store with its TTL.
        """
        drive(self._end_within_flow(seconds))

    async def _aend_within(self, seconds: float) -> None:
        """As ``_end_within``, for coroutines."""
        await adrive(self._end_within_flow(seconds), self._backend)

    def _end_within_flow(self, seconds: float) -> Flow[None]:
        hold = self._holds.current()
        if hold is None or not hold.lease.active or len(hold.lease.holds) > 1:
            return
        hold.max_end = min(hold.max_end, clock.now() + seconds)
        yield from limit_flow(hold.lease, self._backend)

    # -- release -----------------------------------------------------------------------

    def _exit_flow(
        self, hold: Hold | None, lost: Hold | None, error: BaseException | None
    ) -> Flow[None]:
        """What happens at the end of a ``with`` block that ended with ``error``.

        Args:
            hold: To be released.
            lost: With which the block began, if it was acquired again after a loss.
        """
        loss: LockError | None = None
        if hold is not None:
            if hold.lease.ended and hold.lease.lost_reason == "fork":
                # Owned by the parent process.
                self._holds.discard(hold, lost=True)
                return
            try:
                yield from self._release_flow(hold)
            except BackendUnavailable as trouble:
                # The body ran under a lease that was good to the end. Failing it now would make
                # its caller repeat work that is done.
                logger.warning("%s", trouble, about=hold.lease)
            except LeaseLost as raised:
                loss = raised
        if lost is not None:
            self._holds.discard(lost, lost=True)
            loss = lost.lease.end_error()
        if loss is None:
            return
        if error is None:
            raise loss
        if sys.version_info >= (3, 11) and not isinstance(error, LeaseLost):
            error.add_note(f"The lock was lost meanwhile: {loss}")

    def _release_flow(self, hold: Hold) -> Flow[None]:
        held, until_commit = hold.lease, self._options.hold_until != "release"
        # A loss is raised at once, because the transaction can still be rolled back.
        if until_commit and held.state != "lost":
            late = transactions.run_after(partial(self._release_late, hold))
            if late is not None:
                self._late_release = weakref.ref(late)
                held.late = (*held.late, self._late_release)
                return
        if len(held.holds) > 1:
            lost = not held.active
            self._holds.remove(hold)
            if lost:
                raise held.end_error()
            return
        self._warn_of_transaction(held)
        # From here on it is not renewed, and its handle says that it is not held.
        self._holds.discard(hold)
        reason, backend = held.lost_reason, held.backend
        if reason not in _NOTHING_TO_RELEASE:
            try:
                outcome = yield from in_turn(
                    lambda: call(
                        backend.release,
                        held.name,
                        held.owner,
                        min_hold=held.min_hold,
                        deadline=backend.call_deadline(),
                    )
                )
            except BaseException as error:
                # The release may have happened or not; it is repeated in the background.
                request = LeaseRequest(held.name, held.owner, held.ttl)
                cleanup.cancel_later(backend, request, min_hold=held.min_hold)
                held.end_released(reason="unanswered")
                if reason is None or not isinstance(error, BackendUnavailable):
                    raise
            else:
                if reason is None:
                    held.end_by_release(outcome)
        if held.state == "lost":
            self._holds.ended = held
            raise held.end_error()

    def _warn_of_transaction(self, held: HeldLease) -> None:
        if self._options.hold_until != "release":
            # One that was there before the acquire was refused.
            if self._options.hold_until == "commit" and (database := transactions.manual()):
                logger.warning(
                    "Lock %r (alias %r) is released before the end of the manual transaction on "
                    "database %r, although hold_until='commit': use atomic() there",
                    held.name,
                    self.alias,
                    database,
                    about=held,
                )
            return
        database = transactions.open_since(held.outer_transactions)
        if database is not None:
            logger.warning(
                "Lock %r (alias %r) is released inside a transaction on database %r that began "
                "before it was acquired: the next holder will not see what was written. Acquire "
                "it before the transaction, or use hold_until='commit'",
                held.name,
                self.alias,
                database,
                about=held,
            )

    def _release_late(self, hold: Hold) -> None:
        """Release after a transaction; there is no caller left to raise to."""
        try:
            # It may have been released since.
            if self._holds.has(hold):
                drive(self._release_flow(hold))
        except (LeaseLost, BackendUnavailable) as error:
            logger.warning("After the transaction: %s", error, about=hold.lease)
        except BaseException as error:
            # Django only logs the error of a soft time limit, so nobody would release the lock.
            self._stop(hold, error)
            raise

    def _stop(self, hold: Hold | None, error: BaseException) -> None:
        """After an interrupted release: nothing is renewed any more."""
        if not isinstance(error, LockError):
            hold = hold or self._holds.current()
            if hold is not None:
                hold.lease.stop_renewing("interrupted")
