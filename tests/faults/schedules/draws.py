"""The schedule, chosen in advance: the same seed always gives the same faults at the same times."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PAUSES = (0.3, 3.0)
"""Seconds from the end of a fault to the next one."""
LASTS = (0.2, 5.0)
"""Seconds that a fault lasts; more and less than a TTL."""
CALM_EVERY = 5
"""After so many faults, everything has the time to be as before, which is checked."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One fault.

    Attributes:
        pause: Seconds from the end of the one before it.
        what: Its name.
        aim: From 0 to 1: chooses among the possible targets.
        lasts: Seconds.
    """

    pause: float
    what: str
    aim: float
    lasts: float


def faults(seed: str, weights: Mapping[str, int], calm: float) -> Iterator[Draw]:
    """Endless faults, one after another.

    Args:
        weights: How likely each is, by its name.
        calm: Seconds of the long pauses.
    """
    chance = random.Random(f"{seed}: faults")
    names = list(weights)
    number = 0
    while True:
        number += 1
        (what,) = chance.choices(names, [weights[name] for name in names])
        pause, aim, lasts = chance.uniform(*PAUSES), chance.random(), chance.uniform(*LASTS)
        yield Draw(pause if number % CALM_EVERY else calm, what, aim, lasts)
