"""The public import path of ``LockedRequest``, for tasks and subclasses."""

from .worker.locked_request import LockedRequest

__all__ = ["LockedRequest"]
