"""The rows about locks that operators break, while their database is silent: they delay nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client, override_settings
from django.urls import reverse

from django_dlock import locks
from django_dlock.core import dispatch
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import LockEvent
from django_dlock.operators import audit
from testproject.postgres import PostgresServer
from testproject.servers import RedisServer
from tests.conftest import started
from tests.support import databases
from tests.support.aliases import alias, configured
from tests.support.postgres import settings_for

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"order:{number}" for number in range(5)]
LIST = "/admin/django_dlock/heldlock/"

pytestmark = pytest.mark.extended


# For the module, because a test must not define the databases that it may use.
@pytest.fixture(scope="module")
def postgres_of_events() -> Iterator[PostgresServer]:
    """A PostgreSQL, which is also the database ``events``."""
    pytest.importorskip("psycopg")
    for server in started(PostgresServer()):
        with databases.added("events", settings_for(server.url)):
            yield server


@pytest.fixture
def silent_postgres(postgres_of_events: PostgresServer) -> Iterator[PostgresServer]:
    """A PostgreSQL that accepts connections, and answers nothing."""
    postgres_of_events.pause()
    yield postgres_of_events
    postgres_of_events.resume()


@pytest.fixture
def held(own_redis: RedisServer) -> Iterator[list[str]]:
    """The names of locks that some other process holds."""
    with configured({"default": alias(own_redis.url)}):
        backend = locks["default"]
        for name in NAMES:
            request = LeaseRequest(name=name, owner=f"owner of {name}", ttl=60)
            assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)
        yield NAMES


def clear(redis: RedisServer, events: PostgresServer, *options: str) -> SimpleNamespace:
    env = {
        **os.environ,
        "REDIS_URL": redis.url,
        "EVENTS_URL": events.url,
        "DJANGO_SETTINGS_MODULE": "tests.support.silent_events",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(ROOT / "manage.py"), "clear_stale_locks", "--force"]
    done = subprocess.run(
        [*command, "--name", "order:*", *options],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def test_a_silent_database_of_events_stops_no_clearing(
    own_redis: RedisServer, silent_postgres: PostgresServer, held: list[str]
) -> None:
    told = clear(own_redis, silent_postgres)
    assert locks["default"].list() == []
    assert "5 cleared." in told.out
    assert "database 'default' did not answer" in told.err
    assert all(repr(name) in told.err for name in held)
    assert told.code == 1


class EventsElsewhere:
    """A router that sends lock events to a database of their own."""

    def db_for_write(self, model: Any, **_: Any) -> str | None:
        return "events" if model is LockEvent else None


@pytest.mark.django_db(databases=["default", "events"])
def test_a_silent_database_of_events_stops_no_release_of_the_admin(
    postgres_of_events: PostgresServer,
    held: list[str],
    admin_client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reverse("admin:index")
    monkeypatch.setattr(audit, "PATIENCE", 0.1)
    chosen = held[:4]
    answers = {
        "action": "release_selected",
        "_selected_action": [f"default/{name}" for name in chosen],
        "owner": [f"owner of {name}" for name in chosen],
        "force": "on",
    }
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.EventsElsewhere"]):
        postgres_of_events.pause()
        try:
            response = admin_client.post(LIST, answers, follow=True)
        finally:
            # What is on its way goes on when the database answers again.
            postgres_of_events.resume()
        assert dispatch.flush(30)
    told = [str(message) for message in response.context["messages"]]
    assert len(locks["default"].list()) == 1
    assert len(told) == len(chosen) + 1
    assert "did not answer" in told[-1]
    assert all(name in told[-1] for name in chosen)
    assert LogEntry.objects.count() == len(chosen)
