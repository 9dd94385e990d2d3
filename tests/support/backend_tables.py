"""The backends of the package, with a location where no server is, and what they require."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.utils.module_loading import import_string

from django_dlock.backends.base import BackendOptions
from django_dlock.backends.shared.options import Option, options_of

NOBODY = "redis://127.0.0.1:1/0"
SEVERAL = [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]
BACKENDS: dict[str, Any] = {
    "database.DatabaseBackend": None,
    "etcd.EtcdBackend": "http://127.0.0.1:1",
    "failover.FailoverBackend": None,
    "local.LocalBackend": None,
    "redis.RedisBackend": NOBODY,
    "redlock.RedlockBackend": SEVERAL,
    "zookeeper.ZooKeeperBackend": "127.0.0.1:1",
}
"""Backend → a location that it accepts."""


def table_of(backend: str) -> type[BackendOptions]:
    table: type[BackendOptions] = import_string(f"django_dlock.backends.{backend}").own_options
    return table


def all_fields() -> Iterator[tuple[str, str, Option]]:
    """The backend, the name and the description of each field of each table."""
    for backend in BACKENDS:
        for name, it in options_of(table_of(backend)).items():
            yield backend, name, it


def entry_of(backend: str, **options: Any) -> dict[str, Any]:
    """An entry of ``DLOCKS`` that is right, but perhaps for these options."""
    required = {"primary": "one", "standby": "two"} if backend.startswith("failover") else {}
    entry: dict[str, Any] = {
        "BACKEND": f"django_dlock.backends.{backend}",
        "OPTIONS": {**required, **options},
    }
    if BACKENDS[backend] is not None:
        entry["LOCATION"] = BACKENDS[backend]
    return entry
