"""Leases in Apache ZooKeeper: ephemeral nodes of one session per process."""

from .backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
