"""Tests in this folder need no server, and get none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.test import override_settings

from testproject.processes import OwnProcess
from tests.conftest import NOBODY
from tests.support import mariadb, postgres

SERVERS = {
    "etcd_server",
    "mariadb_alias",
    "mariadb_url",
    "own_etcd",
    "own_redis",
    "postgres_alias",
    "postgres_url",
    "rabbit_server",
    "redis_backend",
    "redis_server",
    "zookeeper_server",
}
ELSEWHERE = "tests/unit starts no server: move this test to tests/integration or tests/backends"


@pytest.fixture(autouse=True, scope="package")
def _no_redis() -> Iterator[None]:
    default = {**settings.DLOCKS["default"], "LOCATION": NOBODY}
    with override_settings(DLOCKS={**settings.DLOCKS, "default": default}):
        yield


@pytest.fixture(autouse=True)
def _no_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if wanted := SERVERS & set(request.fixturenames):
        pytest.fail(f"{ELSEWHERE} (it asks for {', '.join(sorted(wanted))})", pytrace=False)

    def refuse(*args: object) -> None:
        pytest.fail(ELSEWHERE)

    monkeypatch.setattr(OwnProcess, "start", refuse)
    monkeypatch.setattr(postgres, "database", refuse)
    monkeypatch.setattr(mariadb, "database", refuse)
