"""Leases in etcd 3.4 or newer."""

from .backend import EtcdBackend

__all__ = ["EtcdBackend"]
