"""Leases held by a majority of independent Redis servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import RedlockBackend

__all__ = ["RedlockBackend"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because processes without the client library read the settings, too.
    if name == "RedlockBackend":
        from .backend import RedlockBackend

        return RedlockBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
