"""A clock moved by hand."""

from __future__ import annotations

from .. import clock

__all__ = ["FakeClock"]


class FakeClock:
    """Takes the place of ``clock.now()`` for as long as its ``with`` block lasts.

    It moves only by ``advance``; threads that sleep are not woken by that.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._now += seconds

    def __enter__(self) -> FakeClock:
        self._real = clock.now
        clock.now = self
        return self

    def __exit__(self, *exc: object) -> None:
        clock.now = self._real
