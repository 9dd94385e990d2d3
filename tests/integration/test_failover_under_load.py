"""Locked tasks go on while their store fails, is replaced by another one, and comes back."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock import clock, locks
from django_dlock.backends.failover import FailoverBackend
from django_dlock.backends.failover.terms import TOKEN_BITS
from django_dlock.models import FailoverRecord
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support import databases, postgres
from tests.support.aliases import configured
from tests.support.failing_over import record_of
from tests.support.workers import Place, Site, eventually

pytestmark = pytest.mark.nightly

TTL, VIEW_TTL, FAILOVER_AFTER = 4.0, 2.0, 2.0
PER_SECOND = 50
"""Tasks that are published; each order is sent twice."""
SECONDS = float(os.environ.get("DLOCK_LOAD_SECONDS", "0"))
"""How long each store stays active before the next switch; ``make failover-load`` sets it."""
ACCOUNTS = 10
LONG = 120.0 + SECONDS
"""Seconds of bodies that go on until their lock is lost."""
PATIENCE = 240.0 + 4 * SECONDS


class Span(NamedTuple):
    """From when to when a body considered the lock its own."""

    account: int
    token: int
    began: float
    ends: float
    lost: str
    task_id: str


class Load:
    """Publishes messages at a steady rate until it is stopped."""

    def __init__(self, site: Site, place: Place) -> None:
        self._site, self._place = site, place
        self.orders: list[int] = []
        self.locked: set[str] = set()
        self.began_at = self.ended_at = clock.now()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count(1):
            # By the clock, so that a publish that takes long is made up for.
            due = self.began_at + self.sent / PER_SECOND
            if self._stopped.wait(max(0.0, due - clock.now())):
                self.ended_at = clock.now()
                return
            if number % 3 == 0:
                self.lock(number // 3 % ACCOUNTS)
                continue
            self.orders.append(1_000_000 + number)
            for _ in range(2):
                self._site.send("charge", self.orders[-1], str(self._place))

    @property
    def sent(self) -> int:
        """How many tasks were published."""
        return 2 * len(self.orders) + len(self.locked)

    def lock(self, account: int, *more: float) -> str:
        task_id = str(uuid.uuid4())
        self._site.send("locked", account, str(self._place), *more, task_id=task_id)
        self.locked.add(task_id)
        return task_id

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class Bed(NamedTuple):
    site: Site
    primary: RedisServer
    driver: FailoverBackend

    def active(self) -> str:
        found: Any = FailoverRecord.objects.using(record_of(self.driver).database)
        return str(found.values_list("active", flat=True).get())


STANDBYS = ("zookeeper", "table")


@pytest.fixture(params=STANDBYS)
def bed(
    request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> Iterator[Bed]:
    standby: dict[str, Any] = {"BACKEND": "django_dlock.backends.database.DatabaseBackend"}
    if request.param == "zookeeper":
        location = request.getfixturevalue("zookeeper_server").location
        standby = {
            "BACKEND": "django_dlock.backends.zookeeper.ZooKeeperBackend",
            "LOCATION": location,
            "KEY_PREFIX": f"test-{uuid.uuid4().hex[:8]}",
        }
    options = {
        "primary": "redis",
        "standby": request.param,
        "view_ttl": VIEW_TTL,
        "failover_after": FAILOVER_AFTER,
        "command_timeout": 0.6,
    }
    with contextlib.ExitStack() as stack:
        try:
            broker = stack.enter_context(RedisServer())
            primary = stack.enter_context(RedisServer())
            url = stack.enter_context(postgres.database())
        except (ServerNotFound, postgres.PostgresNotFound) as error:
            missing(str(error))
        dlocks = {
            "default": {
                "BACKEND": "django_dlock.backends.failover.FailoverBackend",
                "TTL": TTL,
                "OPTIONS": options,
            },
            "redis": {
                "BACKEND": "django_dlock.backends.redis.RedisBackend",
                "LOCATION": primary.url,
                "OPTIONS": {"command_timeout": 0.6},
            },
            request.param: {"TTL": TTL, **standby, "OPTIONS": {"command_timeout": 0.6}},
        }
        site = stack.enter_context(
            Site(
                broker,
                tmp_path / "site",
                postgres=url,
                settings={"DLOCKS": dlocks},
                tasks="tests.support.tasks_failover",
            )
        )
        for _ in range(2):
            site.worker("prefork", 4)
        stack.enter_context(django_db_blocker.unblock())
        alias = stack.enter_context(databases.added("load", postgres.settings_for(url)))
        mine: Any = {**dlocks, "default": {**dlocks["default"]}}
        mine["default"]["OPTIONS"] = {**options, "database": alias, "failover_after": None}
        stack.enter_context(configured(mine))
        driver: Any = locks["default"]
        yield Bed(site, primary, driver)


def spans_of(place: Place) -> list[Span]:
    lines = [line.split() for line in place.lines("spans")]
    return [
        Span(int(account), int(token), float(began), float(ends), lost, task_id)
        for account, token, began, ends, lost, task_id in lines
    ]


def test_g1_g12_tasks_under_load_survive_a_switch_and_the_way_back(bed):
    place = bed.site.place()
    load = Load(bed.site, place)
    try:
        long = [load.lock(100 + number, LONG) for number in range(2)]
        eventually(lambda: set(long) <= set(place.lines("begun")), 60, "the long bodies run")
        eventually(lambda: len(place.lines("spans")) > 20, 60, "work is done")
        # They have been renewed by then.
        time.sleep(max(SECONDS, 2 * TTL / 3))
        killed_at = clock.now()
        bed.primary.kill()
        eventually(lambda: bed.active() != "redis", 60, "the workers switch")
        # The accounts of the long bodies are wanted by others, too.
        long_rivals = [load.lock(100 + number) for number in range(2)]
        eventually(lambda: epoch_seen(place, 2), 60, "work is done in the standby")
        time.sleep(SECONDS)
        bed.primary.start()
        bed.driver.switch("redis", bed.driver.read_record())
        eventually(lambda: epoch_seen(place, 3), 90, "work is done in the primary again")
        time.sleep(SECONDS)
    finally:
        load.stop()

    def finished() -> bool:
        return load.locked <= {span.task_id for span in spans_of(place)}

    eventually(finished, PATIENCE, "every lock-only task has run")
    effects = eventually(
        lambda: (found := effects_of(bed.site)).keys() >= set(load.orders) and found,
        PATIENCE,
        "every order is charged",
    )
    assert len(load.orders) > 100
    doubled = {order: count for order, count in effects.items() if count > 1}
    assert not doubled
    spans = spans_of(place)
    epochs = collections.Counter(span.token >> TOKEN_BITS for span in spans)
    rate = load.sent / (load.ended_at - load.began_at)
    print(
        f"{rate:.0f} tasks a second: {len(load.orders)} orders twice, {len(load.locked)} others; "
        f"lock-only bodies by epoch: {dict(epochs)}; lost under their holder: "
        f"{sum(span.lost != '-' for span in spans)}"
    )
    told = [span for span in spans if span.task_id in long and span.began < killed_at]
    assert len(told) == len(long)
    assert all(span.lost != "-" for span in told)
    assert set(long_rivals) <= {span.task_id for span in spans}
    by_account = collections.defaultdict(list)
    for span in sorted(spans, key=lambda span: span.token):
        by_account[span.account].append(span)
    for mine in by_account.values():
        for earlier, later in itertools.pairwise(mine):
            assert earlier.token < later.token
            assert earlier.ends <= later.began, (earlier, later)


def epoch_seen(place: Place, epoch: int) -> bool:
    return any(span.token >> TOKEN_BITS == epoch for span in spans_of(place))


def effects_of(site: Site) -> collections.Counter[int]:
    rows = site.query("SELECT order_number, count(*) FROM shop_effect GROUP BY order_number")
    return collections.Counter(dict(rows))
