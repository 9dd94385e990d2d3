"""Notes what becomes a span: an acquire, a held lease, its renewals, a step of a record.

Nothing is noted unless ``DLOCK_TRACING`` is on; then ``tracing/spans.py`` sets the tracer.
Times and the caller's span are noted where something happens. The spans are made on a thread of
their own, because an exporter may block, and nothing may wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from .. import clock
from ..exceptions import BackendUnavailable, LockError, LockNotAcquired
from . import dispatch

Facts = Mapping[str, str | int]


class Tracer(Protocol):
    """Makes spans in one library. Times are nanoseconds since the epoch."""

    def current(self) -> Any:
        """The caller's span, as the parent of spans that begin later on another thread."""

    def start(self, name: str, parent: Any, started: int, facts: Facts) -> Any:
        """Begin a span."""

    def inside(self, span: Any) -> Any:
        """A span as the parent of others."""

    def end(self, span: Any, ended: int, facts: Facts, error: str) -> None:
        """End a span; as failed, if there is an error."""


_tracer: Tracer | None = None


def use(tracer: Tracer | None) -> None:
    """Record for this tracer from now on; with ``None``, record nothing."""
    global _tracer
    _tracer = tracer


def _nanoseconds(at: float) -> int:
    """A time on ``clock.now()`` as nanoseconds since the epoch."""
    return time.time_ns() - round((clock.now() - at) * 1e9)


class LockTrace:
    """The spans of one acquire and of the lease that it was granted."""

    __slots__ = ("_facts", "_hold", "_parent", "_started", "_tracer")

    def __init__(self, tracer: Tracer, name: str, alias: str) -> None:
        self._tracer = tracer
        self._parent = tracer.current()
        self._started = time.time_ns()
        self._facts: dict[str, str | int] = {"dlock.name": name, "dlock.alias": alias}
        # Belongs to the thread of spans, which makes them in order.
        self._hold: Any = None

    def acquired(self, owner: str, token: int | None) -> None:
        """The acquire has ended with a lease, which is held from now on."""
        held_since = self._end_acquire("acquired", "")
        self._facts["dlock.owner"] = owner
        if token is not None:
            self._facts["dlock.token"] = token
        dispatch.spans.post(partial(self._start_hold, held_since))

    def contended(self) -> None:
        """The acquire has ended without a lease: somebody else holds the name."""
        self._end_acquire("contended", "")

    def failed(self, error: BaseException) -> None:
        """The acquire was not answered, or it was interrupted."""
        # ``LockNotAcquired`` is raised here only with ``if_unavailable="skip"``.
        unavailable = isinstance(error, BackendUnavailable | LockNotAcquired)
        self._end_acquire("unavailable" if unavailable else "interrupted", _text(error))

    def renewed(self, sent_at: float, error: str = "") -> None:
        """A renewal that was sent at ``sent_at`` was confirmed just now, or has failed."""
        sent, now = _nanoseconds(sent_at), time.time_ns()
        dispatch.spans.post(partial(self._renewal, sent, now, error))

    def ended(self, how: str) -> None:
        """The lease has ended; ``released``, or the reason of its loss."""
        dispatch.spans.post(partial(self._end_hold, time.time_ns(), how))

    def _end_acquire(self, outcome: str, error: str) -> int:
        now, facts = time.time_ns(), {**self._facts, "dlock.outcome": outcome}
        start = partial(
            self._tracer.start, "django_dlock.acquire", self._parent, self._started, facts
        )
        dispatch.spans.post(partial(_make, self._tracer, start, now, error))
        return now

    def _start_hold(self, started: int) -> None:
        self._hold = self._tracer.start("django_dlock.hold", self._parent, started, self._facts)

    def _renewal(self, sent: int, ended: int, error: str) -> None:
        if self._hold is not None:
            parent = self._tracer.inside(self._hold)
            start = partial(self._tracer.start, "django_dlock.renew", parent, sent, self._facts)
            _make(self._tracer, start, ended, error)

    def _end_hold(self, ended: int, how: str) -> None:
        if self._hold is not None:
            hold, self._hold = self._hold, None
            lost = "" if how in ("released", "exit") else f"lost: {how}"
            self._tracer.end(hold, ended, {"dlock.end": how}, lost)


def begin(name: str, alias: str) -> LockTrace | None:
    """An acquire begins on this thread, or in this coroutine; ``None`` without tracing."""
    return None if _tracer is None else LockTrace(_tracer, name, alias)


@contextmanager
def step(name: str, **facts: str | int) -> Iterator[Callable[[str], None]]:
    """A span for the ``with`` block; it yields a function to call with the outcome."""
    tracer, outcomes = _tracer, list[str]()
    if tracer is None:
        yield outcomes.append
        return
    parent, started, error = tracer.current(), time.time_ns(), ""
    try:
        yield outcomes.append
    except BaseException as failure:
        error = _text(failure)
        raise
    finally:
        noted: dict[str, str | int] = {f"dlock.{key}": value for key, value in facts.items()}
        if outcomes:
            noted["dlock.outcome"] = outcomes[-1]
        start = partial(tracer.start, name, parent, started, noted)
        dispatch.spans.post(partial(_make, tracer, start, time.time_ns(), error))


def _make(tracer: Tracer, start: Callable[[], Any], ended: int, error: str) -> None:
    tracer.end(start(), ended, {}, error)


def _text(error: BaseException) -> str:
    # Not the message of any other error, because it may contain private data.
    kind = type(error).__name__
    return f"{kind}: {error}" if isinstance(error, LockError) else kind
