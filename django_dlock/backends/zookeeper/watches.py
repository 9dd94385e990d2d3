"""Tells waiters that the node before theirs is gone: one watch per node, however many wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..shared.waiting import Waiter, Waiters
from .nodes import LockNode
from .session import Session


class _Waiter(Waiter):
    __slots__ = ("node",)

    def __init__(self, owner: str, node: LockNode) -> None:
        super().__init__(owner)
        self.node = node


class Watches:
    """What this process waits for."""

    def __init__(self) -> None:
        self._waiters: Waiters[_Waiter] = Waiters()
        # A node stays until its watch has fired, even if everybody has left: a second watch on it
        # would be one more to keep.
        self._watched: dict[LockNode, object] = {}

    def forget(self) -> None:
        """Start again in a forked child."""
        self._waiters.forget()
        self._watched = {}

    def wait(
        self,
        session: Session,
        owner: str,
        node: LockNode,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> None:
        """Block until the node may be gone.

        Args:
            owner: Of the waiter.
            until: When to return at the latest, on ``clock.now()``.
            interrupted: See ``Waiters.wait``.
        """
        waiter = _Waiter(owner, node)
        self._waiters.wait(waiter, until, interrupted, partial(self._is_over, session, node))

    async def async_wait(
        self,
        session: Session,
        owner: str,
        node: LockNode,
        *,
        until: float,
        interrupted: Callable[[], bool],
        abandoned: Callable[[], object],
    ) -> None:
        """As ``wait``, for coroutines; takes no thread.

        Args:
            abandoned: See ``Waiters.async_wait``.
        """
        waiter, is_over = _Waiter(owner, node), partial(self._is_over, session, node)
        await self._waiters.async_wait(waiter, until, interrupted, abandoned, is_over)

    def fire_all(self) -> None:
        """Tell all waiters, because watches end with the connection."""
        self._watched.clear()
        self._waiters.end_waits()

    def _is_over(self, session: Session, node: LockNode) -> bool:
        """Watch the node, unless that is done."""
        mine = object()
        try:
            if self._watched.setdefault(node, mine) is mine:
                # Asks for the node's children, of which it has none: a watch on them fires when the
                # node goes, but not when its owner writes it. And unlike ``exists``, it leaves no
                # watch if the node is gone.
                request = session.client.get_children_async(
                    node.path, watch=lambda event: self._fire(node), include_data=True
                )
                request.rawlink(partial(self._answered, node))
        except BaseException:
            # Nobody has asked, perhaps; those who came meanwhile rely on it.
            self._fire(node)
            raise
        return not session.connected

    def _answered(self, node: LockNode, request: Any) -> None:
        # Its owner may have lost it, and joined again with the same path at the end of the queue.
        if not request.successful() or request.value[1].czxid != node.token:
            self._fire(node)

    def _fire(self, node: LockNode) -> None:
        self._watched.pop(node, None)
        for waiter in self._waiters:
            if waiter.node == node:
                waiter.end_wait()
