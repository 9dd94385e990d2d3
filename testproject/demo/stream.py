"""The orders of the demonstration and what happens to them, the same for all three columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

Fault = Literal["", "kill", "kill after the effect", "stop", "kill the worker", "outage"]

SHORT = 0.2
"""Seconds that most bodies take."""

LONG = 6.0
"""Seconds that a slow body takes: longer than the lease (3 s) and visibility timeout (4 s)."""

VICTIM = 10.0
"""Seconds of a body that is killed meanwhile, also by a killer that a slow machine delays."""

STOPPED = 4.0
"""Seconds of the body that is stopped; over when it continues."""


@dataclass(frozen=True, slots=True)
class Order:
    """The messages that are published for an order, and the fault of its first body.

    Attributes:
        work: Seconds before its effect.
        tail: Seconds after its effect.
        copies: How many messages are sent at once; each has another task id.
        later: Whether another one is sent after the first body has ended.
        again: Whether another one is sent while the first body is stopped.
    """

    number: int
    work: float = SHORT
    tail: float = 0.0
    copies: int = 1
    later: bool = False
    again: bool = False
    fault: Fault = ""

    @property
    def messages(self) -> int:
        """How many messages are sent to each task."""
        return self.copies + self.later + self.again


def orders(*, redelivers: bool = True) -> Iterator[Order]:
    """The orders, in the sequence in which they are published.

    Args:
        redelivers: Whether the broker redelivers an unfinished message; if not, the message of a
            stopped child is sent again.
    """
    number = count(1)
    for _ in range(2):
        yield Order(next(number))
        yield Order(next(number), work=LONG, copies=2)
        yield Order(next(number), copies=2)
        yield Order(next(number), later=True)
    yield Order(next(number), work=VICTIM, copies=2, fault="kill")
    yield Order(next(number), tail=VICTIM, copies=2, fault="kill after the effect")
    yield Order(next(number), work=STOPPED, again=not redelivers, fault="stop")
    # Sent after the stopped child continues, because it may belong to the same worker.
    yield Order(next(number), work=VICTIM, fault="kill the worker")
    for _ in range(4):
        yield Order(next(number), copies=2)
        yield Order(next(number), later=True)
        yield Order(next(number))
    # Last, so that only this order runs while the locks are unreachable.
    yield Order(next(number), work=LONG, copies=2, fault="outage")
