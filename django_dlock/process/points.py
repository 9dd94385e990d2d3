"""Points: tests can wait for one, act at it, or stop a thread there.

In production nobody listens, and ``reached`` does nothing. Add a point only if a test cannot see
otherwise that it was reached: neither at a server, nor by a public method, nor by the name of a
thread. Add it only where the thread is about to wait or has just been woken, so that it costs
nothing. A name says what has happened, and not where in the code, so that a test outlives a move
of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

POINTS = {
    "wait.asleep": "a waiter is about to sleep, and can miss no wake-up any more; reached again "
    "before each sleep. `waiter`: its owner",
    "listener.listening": "this process gets the messages of its store from here on. `store`: "
    "redis, etcd or postgresql",
    "listener.tested": "a test message came back, so messages arrive. `store`",
    "listener.message": "a message for one waiter was read and is kept for it. `waiter`: its owner",
    "listener.failed": "no messages arrive, and waiters know that; it is tried again. `store`",
    "pool.waiting": "a call waits for a connection, and gets the next that it may use. `urgency`",
    "worker.asleep": "a background thread sleeps until it is woken, or until its time has come. "
    "`name`: of the thread; `until`: on `clock.now()`",
    "fork.waits": "a fork waits for threads that connect; repeated until it goes on. `thread`: the "
    "native id of the one that forks",
    "fork.goes_on": "a fork waits for nobody any more, and happens now. `thread`: the native id of "
    "the one that forks",
    "view.read": "a fail-over backend has learned which store is active, or could not. `alias`; "
    "`view`: what is known; `error`: why it could not be read",
}
"""Each point: what has happened there, and with which values it is reached."""

Listener: TypeAlias = Callable[[str, dict[str, Any]], object]

_listeners: tuple[Listener, ...] = ()


def reached(point: str, **values: Any) -> None:
    """Tell the listeners; what one of them raises is raised here."""
    if _listeners:
        for listener in _listeners:
            listener(point, values)


def listen(listener: Listener) -> None:
    """Call the listener for each point from now on, on the thread that reaches the point."""
    global _listeners
    _listeners = (*_listeners, listener)


def unlisten(*listeners: Listener) -> None:
    """Do not call them any more."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each not in listeners)
