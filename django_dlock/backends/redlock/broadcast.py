"""One command to several nodes, and what they answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias


class _Pending:
    def __repr__(self) -> str:
        return "PENDING"


PENDING: Final = _Pending()
"""In the place of an answer that has not come."""

Answers: TypeAlias = list[Any]
"""One per node: what the command's reply means, an exception if there is none, or ``PENDING``."""
Decided: TypeAlias = Callable[[Sequence[Any]], bool]
"""Whether further answers would change nothing."""


class Broadcast:
    """Collects answers, usually on the thread of the exchange; another thread waits for them.

    Attributes:
        answers: Later ones are added even after the decision.
    """

    def __init__(self, nodes: int, decided: Decided) -> None:
        self.answers: Answers = [PENDING] * nodes
        self._once: dict[str, object] = {}
        self._decided = decided
        # A plain lock, locked until the decision: an interrupt can leave the lock inside a
        # ``threading.Event`` locked for ever.
        self._open = threading.Lock()
        self._open.acquire()
        self.is_decided = False

    def put(self, node: int, answer: Any) -> None:
        """Add the answer of one node."""
        self.answers[node] = answer
        if self.is_decided or not (PENDING not in self.answers or self._decided(self.answers)):
            return
        # Atomic, because the answers may come from several threads.
        mine = object()
        if self._once.setdefault("decided", mine) is mine:
            self.is_decided = True
            self._open.release()

    def wait(self, seconds: float) -> Answers:
        """The answers when they are decided, or when the time is over."""
        timeout = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        if not self.is_decided and self._open.acquire(timeout=timeout):
            self._open.release()
        return list(self.answers)
