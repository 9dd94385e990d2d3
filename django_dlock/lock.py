"""``Lock``: the handle that users hold in their hands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from . import clock, conf, events, process, signals, transactions, undo, waiting, watchdog
from .exceptions import (
    AcquireTimeout,
    AlreadyHeld,
    BackendUnavailable,
    LeaseLost,
    LockError,
    LockNotAcquired,
)
from .giving_back import GivingBack
from .handler import locks
from .hold import Hold, HolderKey, registry
from .holdings import Holdings
from .keys import check_name
from .lease import Contention, Lease, LeaseRequest
from .lock_options import DEFAULT, Default, LockOptions, Seconds, default_options, lease_ttl
from .lock_view import LockView
from .waiting import Flow, adrive, drive

if TYPE_CHECKING:
    from typing_extensions import Never, Self

__all__ = ["DEFAULT", "Lock", "unknown_option"]

logger = logging.getLogger("django_dlock")

_NOTHING_ASKED = (None, DEFAULT, True, DEFAULT, None, False, None, None, "release")
"""The defaults of the arguments of ``Lock``."""


class Lock(LockView):
    """A lease on a name that no two holders have at a time.

    Args:
        name: 1 to 255 characters, compared exactly.
        ttl: Seconds that the lease lives without renewal; the alias's ``TTL`` by default.
        wait: Seconds of patience; 0 tries once, ``None`` waits for ever.
        renew: Prolong it in the background while it is held.
        max_hold: Seconds after which renewal ends and the lease with it.
        min_hold: Seconds after the acquisition during which the name stays taken even if it is
            released before.
        reentrant: The holder may acquire again through handles that all say so.
        bound: Held by the acquiring thread, or by the task that entered ``async with``, whose
            end ends the renewal. With ``False`` the handle itself holds, for hand-over.
        using: Alias in ``DLOCKS``.
        metadata: JSON-serialisable facts for operators and signals.
        on_lost: Called once as ``on_lost(lock, reason)`` when the lease ends under its holder,
            on the events thread.
        hold_until: ``"commit"`` releases after the outermost transaction of the thread, if it
            is in one, has ended.

    Raises:
        TypeError, ValueError: An option is wrong, or the TTL is too short to be renewed: it
            must be at least 3 times the alias's ``command_timeout``.
        InvalidLockBackend: ``using`` names no usable alias.
    """

    __slots__ = ("_options",)

    def __init__(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | Default | None = DEFAULT,
        renew: bool = True,
        max_hold: Seconds | Default = DEFAULT,
        min_hold: Seconds | None = None,
        reentrant: bool = False,
        bound: bool = True,
        using: str = "default",
        metadata: Mapping[str, Any] | None = None,
        on_lost: Callable[[Lock, str], object] | None = None,
        hold_until: Literal["release", "commit"] = "release",
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_option(*unknown)
        backend = locks[using]
        super().__init__(check_name(name), backend, Holdings(bound))
        # This is on everybody's path, and most ask for nothing.
        asked = (ttl, wait, renew, max_hold, min_hold, reentrant, metadata, on_lost, hold_until)
        self._options = (
            default_options(backend)
            if asked == _NOTHING_ASKED
            else LockOptions.read(backend, *asked)
        )

    # -- acquire -----------------------------------------------------------------------

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Acquire; the shape of ``threading.Lock``.

        Args:
            blocking: ``False`` tries once.
            timeout: Seconds of patience; ``None`` means this lock's ``wait``, -1 for ever.

        Returns:
            False where the patience ended before the name was free.

        Raises:
            AlreadyHeld: By this very thread, in a blocking call: it would wait for ever.
            BackendUnavailable: No answer within the patience plus ``command_timeout``.
        """
        patience = self._patience(blocking, timeout)
        return self._acquire(self._holdings.thread_key(), patience, self._request(patience))

    async def aacquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """As ``acquire``, for coroutines; the handle itself holds.

        Not the task: before Python 3.12 ``asyncio.wait_for`` runs this in a task of its own,
        whose end would end the renewal.
        """
        patience = self._patience(blocking, timeout)
        return await self._aacquire(self._holdings.handle_key(), patience, self._request(patience))

    def __enter__(self) -> Self:
        patience = self._options.wait
        request = self._request(patience)
        try:
            if self._acquire(self._holdings.thread_key(), patience, request):
                return self
        except LockError:
            raise
        except BaseException:
            # An interrupt between the grant and the block: there will be no __exit__.
            self._take_back(request)
            raise
        raise self._not_acquired()

    async def __aenter__(self) -> Self:
        patience = self._options.wait
        request = self._request(patience)
        if await self._aacquire(self._holdings.task_key(), patience, request):
            return self
        raise self._not_acquired()

    def _patience(self, blocking: bool, timeout: float | None) -> float | None:
        if not blocking:
            if timeout is not None:
                raise ValueError("acquire(blocking=False) tries once; it takes no timeout")
            return 0.0
        if timeout is None:
            return self._options.wait
        if timeout == -1:
            return None
        return conf.seconds(timeout, what="timeout (seconds, or -1 for ever)")

    def _request(self, patience: float | None) -> LeaseRequest:
        options = self._options
        # By position, at half the price: this is on everybody's path.
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

    def _acquire(self, key: HolderKey, patience: float | None, request: LeaseRequest) -> bool:
        known = self._enter_again(key, patience)
        if known is not None:
            return known
        started, outer = clock.now(), transactions.outermost()
        self.contention = None
        try:
            lease = waiting.acquire(
                self._backend, request, patience=patience, met=self._met, broke=self._broke
            )
            return self._granted(key, lease, started, outer)
        except BaseException:
            self._take_back(request)
            raise

    async def _aacquire(
        self, key: HolderKey, patience: float | None, request: LeaseRequest
    ) -> bool:
        if self._options.hold_until == "commit":
            raise TypeError(
                "hold_until='commit' follows the transaction of a thread; a coroutine has none. "
                "Acquire in the synchronous code that runs the transaction"
            )
        known = self._enter_again(key, patience)
        if known is not None:
            return known
        gone: list[bool] = []
        started, outer = clock.now(), transactions.outermost()
        self.contention = None
        try:
            lease = await waiting.aacquire(
                self._backend,
                request,
                patience=patience,
                met=self._met,
                broke=self._broke,
                abandoned=lambda: bool(gone),
            )
            return self._granted(key, lease, started, outer)
        except BaseException:
            gone.append(True)
            self._take_back(request)
            raise

    def _enter_again(self, key: HolderKey, patience: float | None) -> bool | None:
        """The answer to a holder that holds already; ``None`` where it does not."""
        hold = registry.find(self._backend, self.name, key)
        if hold is None:
            return None
        # A depth of 0 says that the hold's own handle does not share it.
        if self._options.reentrant and hold.depth:
            self._holdings.enter_again(hold)
            return True
        if patience == 0:
            return False
        raise AlreadyHeld(
            "Already held by this thread, task or handle; waiting for it would be for ever",
            self.name,
            self.alias,
        )

    def _granted(
        self, key: HolderKey, lease: Lease | None, started: float, outer: tuple[object, ...]
    ) -> bool:
        if lease is None:
            return False
        hold = Hold(lease, self._backend, key, self._options, handle=self, sender=Lock)
        hold.outer_transactions = outer
        self._holdings.add(hold)
        waited = clock.now() - started
        if events.heard(signals.acquired, Lock):
            events.send(signals.acquired, Lock, waited=waited, **hold.facts())
        if waited >= signals.LONG_WAIT:
            events.send(signals.waited_long, Lock, waited=waited, **hold.facts())
        return True

    def _take_back(self, request: LeaseRequest) -> None:
        """Interrupted or unanswered: whatever was granted, nobody will ever hold it."""
        hold = self._holdings.owned_by(request.owner)
        if hold is not None:
            self._holdings.drop(hold)
            hold.end_released()
        undo.schedule(self._backend, request)

    def _met(self, contention: Contention) -> None:
        first, self.contention = self.contention is None, contention
        if first:
            logger.info("Lock %r (alias %r) is held by another", self.name, self.alias)
            if events.heard(signals.contended, Lock):
                events.send(signals.contended, Lock, owner=None, **self._facts())

    def _broke(self, contention: Contention) -> None:
        events.send(
            signals.broken, Lock, owner=contention.owner, reason="holder_dead", **self._facts()
        )

    def _facts(self) -> dict[str, Any]:
        """What signals say where this handle has no grant."""
        metadata = self._options.metadata
        return {"name": self.name, "alias": self.alias, "token": None, "metadata": metadata}

    def hand_over(self) -> None:
        """Let the handle itself hold from now on, as with ``bound=False``.

        For a hold that has to outlive the thread or task that acquired it. The handle must be
        kept: once it is collected, renewal ends. Does nothing where nothing is held.
        """
        self._holdings.hand_over()

    # -- renew -------------------------------------------------------------------------

    def renew(self, ttl: Seconds | None = None) -> None:
        """Prolong the lease now.

        Args:
            ttl: Seconds from now, also for the renewals that follow; the present TTL by default.

        Raises:
            LeaseLost: It was refused.
            NotHeld: There is nothing to renew.
            BackendUnavailable: No answer; it may or may not be prolonged.
            TypeError, ValueError: ``ttl`` is wrong, or too short to be renewed.
        """
        drive(self._renewal(ttl), self._backend)

    async def arenew(self, ttl: Seconds | None = None) -> None:
        """As ``renew``, for coroutines."""
        await adrive(self._renewal(ttl), self._backend)

    def _renewal(self, ttl: Seconds | None) -> Flow[None]:
        hold = self._holdings.current()
        if hold is None:
            raise self._not_held("renewed")
        hold.check()
        if ttl is not None:
            hold.renewal_ttl = lease_ttl(self._backend, ttl, renewed=hold.renews)
        sent_at = clock.now()
        renewal = hold.renewal(sent_at)
        fates = yield (
            "renew",
            ([renewal],),
            {"process": process.current().id, "deadline": self._backend.call_deadline()},
        )
        if fates[0] == "renewed":
            hold.confirm(sent_at, renewal.ttl, clock.now())
            if ttl is not None:
                # It may be due before the watchdog next looks.
                watchdog.watch(hold)
        else:
            hold.lose_by_fate(fates[0])
        hold.check()

    # -- release -----------------------------------------------------------------------

    def release(self) -> None:
        """Give it back; only the owner's own lease is ever freed.

        Raises:
            LeaseLost: The lease was already gone.
            NotHeld: There is nothing to release.
            BackendUnavailable: No answer. Renewal has ended, the release is repeated in the
                background, and the lease ends with its TTL at the latest.
        """
        try:
            self._give_back(self._to_release())
        except LockError:
            raise
        except BaseException:
            self._interrupted()
            raise

    def _give_back(self, hold: Hold) -> None:
        if self._options.hold_until == "commit" and transactions.run_after(
            lambda: self._release_late(hold)
        ):
            return
        if not self._holdings.leave(hold):
            return
        database = transactions.open_since(hold.outer_transactions)
        if database is not None:
            logger.warning(
                "Lock %r (alias %r) is released inside a transaction on database %r that began "
                "before it was acquired: the next holder will not see what was written. Acquire "
                "it before the transaction, or use hold_until='commit'",
                self.name,
                self.alias,
                database,
            )
        self._release(hold)

    async def arelease(self) -> None:
        """As ``release``, for coroutines."""
        try:
            await self._agive_back(self._to_release())
        except LockError:
            raise
        except BaseException:
            self._interrupted()
            raise

    async def _agive_back(self, hold: Hold) -> None:
        if self._holdings.leave(hold):
            await self._arelease(hold)

    def _interrupted(self) -> None:
        """A release was cut short before it began: at least nothing is renewed any more."""
        hold = self._holdings.current()
        if hold is not None:
            hold.stop_renewing("interrupted")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            hold = self._to_leave()
            if hold is not None:
                self._give_back(hold)
        except (LeaseLost, BackendUnavailable) as trouble:
            self._tell(trouble, error)
        except LockError:
            raise
        except BaseException:
            self._interrupted()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            hold = self._to_leave()
            if hold is None:
                return
            if kind is GeneratorExit:
                self._abandon(hold)
            else:
                await self._agive_back(hold)
        except (LeaseLost, BackendUnavailable) as trouble:
            self._tell(trouble, error)
        except LockError:
            raise
        except BaseException:
            self._interrupted()
            raise

    def _abandon(self, hold: Hold) -> None:
        """Let a coroutine that its loop left behind, and that can wait no more, give it back."""
        if self._holdings.leave(hold):
            with GivingBack(hold, self._holdings) as giving:
                if giving.asks:
                    giving.leave_to_undo()

    def _to_leave(self) -> Hold | None:
        """What a block that ends has to release."""
        hold = self._holdings.current()
        if hold is not None and hold.ended and hold.lost_reason == "fork":
            # The parent's lock is the parent's affair.
            self._holdings.drop(hold, lost=True)
            return None
        return hold

    def _tell(self, trouble: LeaseLost | BackendUnavailable, error: BaseException | None) -> None:
        """What the end of a block does with trouble at its release."""
        if isinstance(trouble, BackendUnavailable):
            # The body ran under a lease that was good to the end. Failing it now would make
            # its caller repeat work that is done.
            logger.warning("%s", trouble)
            return
        if error is None:
            raise trouble
        if sys.version_info >= (3, 11) and not isinstance(error, LeaseLost):
            error.add_note(f"The lock was lost meanwhile: {trouble}")

    def _to_release(self) -> Hold:
        hold = self._holdings.current()
        if hold is None:
            raise self._not_held("released")
        return hold

    def _release(self, hold: Hold) -> None:
        giving, backend = GivingBack(hold, self._holdings), self._backend
        try:
            with giving:
                if giving.asks:
                    giving.fate = backend.release(
                        hold.name,
                        hold.owner,
                        min_hold=hold.min_hold,
                        deadline=backend.call_deadline(),
                    )
        except BaseException:
            # An interrupt may strike while the block is entered or left.
            giving.end()
            raise

    async def _arelease(self, hold: Hold) -> None:
        giving, backend = GivingBack(hold, self._holdings), self._backend
        try:
            with giving:
                if giving.asks:
                    giving.fate = await backend.acall(
                        "release",
                        hold.name,
                        hold.owner,
                        min_hold=hold.min_hold,
                        deadline=backend.call_deadline(),
                    )
        except BaseException:
            giving.end()
            raise

    def _release_late(self, hold: Hold) -> None:
        """Release after a transaction; there is no caller left to raise to."""
        try:
            # Not before: the holder may enter again while the transaction lasts.
            if self._holdings.leave(hold):
                self._release(hold)
        except (LeaseLost, BackendUnavailable) as error:
            logger.warning("After the transaction: %s", error)
        except BaseException:
            # Django goes on after a soft limit, too, and nobody would release it any more.
            hold.stop_renewing("interrupted")
            raise

    # -- others ------------------------------------------------------------------------

    def locked(self) -> bool:
        """Whether anybody holds the name; asks the backend.

        Raises:
            BackendUnavailable: No answer.
        """
        return self._backend.locked(self.name, deadline=self._backend.call_deadline())

    async def alocked(self) -> bool:
        """As ``locked``, for coroutines."""
        deadline = self._backend.call_deadline()
        answer: bool = await self._backend.acall("locked", self.name, deadline=deadline)
        return answer

    def _not_acquired(self) -> LockNotAcquired:
        wait = self._options.wait
        if not wait:
            return LockNotAcquired("It is held by another", self.name, self.alias)
        return AcquireTimeout(
            f"It is held by another; not free within {wait:g} s", self.name, self.alias
        )


def unknown_option(name: str, *others: str) -> TypeError:
    if name == "timeout":
        return TypeError(
            "Lock() takes no timeout: in redis-py it is the lease (ttl= here), in threading the "
            "patience (wait= here)"
        )
    return TypeError(f"Lock() got an unexpected keyword argument {name!r}")
