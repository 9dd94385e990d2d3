"""Workers with each driver, whose database does not write, lacks tables or ends their sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections
from pytest_django import DjangoDbBlocker

from django_dlock.exceptions import AttemptsExhausted
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support import mariadb, postgres
from tests.support.databases import added
from tests.support.sessions import END, ask, gone_from_server, without_table
from tests.support.workers import Place, Site, eventually, orders, result

pytestmark = pytest.mark.extended

DRIVERS = {
    "psycopg": ("prefork", "threads", "gevent"),
    "psycopg2": ("prefork", "threads"),
    "pymysql": ("prefork", "threads"),
}
"""The pools with which each driver is tried."""


@dataclass
class Served:
    """Workers whose database is on a server.

    Attributes:
        over: An alias of the database, whose user has all rights.
    """

    site: Site
    place: Place
    over: str

    @property
    def is_postgres(self) -> bool:
        return connections[self.over].vendor == "postgresql"

    def end(self, session: object) -> None:
        ask(self.over, END[connections[self.over].vendor], session)
        gone_from_server(self.over, session)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """As a primary that has become a standby: no session may write."""
        if not self.is_postgres:
            ask(self.over, "SET GLOBAL read_only = 1")
            try:
                yield
            finally:
                ask(self.over, "SET GLOBAL read_only = 0")
            return
        name = connections[self.over].settings_dict["NAME"]
        ask(self.over, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        try:
            yield
        finally:
            ask(self.over, f"ALTER DATABASE {name} RESET default_transaction_read_only")

    def effects(self, order: int) -> object:
        return ask(self.over, "SELECT count(*) FROM shop_effect WHERE order_number = %s", order)

    def record(self, order: int) -> tuple[Any, ...]:
        with connections[self.over].cursor() as cursor:
            key = connections[self.over].ops.quote_name("key")
            sql = f"SELECT state, deaths FROM django_dlock_idempotencyrecord WHERE {key} = %s"
            cursor.execute(sql, [str(order)])
            return tuple(cursor.fetchone())

    def requeues(self) -> int:
        return sum(worker.output.count("is requeued") for worker in self.site.workers)


@pytest.fixture(scope="module", params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(
    driver: str,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[Served]:
    with ExitStack() as stack:
        try:
            redis = stack.enter_context(RedisServer())
            make = mariadb.database if driver == "pymysql" else postgres.database
            url = stack.enter_context(make())
        except (ServerNotFound, mariadb.MariadbNotFound) as error:
            missing(str(error))
        stack.enter_context(django_db_blocker.unblock())
        options: dict[str, Any] = {}
        if driver == "pymysql":
            over = stack.enter_context(added("drivers", mariadb.settings_for(url)))
            options["settings"] = {"DATABASES": {"default": harmless_user(over, url)}}
        else:
            over = stack.enter_context(added("drivers", postgres.settings_for(url)))
            options["postgres"] = url
        site = Site(redis, tmp_path_factory.mktemp(driver), **options)
        site.env["TASKS_DRIVER"] = driver
        with site:
            for pool in DRIVERS[driver]:
                site.worker(pool)
            yield Served(site, site.place(), over)


def harmless_user(over: str, url: str) -> dict[str, Any]:
    """Settings with a user whom ``read_only`` binds."""
    ask(over, "CREATE USER app@localhost IDENTIFIED BY 'app'")
    ask(over, f"GRANT ALL ON {urlsplit(url).path.lstrip('/')}.* TO app@localhost")
    return {**mariadb.settings_for(url), "USER": "app", "PASSWORD": "app"}


@pytest.fixture
def order() -> int:
    return next(orders)


@pytest.fixture(params=["prefork", "threads", "gevent"])
def pool(driver: str, request: pytest.FixtureRequest) -> str:
    if request.param not in DRIVERS[driver]:
        pytest.skip(f"{driver} is not tried with it")
    return str(request.param)


def test_g13_a_read_only_database_fails_no_task(served, pool, order):
    with served.read_only():
        before = served.requeues()
        sent = served.site.send("charge_once", order, str(served.place), queue=pool)
        eventually(lambda: served.requeues() >= before + 2)
        assert sent.state == "RETRY"
    assert result(sent) == 1
    assert (served.record(order), served.effects(order)) == (("succeeded", 0), 1)


def test_g13_a_database_that_becomes_read_only_during_a_body_fails_no_task(served, pool, order):
    """Its transaction is rolled back because its session ends; then no statement is accepted."""
    sent = served.site.send(
        "loses_connection", order, str(served.place), "ended", queue=pool, task_id=str(order)
    )
    (session,) = served.place.wait(f"session-{order}")
    with served.read_only():
        before = served.requeues()
        served.end(session)
        served.place.open(f"ended-{order}-1")
        eventually(lambda: served.requeues() >= before + 2)
        assert sent.state == "RETRY"
    served.place.wait(f"session-{order}", 2)
    served.place.open(f"ended-{order}-2")
    assert result(sent) is None
    assert (served.record(order), served.effects(order)) == (("succeeded", 0), 1)


def test_g13_without_our_tables_a_task_waits_and_its_log_says_what_to_run(served, pool, order):
    with without_table(served.over, "django_dlock_idempotencyrecord"):
        before = served.requeues()
        sent = served.site.send("charge_once", order, str(served.place), queue=pool)
        eventually(lambda: served.requeues() >= before + 2)
    assert result(sent) == 1
    output = "".join(worker.output for worker in served.site.workers)
    assert "run manage.py migrate django_dlock:" in output


@pytest.mark.parametrize("how", ["closed", "ended"])
def test_g13_a_body_that_always_loses_its_connection_unseen_fails_for_good(
    served, pool, order, how
):
    sent = served.site.send("loses_connection", order, str(served.place), how, queue=pool)
    for count in (1, 2) if how == "ended" else ():
        served.end(served.place.wait(f"session-{order}", count)[count - 1])
        served.place.open(f"ended-{order}-{count}")
    with pytest.raises(AttemptsExhausted, match="2 runs that died in the middle"):
        result(sent)
    assert len(served.place.lines(f"began-{order}")) == 2
    assert (served.record(order), served.effects(order)) == (("failed", 2), 0)
