"""Lock aliases with short leases, for tests that wait for the end of a lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from django.test import override_settings

from django_dlock import locks
from django_dlock.core import watchdog
from tests.support.proxy import SCRIPTS, Proxy

TTL = 2.0
"""Longer than a busy machine keeps a process from running."""
TIMEOUT = 0.5
"""Command timeout of the aliases."""
LONG = 60.0
"""A TTL longer than any test: an earlier end of the lease was not its expiry."""

BACKEND = "django_dlock.backends.redis.RedisBackend"

Dlocks: TypeAlias = dict[str, dict[str, Any]]


def alias(location: str, **entry: Any) -> dict[str, Any]:
    """An entry of ``DLOCKS``."""
    options = {"command_timeout": TIMEOUT, **entry.pop("OPTIONS", {})}
    return {
        "BACKEND": BACKEND,
        "LOCATION": location,
        "TTL": TTL,
        "OPTIONS": options,
        **entry,
    }


@contextmanager
def configured(dlocks: Dlocks, **settings: Any) -> Iterator[None]:
    """Use these settings for a while; backends are rebuilt, and held locks released at the end."""
    with override_settings(DLOCKS=dlocks, **settings):
        locks.reset()
        try:
            yield
        finally:
            watchdog.shutdown()
            locks.reset()


@contextmanager
def another(proxy: Proxy, commands: int = 1) -> Iterator[None]:
    """Wait at the end until ``commands`` more scripts have passed the proxy."""
    enough = proxy.count(*SCRIPTS) + commands
    yield
    proxy.wait_until(lambda proxy: proxy.count(*SCRIPTS) >= enough)
