"""``Lock``: the object that users acquire and release."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from asgiref.sync import markcoroutinefunction

from . import conf, process
from .core import transactions
from .core.acquire import this_task, this_thread
from .core.flow import Flow, adrive, call, drive, in_turn
from .core.holds import Caller, HandleHolds, this_caller
from .core.options import DEFAULT, Default, IfUnavailable, LockOptions, Seconds
from .core.status import LockStatus
from .handler import locks
from .lease import LeaseRequest
from .text.names import check_name

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet
    from django.db.models.manager import BaseManager
    from typing_extensions import Never, Self

    from .fencing import FencedInstance, FencedQuerySet

__all__ = ["DEFAULT", "Lock", "of_template"]


T = TypeVar("T")

Acquisition: TypeAlias = Callable[[Caller, float | None, list[LeaseRequest]], Flow[T]]


class Lock(LockStatus):
    """A lease on a name that no two holders have at the same time.

    Args:
        name: 1 to 255 characters, compared exactly; a member of ``TextChoices`` by its value. A
            field such as ``{order_id}`` in it gives a ``LockNameWarning``, because the ``f``
            before the string is probably missing.
            With ``DLOCK_SCOPE``, each acquire puts the scope of the active tenant in front.
        ttl: Seconds that the lease lives without renewal; the alias's ``TTL`` by default.
        wait: Seconds to wait for the lock; 0 tries once, ``None`` waits forever.
        renew: Renew it in the background while it is held.
        max_hold: Seconds after which renewal ends, and the lease with it.
        min_hold: Seconds after the acquire for which the name stays taken, even after a release.
        reentrant: The holder may acquire it again, if all its handles have this option.
        bound: Whether the lock belongs to the acquiring thread, or to the task that entered
            ``async with``; renewal ends when that ends. With ``False``, and after ``aacquire``, it
            belongs to the handle, which you can pass to another thread or task.
        using: Alias in ``DLOCKS``.
        metadata: JSON-serialisable data for operators and signals.
        on_lost: Called as ``on_lost(lock, reason)``, once, on another thread, after a loss.
        hold_until: ``"commit"`` releases after the thread's outermost transaction, if any.
        if_unavailable: If the backend does not answer: ``"raise"`` ``BackendUnavailable``; lock
            the name in this process only (``"local"``), without a token; or do not acquire
            (``"skip"``), as if someone else held it. The alias's ``IF_UNAVAILABLE`` by default.

    Raises:
        TypeError, ValueError: An option is wrong, or a renewed lease has a TTL of less than 3
            times the alias's ``command_timeout``.
        InvalidLockBackend: ``using`` names no usable alias.
    """

    __slots__ = ()

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
        if_unavailable: IfUnavailable | Default = DEFAULT,
        **unknown: Never,
    ) -> None:
        if unknown:
            from .text.mistakes import unknown_option

            raise unknown_option(Lock.__init__.__annotations__, *unknown)
        backend = locks[using]
        options = LockOptions(
            *(backend, ttl, wait, renew, max_hold, min_hold, reentrant, metadata, on_lost),
            *(hold_until, if_unavailable),
        )
        super().__init__(check_name(name), backend, HandleHolds(bound), options)
        if "{" in name:
            from .text.mistakes import warn_of_field

            warn_of_field(name)

    # -- acquire -----------------------------------------------------------------------

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Acquire; takes the arguments of ``threading.Lock.acquire``.

        Args:
            blocking: ``False`` tries once.
            timeout: Seconds to wait; ``None`` means this lock's ``wait``, -1 forever.

        Returns:
            ``False`` if the name did not become free in time, or the backend does not answer and
            ``if_unavailable`` is ``"skip"``.

        Raises:
            AlreadyHeld: This very thread or handle holds it, so a blocking call would never end.
            BackendUnavailable: No answer within the waiting time (at most the alias's
                ``outage_patience``) plus ``command_timeout``; with ``blocking=False``, within
                ``command_timeout``. Raised at once if the backend refuses (``BackendRefused``).
            TransactionManagementError: With ``hold_until="commit"``, this thread is in manual
                transaction management, as for Django's ``on_commit``.
        """
        patience = self._patience(blocking, timeout)
        return self._acquire(self._try_flow, self._holds.caller_thread(), patience) is not None

    @markcoroutinefunction
    def aacquire(
        self, blocking: bool = True, timeout: float | None = None
    ) -> Coroutine[Any, Any, bool]:
        """As ``acquire``, for coroutines; the holder is the handle itself.

        It is not the task, because before Python 3.12 ``asyncio.wait_for`` runs this coroutine in
        a task of its own, which ends right away. So give each task a handle of its own.
        """
        # Who calls it must be asked here, and not in that task.
        return self._aacquire_for(this_caller(), blocking, timeout)

    async def _aacquire_for(self, by: object, blocking: bool, timeout: float | None) -> bool:
        patience = self._patience(blocking, timeout)
        held = await self._aacquire(self._try_flow, self._holds.caller_handle(by), patience)
        return held is not None

    def __enter__(self) -> Self:
        # In one line, because an interrupt between two lines would leave the lock held, without
        # a call of __exit__.
        return self._acquire(self._enter_flow, self._holds.caller_thread(), self._options.wait)

    async def __aenter__(self) -> Self:
        return await self._aacquire(self._enter_flow, self._holds.caller_task(), self._options.wait)

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

    def _acquire(self, flow: Acquisition[T], caller: Caller, patience: float | None) -> T:
        if self._options.hold_until == "commit":
            transactions.refuse_manual()
        requests = [self._request(patience, this_thread)]
        try:
            return drive(flow(caller, patience, requests))
        except BaseException as error:
            self._cancel(requests[-1], error)
            raise

    async def _aacquire(self, flow: Acquisition[T], caller: Caller, patience: float | None) -> T:
        if self._options.hold_until != "release":
            raise TypeError(
                "hold_until='commit' follows the transaction of a thread; a coroutine has none. "
                "Acquire in the synchronous code that runs the transaction"
            )
        requests = [self._request(patience, this_task)]
        try:
            return await adrive(flow(caller, patience, requests), self._backend)
        except BaseException as error:
            self._cancel(requests[-1], error)
            raise

    def unbind(self) -> None:
        """Make this ``Lock`` itself the holder from now on, as with ``bound=False``.

        The lease then outlives its thread or task, and is renewed while the ``Lock`` is alive.
        Does nothing if the lock is not held, or if a reentrant lease was entered several times.
        """
        self._holds.unbind()

    # -- renew -------------------------------------------------------------------------

    def renew(self, ttl: Seconds | None = None) -> None:
        """Prolong the lease now.

        Args:
            ttl: Seconds from now, also for the renewals that follow; the present TTL by default.

        Raises:
            LeaseLost: The lease was lost before, or the backend refused the renewal.
            NotHeld: There is nothing to renew.
            BackendUnavailable: No answer; it may or may not be prolonged.
            TypeError, ValueError: ``ttl`` is wrong, or too short to be renewed.
        """
        held = self._current("renewed").lease
        drive(self._renew_flow(held, ttl))

    async def arenew(self, ttl: Seconds | None = None) -> None:
        """As ``renew``, for coroutines."""
        held = self._current("renewed").lease
        await adrive(self._renew_flow(held, ttl), held.backend)

    # -- release -----------------------------------------------------------------------

    def release(self) -> None:
        """Release the lock; a lease of another owner is never affected.

        Raises:
            LeaseLost: The lease was already lost.
            NotHeld: There is nothing to release.
            BackendUnavailable: No answer. Renewal has ended, the release is repeated in the
                background, and the lease ends with its TTL at the latest.
        """
        hold = None
        try:
            hold = self._current("released")
            drive(self._release_flow(hold))
        except BaseException as error:
            self._stop(hold, error)
            raise

    async def arelease(self) -> None:
        """As ``release``, for coroutines."""
        hold = None
        try:
            hold = self._current("released")
            await adrive(self._release_flow(hold), hold.lease.backend)
        except BaseException as error:
            self._stop(hold, error)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hold = None
        try:
            hold, lost = self._holds.of_block()
            if hold is not None or lost is not None:
                drive(self._exit_flow(hold, lost, error))
        except BaseException as interrupt:
            self._stop(hold, interrupt)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hold = None
        try:
            hold, lost = self._holds.of_block()
            ends = hold or lost
            if ends is None:
                return
            flow = self._exit_flow(hold, lost, error)
            if kind is GeneratorExit:
                # The event loop has given up this coroutine, so it cannot await any more.
                next(flow, None)
                flow.close()
            else:
                await adrive(flow, ends.lease.backend)
        except BaseException as interrupt:
            self._stop(hold, interrupt)
            raise

    def __del__(self) -> None:
        # It has no such attribute if ``__init__`` raised.
        holds = getattr(self, "_holds", None)
        if holds is not None:
            holds.collected(self)

    # -- fencing -----------------------------------------------------------------------

    @overload
    def fence(
        self, target: QuerySet[Any, Any] | BaseManager[Any], field: str | None = None
    ) -> FencedQuerySet: ...

    @overload
    def fence(self, target: Model, field: str | None = None) -> FencedInstance: ...

    def fence(
        self,
        target: QuerySet[Any, Any] | BaseManager[Any] | Model,
        field: str | None = None,
    ) -> FencedQuerySet | FencedInstance:
        """Write rows only if no newer holder has written them.

        ``lock.fence(queryset).update(...)`` and ``lock.fence(instance).save(...)`` compare the
        token of this grant with the rows' ``FencingTokenField`` and raise it, in one statement.

        Args:
            field: The ``FencingTokenField`` to use, if the model has several.

        Raises:
            LeaseLost, NotHeld: There is no lease, so there is no token to write with.
            TypeError: The model has no ``FencingTokenField``, or several and none is named.
        """
        from . import fencing

        return fencing.fence(self._checked("fenced"), target, field)

    def atomic(self, using: str | None = None) -> AbstractContextManager[None]:
        """A database transaction that cannot commit after a newer holder has begun its own.

        Its first and its last statement write this grant's token to the name's row in the fence
        table, if no newer one is there; the row stays locked until COMMIT. The lease must
        still be held at the end, too.

        Args:
            using: Alias in ``DATABASES``; the one that routers give for ``Fence`` by default.

        Raises:
            StaleToken: A newer holder was here; everything is rolled back.
            LeaseLost, NotHeld: The lease is gone, at the beginning or at the end.
            RuntimeError: The database is already in a transaction, whose COMMIT would come
                after the last statement.
        """
        from . import fencing

        return fencing.atomic(self._checked("fenced"), using)

    # -- others ------------------------------------------------------------------------

    def locked(self) -> bool:
        """Whether the name is held by anyone; asks the backend.

        Raises:
            BackendUnavailable: No answer.
        """
        process.notice_fork()
        return drive(self._locked_flow())

    async def alocked(self) -> bool:
        """As ``locked``, for coroutines."""
        process.notice_fork()
        return await adrive(self._locked_flow(), self._backend)

    def _locked_flow(self) -> Flow[bool]:
        backend, name = self._backend, self._full_name()
        return in_turn(lambda: call(backend.locked, name, deadline=backend.call_deadline()))


LockStatus._sender = Lock


L = TypeVar("L", bound=Lock)


def of_template(lock: L, template: str) -> L:
    """The lock, which tells its signals from which template its name was made."""
    lock._options.template = template
    return lock
