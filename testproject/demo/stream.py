"""The orders of the demonstration and what happens to them, the same for all three columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

__all__ = ["LONG", "Fault", "Order", "orders"]

Fault = Literal["", "kill", "kill after the effect", "stop", "redis"]

LONG = 6.0
"""Seconds of a body that outlives the lease (3 s) and the visibility timeout (4 s)."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is published for an order, and what is done to its first body.

    Attributes:
        work: Seconds before its effect.
        tail: Seconds after its effect.
        copies: Messages that are sent at once; each has a task id of its own.
        later: Whether another is sent after the first body has ended.
    """

    number: int
    work: float = 0.2
    tail: float = 0.0
    copies: int = 1
    later: bool = False
    fault: Fault = ""


def orders() -> Iterator[Order]:
    """In the order in which they are published."""
    number = count(1)
    for _ in range(2):
        yield Order(next(number))
        yield Order(next(number), work=LONG, copies=2)
        yield Order(next(number), copies=2)
        yield Order(next(number), later=True)
    yield Order(next(number), work=2.0, copies=2, fault="kill")
    yield Order(next(number), tail=2.0, copies=2, fault="kill after the effect")
    yield Order(next(number), work=1.0, fault="stop")
    for _ in range(4):
        yield Order(next(number), copies=2)
        yield Order(next(number), later=True)
        yield Order(next(number))
    # Last, so that it runs while Redis is stopped, and the rest is behind.
    yield Order(next(number), work=LONG, copies=2, fault="redis")
