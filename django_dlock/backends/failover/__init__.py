"""Leases in a primary store or, while that fails, in a standby: one of them at a time."""

from .backend import FailoverBackend

__all__ = ["FailoverBackend"]
