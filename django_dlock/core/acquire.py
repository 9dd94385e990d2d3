"""How a handle acquires its lock: ask for a lease, tell those who listen, and hold it.

Written as flows; see ``flow``. How the lease is granted is in ``granting``.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from .. import clock, process, signals, tenancy
from ..backends.base import BaseLockBackend
from ..exceptions import (
    AcquireTimeout,
    AlreadyHeld,
    BackendUnavailable,
    ConnectionsBusy,
    LockNotAcquired,
)
from ..lease import Contention, Lease, LeaseRequest
from ..log import logger
from . import cleanup, dispatch, fallback, tracing, transactions
from .flow import Flow, call
from .granting import Met, grant_flow
from .held_lease import HeldLease, registry
from .holds import Caller, HandleHolds, this_caller
from .limits import limit_flow
from .options import LockOptions, with_holding
from .registry import HolderKey

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

Asking: TypeAlias = Callable[[], tuple[HolderKey, ...]]
"""Returns the keys under which the registry has the leases of a caller."""


def _nobody() -> tuple[HolderKey, ...]:
    return ()


def this_thread() -> tuple[HolderKey, ...]:
    """See ``Asking``."""
    return (threading.current_thread(),)


def this_task() -> tuple[HolderKey, ...]:
    """See ``Asking``; leases of ``async with``, and those of ``aacquire``."""
    task = asyncio.current_task()
    return task, (task,)


class AcquireFlows:
    """The acquire of a ``Lock``, and what to do if an interrupt cuts it short.

    Attributes:
        contention: The last holder that an acquire of this handle met.
        _sender: The sender of signals: ``Lock``, also for its subclasses.
    """

    __slots__ = ("__weakref__", "_backend", "_holds", "_name", "_options", "contention")

    _sender: ClassVar[type]

    def __init__(
        self, name: str, backend: BaseLockBackend, holds: HandleHolds, options: LockOptions
    ) -> None:
        self._name = name
        self.contention: Contention | None = None
        self._backend = backend
        self._holds = holds
        self._options = options

    @property
    def alias(self) -> str:
        """The alias in ``DLOCKS``."""
        return self._backend.alias

    @property
    def name(self) -> str:
        """The lock's full name: as given, with the scope of the tenant in front if there is one.

        That of the lease while the caller holds it; else that of the tenant who is active now.

        Raises:
            Exception: What the function of ``DLOCK_SCOPE`` raises.
        """
        if tenancy.function is None:
            return self._name
        held = self._holds.mine()
        return self._full_name() if held is None else held.name

    def _full_name(self) -> str:
        """The name that an acquire would lock now."""
        return tenancy.full(self._name)

    def _request(
        self, patience: float | None, asking: Asking = _nobody, name: str = ""
    ) -> LeaseRequest:
        """A new request.

        Args:
            asking: The thread or the task that will wait, so that operators see what it holds.
            name: The full name of the request that this one follows, whoever is active by now.
        """
        process.notice_fork()
        if not name:
            # Asked here already, because every acquire passes here.
            name = self._name if tenancy.function is None else tenancy.full(self._name)
        options = self._options
        metadata = options.metadata_json
        if patience != 0 and registry and (holding := registry.owners_of(*asking())):
            metadata = with_holding(metadata, holding)
        # Positional arguments take half the time, and every acquire passes here.
        return LeaseRequest(
            name,
            os.urandom(16).hex(),
            min(options.ttl, options.max_hold),
            "held",
            metadata,
            patience != 0,
            "",
            options.renew,
        )

    def _enter_flow(
        self, caller: Caller, patience: float | None, requests: list[LeaseRequest]
    ) -> Flow[Self]:
        """Like ``_acquire_flow``, for a ``with`` block, which needs the lock.

        Raises:
            LockNotAcquired: The patience ended, or the backend does not answer and
                ``if_unavailable`` is ``skip``.
        """
        entered = yield from self._acquire_flow(caller, patience, requests)
        if entered is not None:
            self._holds.begin_block(requests[-1].owner)
            return entered
        name = requests[-1].name
        if self._found(caller, name) is not None:
            raise LockNotAcquired(
                "It is held by this very thread, task or handle", name, self.alias
            )
        try:
            info = yield from call(self._backend.get, name)
        except BackendUnavailable:
            info = None
        holder = "" if info is None else info.holder
        if patience:
            text = f"The lock is held by someone else; not free within {patience:g} s"
            refusal: LockNotAcquired = AcquireTimeout(text, name, self.alias, holder)
        else:
            refusal = LockNotAcquired("The lock is held by someone else", name, self.alias, holder)
        refusal.info = info
        raise refusal

    def _try_flow(
        self, caller: Caller, patience: float | None, requests: list[LeaseRequest]
    ) -> Flow[Self | None]:
        """Like ``_acquire_flow``, for ``acquire``, which answers instead of raising."""
        try:
            return (yield from self._acquire_flow(caller, patience, requests))
        except LockNotAcquired:
            return None

    def _found(self, caller: Caller, name: str) -> HeldLease | None:
        """The caller's own lease, if it has one: waiting for it would never end."""
        _, key, _, meets = caller
        backends = [self._backend]
        if fallback.replacements and self._backend in fallback.replacements:
            backends.append(fallback.of(self._backend))
        for backend in backends:
            held = registry.find(backend, name, key)
            for other in meets:
                if held is not None:
                    break
                held = registry.find(backend, name, other)
                if held is not None and isinstance(other, threading.Thread):
                    # Coroutines wait for each other, although they have one thread.
                    held = held if held.is_of(this_caller(), other) else None
            if held is not None:
                return held
        return self._holds.find(name, blocks_thread=isinstance(key, threading.Thread))

    def _acquire_flow(
        self, caller: Caller, patience: float | None, requests: list[LeaseRequest]
    ) -> Flow[Self | None]:
        """Returns ``None`` if the patience ended.

        Args:
            requests: The one to begin with; more are added, and only the last one may be granted.

        Raises:
            LockNotAcquired: The backend does not answer, and ``if_unavailable`` is ``skip``; or no
                connection became free.
        """
        by, key, known_as, _ = caller
        name = requests[-1].name
        held = self._found(caller, name)
        if held is not None:
            entered = yield from self._own_flow(held, by, requests[-1].owner, patience)
            if entered is not None:
                return self if entered else None
        started, outer = clock.now(), transactions.outermost()
        self.contention = None
        # Of this acquire alone: several threads may share the handle.
        contentions: list[Contention] = []
        trace = tracing.begin(name, self._backend.alias)
        try:
            lease, backend = yield from self._granted_flow(
                requests, started, patience, partial(self._met, contentions, name)
            )
        except BaseException as error:
            if trace is not None:
                trace.failed(error)
            raise
        finally:
            if contentions:
                self._stop_waiting(name)
        if lease is None:
            if trace is not None:
                trace.contended()
            self._give_up("contended", name)
            return None
        held = HeldLease(lease, backend, key, self._options, sender=self._sender)
        held.known_as, held.outer_transactions = known_as, outer
        extra = {}
        if backend is not self._backend:
            # A number that only this process knows would fence nothing.
            held.token, extra = None, {"reason": "unavailable"}
        if trace is not None:
            held.trace = trace
            trace.acquired(held.owner, held.token)
        self._holds.add(held, by, self)
        waited = held.acquired_at - started
        if dispatch.has_receivers(signals.acquired, self._sender):
            dispatch.send(
                signals.acquired, self._sender, waited=waited, **extra, **held.signal_kwargs()
            )
        if waited >= signals.LONG_WAIT:
            dispatch.send(signals.waited_long, self._sender, waited=waited, **held.signal_kwargs())
        return self

    def _own_flow(
        self, held: HeldLease, by: object, entry: str, patience: float | None
    ) -> Flow[bool | None]:
        """Enter the caller's own lease; returns ``None`` if that turns out to be lost."""
        if self._options.reentrant and held.options.reentrant:
            hold = self._holds.enter(held, entry, by, self, self._options)
            yield from limit_flow(held, self._backend)
            if held.active:
                return True
            self._holds.remove(hold)
            return None
        if patience == 0:
            self._give_up("contended", held.name)
            return False
        raise AlreadyHeld(
            "Already held by this thread, task or handle; waiting for it would never end. To "
            "acquire it again, give both Locks reentrant=True",
            held.name,
            self.alias,
        )

    def _granted_flow(
        self, requests: list[LeaseRequest], started: float, patience: float | None, met: Met
    ) -> Flow[tuple[Lease | None, BaseLockBackend]]:
        """The lease, ``None`` if the patience ended, and which backend has it."""
        left = patience
        while True:
            try:
                lease = yield from grant_flow(
                    self._backend, requests[-1], patience=left, met=met, broke=self._broke
                )
            except ConnectionsBusy as busy:
                cleanup.cancel_unanswered(self._backend, requests[-1], busy)
                self._give_up("contended", requests[-1].name)
                kind = AcquireTimeout if patience else LockNotAcquired
                text = "It was not asked for, because all connections of this process were in use"
                raise kind(text, requests[-1].name, self.alias) from busy
            except BackendUnavailable as error:
                try:
                    fallback.apply_policy(
                        self._options.if_unavailable, requests[-1].name, self.alias, error
                    )
                except LockNotAcquired:
                    self._cancel(requests[-1], error)
                    raise
                # It may have been granted, and its answer lost.
                cleanup.cancel_unanswered(self._backend, requests[-1], error)
                requests.append(self._request(0.0, _nobody, requests[-1].name))
                until = math.inf if patience is None else started + patience
                lease = yield from fallback.grant_flow(self._backend, requests[-1], until=until)
                return lease, fallback.of(self._backend)
            if lease is not None or (
                patience is not None and (left := started + patience - clock.now()) <= 0
            ):
                return lease, self._backend
            # This attempt was granted and ended before we knew. Its owner is granted nothing more.
            again = self._request(patience, _nobody, requests[-1].name)
            requests.append(again._replace(metadata=requests[-1].metadata))

    def _cancel(self, request: LeaseRequest, error: BaseException) -> None:
        """Cancel an acquire that was interrupted or not answered; it may have been granted."""
        if not isinstance(error, AlreadyHeld | LockNotAcquired):
            self._holds.cancel(request.owner)
            cleanup.cancel_unanswered(self._backend, request, error)
        # Only now, because an interrupt may land in this call.
        if isinstance(error, BackendUnavailable):
            self._give_up("unavailable", request.name)

    def _give_up(self, reason: str, name: str) -> None:
        if dispatch.has_receivers(signals.gave_up, self._sender):
            dispatch.send(
                signals.gave_up,
                self._sender,
                owner=None,
                reason=reason,
                **self._signal_kwargs(name),
            )

    def _stop_waiting(self, name: str) -> None:
        if dispatch.has_receivers(signals.stopped_waiting, self._sender):
            dispatch.send(
                signals.stopped_waiting, self._sender, owner=None, **self._signal_kwargs(name)
            )

    def _met(self, contentions: list[Contention], name: str, contention: Contention) -> None:
        # Without its ticket, by which the handle would keep a place among the waiters.
        self.contention = contention._replace(ticket=None)
        if not contentions:
            contentions.append(contention)
            logger.info(
                "Lock %r (alias %r) is held by someone else",
                name,
                self.alias,
                name=name,
                alias=self.alias,
                reason="contended",
                task_id=self._options.metadata.get("task_id"),
            )
            if dispatch.has_receivers(signals.contended, self._sender):
                dispatch.send(
                    signals.contended, self._sender, owner=None, **self._signal_kwargs(name)
                )

    def _broke(self, name: str, contention: Contention) -> None:
        dispatch.send(
            signals.broken,
            self._sender,
            owner=contention.owner,
            reason="holder_dead",
            process=contention.process,
            **self._signal_kwargs(name),
        )

    def _signal_kwargs(self, name: str) -> dict[str, Any]:
        """The arguments of a signal while this handle holds nothing."""
        return {
            "name": name,
            "alias": self.alias,
            "token": None,
            "metadata": self._options.metadata,
            "template": self._options.template,
        }
