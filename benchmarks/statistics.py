"""Medians, quartiles and percentiles, of rounds and of raw samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], rank: float) -> float:
    """The value below which ``rank`` percent of the values lie, by linear interpolation.

    Raises:
        ValueError: There are no values, or ``rank`` is not within 0 and 100.
    """
    if not values:
        raise ValueError("no values")
    if not 0 <= rank <= 100:
        raise ValueError(f"rank must be within 0 and 100, not {rank}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    # Not ``low * (1 - part) + high * part``, which can differ from two equal values.
    return low + (high - low) * (place - math.floor(place))


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


@dataclass(frozen=True)
class Spread:
    """The distribution of the rounds of a run."""

    median: float
    low_quartile: float
    high_quartile: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(
            median=median(values),
            low_quartile=percentile(values, 25),
            high_quartile=percentile(values, 75),
            min=min(values),
            max=max(values),
        )
