"""What becomes of a message whose run meets an error of the record's database."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery
from django.core.management import call_command
from django.db import connections, transaction
from kombu.utils import json
from pytest_django import DjangoDbBlocker

from django_dlock import Lock
from django_dlock.celery.delivery.interrupt import BodyRunner
from django_dlock.exceptions import AttemptsExhausted
from django_dlock.models import FollowUp, IdempotencyRecord
from django_dlock.records import idempotency
from testproject.shop.models import Effect
from tests.support import mariadb, postgres
from tests.support.databases import added
from tests.support.deliveries import in_memory, recorded, waiting, work
from tests.support.pgbouncer import PgBouncer
from tests.support.proxy import Proxy
from tests.support.sessions import (
    ask,
    end_session,
    gone_from_server,
    read_only,
    without_table,
)

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.extended]

RECORDS = "django_dlock_idempotencyrecord"


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@dataclass
class Database:
    """A migrated database.

    Attributes:
        using: Its alias, for tasks.
        over: Another alias of the same server, with all rights.
    """

    using: str
    over: str

    def record(self) -> tuple[str, int]:
        """State and deaths of the only record."""
        return IdempotencyRecord.objects.using(self.using).values_list("state", "deaths").get()

    def effects(self) -> int:
        return Effect.objects.using(self.using).count()

    def write(self) -> None:
        Effect.objects.using(self.using).create(order_number=1, by="body")

    def end_session(self) -> None:
        end_session(self.using, self.over)


@pytest.fixture(scope="module")
def sqlite_file(
    tmp_path_factory: pytest.TempPathFactory, django_db_setup: None, django_db_blocker: Any
) -> Iterator[Database]:
    # In a file, because Django never closes a database in memory.
    file = tmp_path_factory.mktemp("errors") / "db.sqlite3"
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": file}
    # What a PRAGMA sets is a matter of one connection.
    settings["CONN_MAX_AGE"] = None
    with added("errors-sqlite", settings) as alias, added("errors-sqlite-2", settings) as over:
        with django_db_blocker.unblock():
            call_command("migrate", database=alias, verbosity=0)
        yield Database(alias, over)


@pytest.fixture(scope="module")
def on_postgres(postgres_alias: str, postgres_url: str) -> Iterator[Database]:
    settings = postgres.settings_for(postgres_url)
    with added("errors-postgres", settings) as alias:
        yield Database(alias, postgres_alias)


@pytest.fixture(scope="module")
def on_mariadb(
    mariadb_alias: str, mariadb_url: str, django_db_blocker: DjangoDbBlocker
) -> Iterator[Database]:
    # ``read_only`` does not bind the superuser.
    name = urlsplit(mariadb_url).path.lstrip("/")
    settings = {**mariadb.settings_for(mariadb_url), "USER": "app", "PASSWORD": "app"}
    with django_db_blocker.unblock():
        # An anonymous user would come before one for any host.
        ask(mariadb_alias, "CREATE USER IF NOT EXISTS app@localhost IDENTIFIED BY 'app'")
        ask(mariadb_alias, f"GRANT ALL ON {name}.* TO app@localhost")
    with added("errors-mariadb", settings) as alias:
        yield Database(alias, mariadb_alias)


FIXTURES = {"sqlite": "sqlite_file", "postgres": "on_postgres", "mariadb": "on_mariadb"}


@pytest.fixture(params=FIXTURES)
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    yield from emptied(request.getfixturevalue(FIXTURES[request.param]))


def emptied(database: Database) -> Iterator[Database]:
    for model in (FollowUp, IdempotencyRecord, Effect):
        model.objects.using(database.over).all().delete()
    yield database
    for alias in (database.using, database.over):
        connections[alias].close()


@pytest.fixture(scope="module")
def pooled(pooler: PgBouncer, postgres_url: str, on_postgres: Database) -> Iterator[Database]:
    settings = postgres.settings_for(pooler.url_for(postgres_url))
    settings["DISABLE_SERVER_SIDE_CURSORS"] = True
    with added("errors-pooled", settings) as alias:
        yield Database(alias, on_postgres.over)


@pytest.fixture
def postgresql(on_postgres: Database) -> Iterator[Database]:
    yield from emptied(on_postgres)


@pytest.fixture(scope="module")
def behind_proxy(postgres_url: str, on_postgres: Database) -> Iterator[tuple[Database, Proxy]]:
    parts = urlsplit(postgres_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 5432, speaks="postgres") as proxy:
        settings = {**postgres.settings_for(postgres_url), "HOST": "127.0.0.1"}
        settings |= {"PORT": str(proxy.port), "OPTIONS": {"connect_timeout": 3}}
        with added("errors-proxied", settings) as alias:
            yield Database(alias, on_postgres.over), proxy


@pytest.fixture
def proxied(behind_proxy: tuple[Database, Proxy]) -> Iterator[tuple[Database, Proxy]]:
    """A PostgreSQL that can go away."""
    database, proxy = behind_proxy
    for _ in emptied(database):
        yield behind_proxy
        if is_away(proxy):
            proxy.accept()


def is_away(proxy: Proxy) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", proxy.port)) != 0


@pytest.fixture(autouse=True, scope="module")
def _all_of_them(request: pytest.FixtureRequest) -> None:
    """Django's tests use the databases that are known when they begin."""
    for fixture in (*FIXTURES.values(), "behind_proxy", "pooled"):
        with suppress(pytest.skip.Exception):
            request.getfixturevalue(fixture)


def charge(app: Celery, database: Database, body: Any, **options: Any) -> Any:
    return recorded(app, body, **{"idempotency_using": database.using, **options})


# -- a database that does not write ----------------------------------------------------------


@pytest.mark.parametrize("atomic", [True, False])
def test_g13_a_database_that_is_read_only_in_the_body_is_an_outage(app, database, atomic):
    """With ``max_attempts=1``, a run that counts as dead would end the task."""
    begun: list[int] = []

    def body(self, order):
        begun.append(order)
        if len(begun) == 1:
            make_read_only()
            if atomic and connections[database.using].vendor == "postgresql":
                # As in a session whose transaction begins on the standby.
                ask(database.using, "SET TRANSACTION READ ONLY")
        database.write()
        return order

    sent = charge(app, database, body, atomic=atomic, max_attempts=1).delay(1)
    with read_only(database.using, database.over) as make_read_only:
        work(app)
        assert sent.state == "RETRY"
        # Now the record cannot be claimed.
        work(app)
        assert (sent.state, begun) == ("RETRY", [1])
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", 1)
    assert (database.record(), database.effects()) == (("succeeded", 0), 1)


def test_g13_a_body_that_makes_its_own_transaction_read_only_fails_for_good(app, postgresql):
    begun: list[int] = []

    def body(self, order):
        begun.append(order)
        ask(postgresql.using, "SET TRANSACTION READ ONLY")
        postgresql.write()

    sent = charge(app, postgresql, body, max_attempts=2).delay(1)
    work(app)
    assert (sent.state, postgresql.record()) == ("RETRY", ("waiting", 1))
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)
    assert (len(begun), postgresql.record()) == (2, ("failed", 2))
    assert waiting(app) is None


# -- missing tables --------------------------------------------------------------------------


def test_g13_without_our_tables_a_task_waits_and_says_what_to_run(app, database, caplog):
    def body(self, order):
        database.write()

    sent = charge(app, database, body).delay(1)
    with without_table(database.over, RECORDS):
        work(app)
        assert sent.state == "RETRY"
    assert f"run manage.py migrate django_dlock --database {database.using}" in caplog.text
    work(app)
    assert (sent.state, database.effects()) == ("SUCCESS", 1)


def test_g13_a_body_that_meets_no_table_of_ours_waits(app, database):
    def body(self, order):
        database.write()
        self.current_run.send(other.s(1))

    other = recorded(app)
    sent = charge(app, database, body, max_attempts=1).delay(1)
    with without_table(database.over, "django_dlock_followup"):
        work(app)
        assert (sent.state, database.record()) == ("RETRY", ("waiting", 0))
    work(app)
    assert (sent.state, database.effects()) == ("SUCCESS", 1)


def test_a_table_that_the_body_misses_is_its_own_failure(app, database):
    def body(self, order):
        ask(database.using, "SELECT 1 FROM nowhere")

    sent = charge(app, database, body).delay(1)
    work(app)
    assert sent.state == "FAILURE"
    assert "nowhere" in str(sent.result)
    assert database.record() == ("failed", 0)


# -- connections that end --------------------------------------------------------------------


def close_all(database: Database) -> None:
    connections.close_all()


def end_raw(database: Database) -> None:
    database.end_session()


@pytest.mark.parametrize("lose", [close_all, end_raw])
@pytest.mark.parametrize("then", ["return", "query"])
def test_g13_a_body_that_always_loses_its_connection_fails_for_good(app, database, lose, then):
    """If it returns, only the statement that records its end notices this."""
    begun: list[int] = []

    def body(self, order):
        begun.append(order)
        database.write()
        lose(database)
        if then == "query":
            database.effects()

    sent = charge(app, database, body, max_attempts=2).delay(1)
    work(app)
    assert (sent.state, database.record()) == ("RETRY", ("waiting", 1))
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)
    assert (len(begun), database.record(), database.effects()) == (2, ("failed", 2), 0)


@pytest.mark.parametrize("then", ["return", "query"])
def test_g13_a_body_whose_session_a_pooler_loses_fails_for_good(app, pooled, then):
    def body(self, order):
        pooled.write()
        pooled.end_session()
        if then == "query":
            pooled.effects()

    for database in emptied(pooled):
        sent = charge(app, database, body, max_attempts=2).delay(1)
        work(app)
        assert (sent.state, database.record()) == ("RETRY", ("waiting", 1))
        work(app)
        assert isinstance(sent.result, AttemptsExhausted)
        assert (database.record(), database.effects()) == (("failed", 2), 0)


def test_g13_a_body_that_idles_for_too_long_in_its_transaction_fails_for_good(app, postgresql):
    def body(self, order):
        session = ask(postgresql.using, "SELECT pg_backend_pid()")
        ask(postgresql.using, "SET LOCAL idle_in_transaction_session_timeout = 1")
        gone_from_server(postgresql.over, session)

    sent = charge(app, postgresql, body, max_attempts=2).delay(1)
    work(app)
    assert (sent.state, postgresql.record()) == ("RETRY", ("waiting", 1))
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)


def test_g13_a_body_whose_limit_stops_the_statement_that_records_it_fails_for_good(app, postgresql):
    def body(self, order):
        # Somebody who reads the record for an update makes our statement wait for its row.
        reading.enter_context(transaction.atomic(using=postgresql.over))
        ask(postgresql.over, f"SELECT id FROM {RECORDS} FOR UPDATE")
        reading.callback(connections[postgresql.over].close)
        ask(postgresql.using, "SET LOCAL statement_timeout = 50")

    sent = charge(app, postgresql, body, max_attempts=2).delay(1)
    with pytest.MonkeyPatch.context() as patched, ExitStack() as reading:
        mark = idempotency.mark_interrupted
        patched.setattr(
            idempotency, "mark_interrupted", lambda *given: reading.close() or mark(*given)
        )
        work(app)
    assert (sent.state, postgresql.record()) == ("RETRY", ("waiting", 1))


@pytest.mark.parametrize("away", ["body", "recording"])
def test_g13_a_database_that_goes_away_is_no_death(app, proxied, away):
    database, proxy = proxied
    begun: list[int] = []

    def body(self, order):
        begun.append(order)
        database.write()
        if len(begun) == 1:
            proxy.refuse()
            if away == "body":
                database.effects()
        return order

    sent = charge(app, database, body, max_attempts=1).delay(1)
    work(app)
    assert sent.state == "RETRY"
    work(app)
    assert (sent.state, len(begun)) == ("RETRY", 1)
    proxy.accept()
    work(app)
    assert (sent.state, database.record()) == ("SUCCESS", ("succeeded", 0))
    assert (len(begun), database.effects()) == (2, 1)


def test_g13_a_database_error_of_a_body_that_was_stopped_in_an_outage_is_no_death(
    app, postgresql, monkeypatch
):
    """Its lease was lost because the lock's backend did not answer; that came first."""

    def body(self, order):
        monkeypatch.setattr(Lock, "lost_reason", "unreachable")
        monkeypatch.setattr(BodyRunner, "interrupted", True)
        postgresql.end_session()
        postgresql.write()

    sent = charge(app, postgresql, body, max_attempts=1).delay(1)
    work(app)
    assert (sent.state, postgresql.record()) == ("RETRY", ("waiting", 0))


@pytest.mark.parametrize("lose", [close_all, end_raw])
def test_g12_a_connection_that_a_body_loses_outside_a_transaction_repeats_nothing(
    app, database, lose
):
    """Its effects are committed; only the statement that records the end was lost."""
    begun: list[int] = []

    def body(self, order):
        begun.append(order)
        database.write()
        lose(database)
        return order

    sent = charge(app, database, body, atomic=False).delay(1)
    work(app)
    assert (sent.state, sent.result, len(begun)) == ("SUCCESS", 1, 1)
    assert (database.record(), database.effects()) == (("succeeded", 0), 1)
    assert waiting(app) is None


def test_an_error_after_the_connection_was_lost_is_the_bodys_own(app, database):
    def body(self, order):
        database.end_session()
        raise ValueError("no such order")

    sent = charge(app, database, body, atomic=False).delay(1)
    work(app)
    assert isinstance(sent.result, ValueError)
    assert database.record() == ("failed", 0)


def test_a_deadlock_on_a_connection_that_the_body_has_renewed_is_its_own(app, postgresql):
    """Nothing was lost: the body has closed its idle connection, and met a deadlock later."""

    def body(self, order):
        connections.close_all()
        ask(postgresql.using, "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$")

    sent = charge(app, postgresql, body, atomic=False).delay(1)
    work(app)
    assert sent.state == "FAILURE"
    assert postgresql.record() == ("failed", 0)


def test_an_outage_of_another_database_is_the_bodys_own(app, postgresql, proxied):
    """The record's database is fine, so whether to repeat is the body's decision."""
    other, proxy = proxied

    def body(self, order):
        other.effects()

    sent = charge(app, postgresql, body).delay(1)
    proxy.refuse()
    work(app)
    assert sent.state == "FAILURE"
    assert postgresql.record() == ("failed", 0)


# -- keys from a database --------------------------------------------------------------------


def numbered(using: str) -> Any:
    def key(self_or_order: Any, *rest: Any) -> str:
        return f"order:{self_or_order}:{Effect.objects.using(using).count()}"

    return key


@pytest.mark.parametrize("option", ["lock_key", "idempotency_key"])
def test_g13_a_key_that_asks_a_database_that_is_away_can_wait(app, proxied, option):
    database, proxy = proxied

    def body(self, order):
        return order

    sent = charge(app, database, body, **{option: numbered(database.using)}).delay(1)
    proxy.refuse()
    work(app)
    assert sent.state == "RETRY"
    proxy.accept()
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", 1)


class Loaded:
    """As a model whose attribute is loaded when it is read."""

    def __init__(self, using: str) -> None:
        self.using = using

    @property
    def number(self) -> int:
        return Effect.objects.using(self.using).count()


@pytest.mark.parametrize("option", ["lock_key", "idempotency_key"])
def test_g13_an_attribute_that_is_read_from_a_database_that_is_away_can_wait(app, proxied, option):
    database, proxy = proxied
    json.register_type(Loaded, "tests.loaded", lambda given: given.using, Loaded)

    def body(self, order):
        return 1

    made = charge(
        *(app, database, body),
        idempotency_payload=[],
        **{"lock_key": "order", "idempotency_key": "1", option: "order:{order.number}"},
    )
    sent = made.delay(Loaded(database.using))
    proxy.refuse()
    work(app)
    assert sent.state == "RETRY"
    proxy.accept()
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", 1)


@pytest.mark.parametrize("option", ["lock_key", "idempotency_key"])
def test_an_error_of_a_key_that_is_no_outage_fails_the_task(app, database, option):
    def key(order):
        return str(ask(database.using, "SELECT 1 FROM nowhere"))

    def body(self, order):
        return order

    sent = charge(app, database, body, **{option: key}).delay(1)
    work(app)
    assert sent.state == "FAILURE"
    assert "nowhere" in str(sent.result)
