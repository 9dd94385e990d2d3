"""Management commands: those of the package, and a base class for your own."""

from __future__ import annotations

from .locked import LockedCommand

__all__ = ["LockedCommand"]
