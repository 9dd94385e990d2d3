"""Calls inside which a body is not interrupted, because half a call may lose a message.

Celery takes an exception inside ``retry()`` for a broker that refuses the message, and fails the
task for good. A channel of RabbitMQ that was left in the middle of a publish can block for ever
when it is closed. So these functions of Celery, kombu and amqp are replaced, once in a process, by
ones that tell the body's runner when they begin and end. Outside a body they only look it up. Other
libraries replace some of them, too, before or after this one does.

The same holds for a request and its reply: a connection that goes back to its pool in between
would give its next user the reply to somebody else's question.

Only our own interruption waits for their end. Signals and time limits do not.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import amqp
import kombu
from celery import Celery, canvas

from ...log import logger

T = TypeVar("T")

ASKS = (
    *("open", "close", "confirm_select", "basic_get", "basic_qos", "basic_consume", "basic_cancel"),
    *(f"queue_{ask}" for ask in ("declare", "bind", "unbind", "purge", "delete")),
    *(f"exchange_{ask}" for ask in ("declare", "bind", "unbind", "delete")),
)
"""What an AMQP channel asks its broker; the next question of the kind would get this answer."""

CALLS: tuple[tuple[Any, str], ...] = (
    (Celery, "send_task"),
    *((kind, "apply_async") for kind in (canvas.Signature, canvas.chain, canvas.group)),
    (canvas.chord, "apply_async"),
    (kombu.Producer, "publish"),
    *((kombu.Connection, name) for name in ("ensure_connection", "channel", "close", "release")),
    *((amqp.Channel, name) for name in ASKS),
    *((amqp.Connection, name) for name in ("connect", "close")),
)
"""A class, and the name of its method."""

READS: tuple[tuple[Any, str], ...] = ((amqp.Connection, "blocking_read"),)
"""The same, but only on threads. An exception that arrives on a thread is raised after the socket
has given its data away, while a greenlet is interrupted before that, and may wait for ever here."""

CLIENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "client": (
        ("Redis", "execute_command"),
        ("Pipeline", "execute"),
        ("Pipeline", "immediate_execute_command"),
        *(("PubSub", name) for name in ("subscribe", "unsubscribe", "parse_response")),
    ),
    "cluster": (("RedisCluster", "execute_command"), ("ClusterPipeline", "execute")),
}
"""As ``READS``: modules of redis-py, which projects with other brokers and caches lack."""


class Runner(Protocol):
    """What runs a body."""

    @property
    def is_greenlet(self) -> bool: ...
    def uninterrupted(self, function: Callable[[], T]) -> T: ...


_here = threading.local()


def begin(runner: Runner) -> Runner | None:
    """The runner's body runs on this thread or greenlet from now on; returns the outer body's."""
    if len(_protected_clients) < len(CLIENTS):
        _protect_clients()
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
        _replace(kind, name)
    for kind, name in READS:
        _replace(kind, name, on_threads_only=True)


_protected_clients: set[str] = set()


def _protect_clients() -> None:
    """Replace those of redis-py, once they are imported."""
    for name in CLIENTS.keys() - _protected_clients:
        module = sys.modules.get(f"redis.{name}")
        if module is None:
            continue
        for kind, method in CLIENTS[name]:
            if hasattr(getattr(module, kind, None), method):
                _replace(getattr(module, kind), method, on_threads_only=True)
        _protected_clients.add(name)


def _replace(kind: Any, name: str, *, on_threads_only: bool = False) -> None:
    # Its base class may define it, and have instances of its own, as that of ``chain`` has.
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    if owner is None:
        logger.warning(
            "%s.%s is not there in this version: a body that loses its lease may be interrupted "
            "inside what replaces it",
            kind.__qualname__,
            name,
        )
        return
    function = vars(owner)[name]
    if not hasattr(function, "_dlock_protects"):
        setattr(owner, name, _protected(function, on_threads_only))


def _protected(function: Callable[..., Any], on_threads_only: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def protected(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Bound as by ``self.name``: only so does the wrapper of a tracing library learn the
        # instance.
        bound = function.__get__(self, type(self))
        runner: Runner | None = getattr(_here, "runner", None)
        if runner is None or (on_threads_only and runner.is_greenlet):
            return bound(*args, **kwargs)
        return runner.uninterrupted(functools.partial(bound, *args, **kwargs))

    protected._dlock_protects = True  # type: ignore[attr-defined]
    return protected
