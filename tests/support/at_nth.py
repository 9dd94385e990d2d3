"""Interrupts a call at a chosen place."""

from __future__ import annotations

from types import FrameType


class AtNth:
    """A profile function that interrupts at the n-th place where Python looks for signals."""

    def __init__(self, n: int) -> None:
        self.left = n

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        """For ``sys.setprofile``."""
        if event in ("call", "c_return"):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
