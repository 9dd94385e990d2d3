"""The public import path of ``LockedRequest``; its code is in ``worker/``."""

from .worker.locked_request import LockedRequest

__all__ = ["LockedRequest"]
