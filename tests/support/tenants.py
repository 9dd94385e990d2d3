"""Tenants for tests in one process: ``DLOCK_SCOPE`` returns the one that is active."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.test import override_settings

_active: contextvars.ContextVar[Any] = contextvars.ContextVar("tenant", default="")


def scope() -> Any:
    """What ``DLOCK_SCOPE`` names: the active tenant; an exception is raised."""
    found = _active.get()
    if isinstance(found, Exception):
        raise found
    return found


@contextmanager
def active(tenant: Any) -> Iterator[None]:
    """A context in which this tenant is active; ``""`` for none."""
    token = _active.set(tenant)
    try:
        yield
    finally:
        _active.reset(token)


def scoped() -> override_settings:
    """The setting, for as long as the context lasts."""
    return override_settings(DLOCK_SCOPE=f"{__name__}.scope")
