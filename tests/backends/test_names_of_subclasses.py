"""Names that are strings of a subclass, such as members of Django's ``TextChoices``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
from django.db import models
from django.utils.safestring import mark_safe
from pytest_django import DjangoDbBlocker

from django_dlock import Lock, locks
from tests.support.aliases import configured

STORES = {
    "local": "local.LocalBackend",
    "redis": "redis.RedisBackend",
    "etcd": "etcd.EtcdBackend",
    "zookeeper": "zookeeper.ZooKeeperBackend",
    "default": "database.DatabaseBackend",
    "postgres": "database.DatabaseBackend",
    "mariadb": "database.DatabaseBackend",
}


class Job(str, Enum):
    REPORT = "report:daily"


class Choice(models.TextChoices):
    REPORT = "report:daily"


class Shown(str):
    def __str__(self) -> str:
        return "something else"

    __repr__ = __str__


NIGHTLY = ("mariadb", "etcd", "zookeeper")


@pytest.fixture(
    params=[pytest.param(it, marks=pytest.mark.nightly) if it in NIGHTLY else it for it in STORES]
)
def store(
    request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker, django_db_setup: None
) -> Iterator[None]:
    kind: str = request.param
    entry: dict[str, Any] = {
        "BACKEND": f"django_dlock.backends.{STORES[kind]}",
        "KEY_PREFIX": f"test-{secrets.token_hex(4)}",
        "OPTIONS": {"command_timeout": 10.0},
    }
    if kind in ("postgres", "mariadb"):
        entry["OPTIONS"]["database"] = request.getfixturevalue(f"{kind}_alias")
    elif kind in ("redis", "etcd"):
        entry["LOCATION"] = request.getfixturevalue(f"{kind}_server").url
    elif kind == "zookeeper":
        entry["LOCATION"] = request.getfixturevalue("zookeeper_server").location
    with django_db_blocker.unblock(), configured({"default": entry}):
        yield


@pytest.mark.usefixtures("store")
def test_g1_a_name_of_a_subclass_is_that_of_its_value() -> None:
    for name in (Job.REPORT, Choice.REPORT, Shown("report:daily"), mark_safe("report:daily")):
        with Lock(name) as lock:
            assert type(lock.name) is str
            for other in (Job.REPORT, Choice.REPORT, Shown("report:daily"), "report:daily"):
                assert not Lock(other, bound=False).acquire(blocking=False)
                found = locks["default"].get(other)
                assert found is not None
                assert found.name == "report:daily"
                assert locks["default"].break_(other, owner="nobody") is False
        with Lock("report:daily"):
            assert not Lock(name, bound=False).acquire(blocking=False)
            assert Lock(name).locked()
