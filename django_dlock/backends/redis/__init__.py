"""Leases on one Redis: reached directly, through TLS, a Unix socket or Sentinels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import RedisBackend

__all__ = ["RedisBackend"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because processes without the client library read the settings, too.
    if name == "RedisBackend":
        from .backend import RedisBackend

        return RedisBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
