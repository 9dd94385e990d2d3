"""Backends over the tests' databases, and short forms of their calls."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import Any

from django.db import connections

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.store import Store
from django_dlock.backends.database.table import LeaseTable
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal, RenewalResult
from django_dlock.process import current
from tests.support import databases
from tests.support.proxy import Proxy


class Bed:
    """Makes backends over a database, each with its own key prefix, and closes them."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def backend(self, alias: str, **options: Any) -> DatabaseBackend:
        backend = DatabaseBackend(
            AliasOptions(
                alias="database",
                backend="database",
                key_prefix=options.pop("key_prefix", f"test-{secrets.token_hex(4)}"),
                command_timeout=options.pop("command_timeout", 1.0),
                options={"database": alias, **options},
            )
        )
        self.stack.callback(backend.close)
        return backend

    def behind(self, proxy: Proxy, alias: str, **changes: Any) -> str:
        """An alias of the same database, through the proxy."""
        settings = {**connections.settings[alias], "HOST": "127.0.0.1", "PORT": str(proxy.port)}
        other = f"{alias}-behind-{secrets.token_hex(2)}"
        return self.stack.enter_context(databases.added(other, {**settings, **changes}))


def table_of(backend: DatabaseBackend) -> LeaseTable:
    """Through it a test makes statements as the backend does."""
    return backend._table


def store_of(backend: DatabaseBackend) -> Store:
    """The backend's statements, connections and notifications."""
    return table_of(backend).store


def request(name: str = "name", ttl: float = 30.0, **kwargs: Any) -> LeaseRequest:
    return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=ttl, **kwargs)


def ask(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease | Contention:
    return backend.acquire(attempt, deadline=backend.call_deadline())


def grant(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease:
    answer = ask(backend, attempt)
    assert isinstance(answer, Lease), answer
    return answer


def release(backend: DatabaseBackend, lease: Lease) -> str:
    return backend.release(lease.name, lease.owner, min_hold=0.0, deadline=backend.call_deadline())


def renew(backend: DatabaseBackend, *leases: Lease) -> list[str]:
    return [result.outcome for result in renewal_results(backend, *leases)]


def renewal_results(backend: DatabaseBackend, *leases: Lease) -> list[RenewalResult]:
    renewals = [Renewal(lease.name, lease.owner, lease.ttl) for lease in leases]
    return backend.renew(renewals, process=current().id, deadline=backend.call_deadline())
