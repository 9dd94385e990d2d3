"""Calls inside which a body is not interrupted, because half a call may lose a message.

Celery takes an exception inside ``retry()`` for a broker that refuses the message, and fails the
task for good. A channel of RabbitMQ that was left in the middle of a publish can block for ever
when it is closed. So these functions of Celery, kombu and amqp are replaced, once in a process, by
ones that tell the body's runner when they begin and end. Outside a body they only look it up. Other
libraries replace some of them, too, before or after this one does.

Only our own interruption waits for their end. Signals and time limits do not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import amqp
import kombu
from celery import Celery, canvas

__all__ = ["CALLS", "Runner", "begin", "call", "end", "protect"]

T = TypeVar("T")

CALLS: tuple[tuple[Any, str], ...] = (
    (Celery, "send_task"),
    *((kind, "apply_async") for kind in (canvas.Signature, canvas.chain, canvas.group)),
    (canvas.chord, "apply_async"),
    (kombu.Producer, "publish"),
    *((kombu.Connection, name) for name in ("ensure_connection", "channel", "close", "release")),
    *((amqp.Channel, name) for name in ("open", "close")),
    *((amqp.Connection, name) for name in ("connect", "close")),
)
"""A class, and the name of its method."""


class Runner(Protocol):
    """What runs a body."""

    def uninterrupted(self, function: Callable[[], T]) -> T: ...


_here = threading.local()


def begin(runner: Runner) -> Runner | None:
    """The runner's body runs on this thread or greenlet from now on; returns the outer body's."""
    outer: Runner | None = getattr(_here, "runner", None)
    _here.runner = runner
    return outer


def end(outer: Runner | None) -> None:
    """The body is over."""
    _here.runner = outer


def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function; if a body does so, it is interrupted only afterwards."""
    runner: Runner | None = getattr(_here, "runner", None)
    if runner is None:
        return function(*args, **kwargs)
    return runner.uninterrupted(functools.partial(function, *args, **kwargs))


def protect() -> None:
    """Replace the functions; a second call does nothing."""
    for kind, name in CALLS:
        # Its base class may define it, and have instances of its own, as that of ``chain`` has.
        owner = next(each for each in kind.__mro__ if name in vars(each))
        function = vars(owner)[name]
        if not hasattr(function, "_dlock_protects"):
            setattr(owner, name, _protected(function))


def _protected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def protected(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Bound as by ``self.name``: only so does the wrapper of a tracing library learn the
        # instance.
        bound = function.__get__(self, type(self))
        runner: Runner | None = getattr(_here, "runner", None)
        if runner is None:
            return bound(*args, **kwargs)
        return runner.uninterrupted(functools.partial(bound, *args, **kwargs))

    protected._dlock_protects = True  # type: ignore[attr-defined]
    return protected
