"""A clock that moves only when a test says so."""

from __future__ import annotations

from .. import clock

__all__ = ["FakeClock"]


class FakeClock:
    """Replaces ``clock.now()`` inside its ``with`` block.

    Only ``advance`` moves it, which does not wake sleeping threads.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._now += seconds

    def __enter__(self) -> FakeClock:
        self._real = clock.now
        clock.now = self
        return self

    def __exit__(self, *exc: object) -> None:
        clock.now = self._real
