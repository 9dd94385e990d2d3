"""Test signals: places that a test can wait for, act at, or stop a thread at.

Nobody listens in production, and ``reached`` does nothing then. A place gets a name here if neither
a server, nor a public method, nor the name of a thread tells that it was reached, and if the thread
is about to wait anyway or has just been woken. The names say what has happened, and not where in
the code, so that a test outlives a move of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["POINTS", "Listener", "listen", "reached", "unlisten"]

POINTS = {
    "wait.asleep": "a thread or coroutine waits for a name, and from here on it is woken when it "
    "has to ask again; may be repeated. `waiter`: its owner",
    "listener.listening": "this process gets the messages of its store from here on. `store`",
    "listener.tested": "a test message came back, so messages arrive. `store`",
    "listener.message": "a message for one waiter was read and is kept for it. `waiter`: its owner",
    "listener.failed": "no messages arrive, and waiters know that; it is tried again. `store`",
    "pool.waiting": "a call waits for a connection, and gets the next that it may use. `urgency`",
    "worker.asleep": "a background thread sleeps until it is woken, or until its time has come. "
    "`name`: of the thread; `until`: on `clock.now()`",
    "fork.waits": "a fork waits for threads that connect; repeated until it goes on. `thread`: the "
    "native id of the one that forks",
    "fork.goes_on": "a fork waits for nobody any more, and happens now. `thread`: as before",
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
    """Call it, on the thread that reaches it, for each point from here on."""
    global _listeners
    _listeners = (*_listeners, listener)


def unlisten(*listeners: Listener) -> None:
    """Do not call them any more."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each not in listeners)
