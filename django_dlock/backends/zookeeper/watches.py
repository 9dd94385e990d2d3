"""Tells waiters that the node before theirs is gone: one watch per node, however many wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from .nodes import LockNode
from .session import Session

__all__ = ["Watches"]

Tell = Callable[[], object]
"""Called on a thread of the client; never blocks."""


class Watches:
    """What this process waits for."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may wait while its thread is in here.
        self._lock = threading.RLock()
        self._waiting: dict[LockNode, list[Tell]] = {}

    @contextmanager
    def told(self, session: Session, node: LockNode, tell: Tell) -> Iterator[None]:
        """Call ``tell`` when the node is gone, and when the connection breaks."""
        with self._lock:
            # The list stays until the watch has fired, even if everybody has left: a second watch
            # on the same node would be one more to keep.
            is_new = node not in self._waiting
            self._waiting.setdefault(node, []).append(tell)
        try:
            if is_new:
                # Asks for the node's children, of which it has none: a watch on them fires when the
                # node goes, but not when its owner writes it. And unlike ``exists``, it leaves no
                # watch if the node is gone.
                request = session.client.get_children_async(
                    node.path, watch=lambda event: self._fire(node), include_data=True
                )
                request.rawlink(partial(self._answered, node))
            if not session.connected:
                tell()
            yield
        finally:
            with self._lock, suppress(KeyError, ValueError):
                self._waiting[node].remove(tell)

    def fire_all(self) -> None:
        """Tell all waiters, because watches end with the connection."""
        with self._lock:
            nodes = list(self._waiting)
        for node in nodes:
            self._fire(node)

    def _answered(self, node: LockNode, request: Any) -> None:
        # Its owner may have lost it, and joined again with the same path at the end of the queue.
        if not request.successful() or request.value[1].czxid != node.token:
            self._fire(node)

    def _fire(self, node: LockNode) -> None:
        with self._lock:
            waiting = self._waiting.pop(node, [])
        for tell in waiting:
            tell()
