"""Backends with fail-over between stores that a test gives."""

from __future__ import annotations

import secrets
from typing import Any

from django_dlock.backends.base import AliasOptions, BaseLockBackend
from django_dlock.backends.failover import FailoverBackend
from django_dlock.backends.failover.record import Record
from django_dlock.backends.failover.refresher import ViewRefresher
from django_dlock.backends.failover.terms import Leases
from django_dlock.models import FailoverRecord
from tests.support.awaited import Awaited

ALIAS = "both"


class AwaitedFailoverBackend(Awaited, FailoverBackend):
    """The same for coroutines."""


def failover_options(database: str, prefix: str = "", **options: Any) -> AliasOptions:
    ttl = options.pop("ttl", 30.0)
    return AliasOptions(
        alias=ALIAS,
        backend="failover",
        key_prefix=prefix or f"test-{secrets.token_hex(4)}",
        ttl=ttl,
        command_timeout=options.pop("command_timeout", 1.0),
        options={
            "primary": "one",
            "standby": "two",
            "database": database,
            "failover_after": None,
            **options,
        },
    )


def failover_backend(
    options: AliasOptions,
    one: BaseLockBackend,
    two: BaseLockBackend,
    kind: type[FailoverBackend] = FailoverBackend,
) -> FailoverBackend:
    backend = kind(options)
    stores = {"one": one, "two": two}
    for each in (backend, getattr(backend, "awaited", backend)):
        each.other = stores.__getitem__
    return backend


def reads_of(backend: FailoverBackend) -> ViewRefresher:
    """What keeps up to date what this backend knows of the active store."""
    return backend._active.refresher


def record_of(backend: FailoverBackend) -> Record:
    """The row that says which store is active."""
    return backend._active.record


def terms_of(backend: FailoverBackend) -> Leases:
    """The stores of the epochs in which this backend has granted."""
    return backend._active.leases


def put_record(options: AliasOptions, database: str, *, epoch: int, active: str) -> None:
    """A record whose last switch was long ago."""
    row = Record(options.alias, options.key_prefix, database, active, 1.0)
    FailoverRecord.objects.using(database).create(
        id=row._digest,
        alias=options.alias,
        key_prefix=options.key_prefix,
        epoch=epoch,
        active=active,
        longest=0,
        quiet=0,
        switched_at=0,
        answered_at=0,
    )
