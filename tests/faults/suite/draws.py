"""The random faults, chosen in advance: the same seed always gives the same faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .kinds import SHORT_TTL

ANY = ("prefork", "threads", "solo")

FAULTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "kill a child": (5, ("prefork",)),
    "terminate a task": (3, ("prefork",)),
    "kill a worker": (2, ANY),
    "stop a worker": (3, ANY),
    "shut a worker down": (2, ANY),
    "break a lock": (4, ANY),
    "restart the lock Redis": (2, ANY),
    "flush the lock Redis": (2, ANY),
    "stop the lock Redis": (2, ANY),
    "cut the broker": (3, ANY),
    "stop the broker": (1, ANY),
    "refuse the broker": (2, ANY),
    "keep the broker at a distance": (2, ANY),
    "publish pending follow-ups": (1, ANY),
    "cut the database": (3, ANY),
    "refuse the database": (2, ANY),
    "make the database read-only": (2, ANY),
    "a client goes away": (3, ANY),
    "deliver again": (4, ANY),
    "publish again": (4, ANY),
}
"""How likely each one is, and in which pools it is possible."""

PAUSES = (0.5, 4.0)
"""Seconds between two faults."""

HANGS = frozenset({"hold", "block"})
"""Only a hard time limit ends this."""

LASTS = (0.5, SHORT_TTL + 2.0)
"""Seconds for which a stopped process or server stays stopped."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One fault.

    Attributes:
        at: Seconds since the beginning.
        aim: From 0 to 1: chooses among the possible targets at that time.
        lasts: Seconds, for faults that end by themselves.
    """

    at: float
    what: str
    aim: float
    lasts: float


@dataclass(frozen=True, slots=True)
class Order:
    """How the messages of one key are published.

    Attributes:
        plan: What its body does; see ``workload``.
        copies: Messages sent at once.
        options: Options of the messages.
    """

    plan: dict[str, Any]
    copies: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def faults(seed: str, pool: str) -> Iterator[Draw]:
    """Endless faults, one after another."""
    chance = random.Random(f"{seed}: faults")
    names = [name for name, (_, pools) in FAULTS.items() if pool in pools]
    weights = [FAULTS[name][0] for name in names]
    at = 0.0
    while True:
        at += chance.uniform(*PAUSES)
        (what,) = chance.choices(names, weights)
        yield Draw(at, what, chance.random(), chance.uniform(*LASTS))


def order(seed: str, pool: str, number: int) -> Order:
    """The messages of this key: mostly short work, sometimes with its own fault."""
    chance = random.Random(f"{seed}: key {number}")
    long = chance.random() < 0.15
    plan: dict[str, Any] = {
        "work": chance.uniform(SHORT_TTL, 2 * SHORT_TTL) if long else chance.uniform(0.05, 1.0),
        "again": 0.05,
        "at": {},
    }
    options: dict[str, Any] = {}
    if chance.random() < 0.2:
        options["countdown"] = chance.uniform(0.2, 2.0)
    if chance.random() < 0.1:
        place, what = chance.choice(_OWN[pool])
        plan["at"] = {place: what}
        if what in HANGS:
            options["time_limit"] = 1.5
    return Order(plan, chance.choices((1, 2, 3), (6, 2, 1))[0], options)


_LOST = [("began", "answer lost: COMMIT"), ("began", "not sent: COMMIT")]
_DIES = [("began", "die"), ("written", "die"), ("done", "die")]
_BETWEEN = [("committed", "die"), ("published", "die"), ("publishing", "die")]
"""Between the commit and the row that marks all follow-ups as published."""
_OWN: dict[str, list[tuple[str, str]]] = {
    "prefork": [
        *(*_LOST, *_DIES, *_BETWEEN),
        *(("written", "hold"), ("written", "block"), ("committed", "block")),
    ],
    "threads": _LOST,
    "solo": _LOST,
}
