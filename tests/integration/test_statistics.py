"""Lock statistics are added up in a table by all processes, on the databases that people use."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict

import pytest
from django.db import OperationalError, connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_dlock import Lock, locks, process
from django_dlock.core import dispatch
from django_dlock.databases.errors import migrate_command
from django_dlock.metrics import admin, instruments, table
from django_dlock.metrics.admin import AdminExporter
from django_dlock.metrics.counts import Point, Series
from django_dlock.metrics.groups import Groups
from django_dlock.metrics.recorder import Recorder
from django_dlock.models import LockStatistics
from django_dlock.records import retention
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.databases import added, until
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, Site, result

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.extended]

LOCAL = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
ORDER = {"alias": "default", "group": "order"}
Period = LockStatistics.Period


@pytest.fixture
def target(database, monkeypatch):
    """Each database in turn; a project would have a router."""
    monkeypatch.setattr(table, "database", lambda: database)
    rows = LockStatistics.objects.using(database)
    rows.all().delete()
    yield rows
    rows.all().delete()


def writers():
    """The threads of exporters."""
    return {thread for thread in threading.enumerate() if thread.name == "dlock-statistics"}


def point(*durations):
    made = Point()
    for seconds in durations:
        made.observe(seconds)
    return made


def minutes(group="order", **more):
    series = Series(instruments.WAITS.name, "default", group, "")
    return {1_790_000_040: {series: point(0.002, 3.0), **more}}


def test_every_process_adds_to_the_same_rows(target):
    table.write(minutes())
    table.write(
        {1_790_000_040: {Series(instruments.WAITS.name, "default", "order", ""): point(9.0)}}
    )
    assert set(target.values_list("period", flat=True)) == set(Period.values)
    row = target.get(period=60)
    assert (row.start, row.metric, row.alias) == (
        1_790_000_040,
        "django_dlock.wait.duration",
        "default",
    )
    assert (row.group, row.label) == ("order", "")
    assert (row.count, row.highest) == (3, 9.0)
    assert row.total == pytest.approx(12.002)
    counted = [getattr(row, bucket) for bucket in LockStatistics.BUCKETS]
    assert counted == [0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_groups_are_told_apart_exactly(target):
    for group in ("order", "Order", "örder", "order ", "🔒", "עברית"):
        table.write(minutes(group))
    assert target.filter(period=60).count() == 6
    assert set(target.filter(period=60).values_list("count", flat=True)) == {2}


def test_a_minute_of_a_process_is_one_statement(target):
    table.write(minutes())
    series = {
        Series(instruments.WAITS.name, "default", f"g{number}", ""): point(1.0)
        for number in range(10)
    }
    connection = connections[target.db]
    with CaptureQueriesContext(connection) as queries:
        table.write({1_790_000_040: series})
    writes = [each for each in queries if each["sql"].startswith("INSERT")]
    assert len(writes) == 1
    assert len(queries) == (2 if connection.vendor == "sqlite" else 1)


def test_many_rows_are_added_all_or_none(target, monkeypatch):
    monkeypatch.setattr(table, "MOST_ROWS", 2)
    add, calls = table._add, []

    def fail_in_the_middle(connection, rows):
        calls.append(rows)
        if len(calls) == 2:
            raise OperationalError("in the middle")
        add(connection, rows)

    # A private name, because a test cannot interfere between two statements otherwise.
    monkeypatch.setattr(table, "_add", fail_in_the_middle)
    with pytest.raises(OperationalError, match="in the middle"):
        table.write(minutes())
    assert not target.exists()
    table.write(minutes())
    assert target.count() == 3


def test_processes_that_add_at_once_lose_nothing(target):
    """Their rows are the same, in another order."""
    series = [Series(instruments.WAITS.name, "default", f"g{number}", "") for number in range(30)]
    start, errors = threading.Barrier(3), []

    def add(order):
        try:
            start.wait(10)
            for _ in range(10):
                table.write({1_790_000_040: {each: point(1.0) for each in order}})
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    orders = (series, series[::-1], series[::2] + series[1::2])
    threads = [threading.Thread(target=add, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert set(target.filter(period=60).values_list("count", flat=True)) == {30}
    assert target.filter(period=60).count() == 30


def test_old_rows_are_deleted_the_finer_the_sooner(target):
    now = int(time.time())
    ages = {Period.MINUTE: (3600, 7300), Period.TEN_MINUTES: (86400, 180000)}
    ages[Period.HOUR] = (7 * 86400, 15 * 86400)
    for period, both in ages.items():
        for age in both:
            values = dict.fromkeys(("count", "total", "highest", *LockStatistics.BUCKETS), 1)
            key = LockStatistics.id_of(period, now - age, "m", "", "", "")
            target.create(id=key, period=period, start=now - age, **values)
    assert retention.purge_statistics(using=target.db) == 3
    left = {(period, now - start) for period, start in target.values_list("period", "start")}
    assert left == {(60, 3600), (600, 86400), (3600, 604800)}


def test_rows_of_one_time_are_beside_each_other(target):
    """A page reads them by their keys, and not the whole table."""
    for start in (0, 60, 3540, 3600, 7200):
        table.write({1_790_000_040 + start: minutes().popitem()[1]})
    ordered = list(target.order_by("pk").values_list("period", "start"))
    assert ordered == sorted(ordered)
    assert len(ordered) == 5 + 3 + 3
    found = target.filter(LockStatistics.ids(60, 1_790_000_100, 1_790_003_640))
    starts = [
        start - 1_790_000_040 for start in found.order_by("pk").values_list("start", flat=True)
    ]
    assert starts == [60, 3540]


def test_the_writer_deletes_old_rows_now_and_then(target, monkeypatch):
    monkeypatch.setattr(admin, "PURGED_ONCE_IN", 1)
    table.write({0: {Series("m", "", "", ""): point(1.0)}})
    assert target.count() == 3
    exporter = AdminExporter()
    exporter.add(instruments.CONTENTIONS, 1, ORDER)
    exporter.close()
    assert set(target.values_list("metric", flat=True)) == {instruments.CONTENTIONS.name}


# -- the thread that writes ------------------------------------------------------------------


def test_a_lock_is_counted_from_its_acquire_to_its_release(target):
    with override_settings(DLOCKS=LOCAL):
        locks.reset()
        recorder = Recorder([AdminExporter()], Groups(listed=["order"]))
        recorder.connect()
        with Lock("order:1"):
            assert not Lock("order:1", bound=False).acquire(timeout=0.01)
        dispatch.flush()
        recorder.disconnect()
    locks.reset()
    found, seconds = defaultdict(int), defaultdict(float)
    for row in target.filter(period=60):
        metric = row.metric.removeprefix("django_dlock.")
        found[metric, row.group, row.label] += row.count
        seconds[metric] += row.total
    assert 0 < seconds["waiting"] <= seconds["held"]
    # For held locks and waiters, only the time is added up; there is no count.
    assert found == {
        ("wait.duration", "order", ""): 1,
        ("hold.duration", "order", "released"): 1,
        ("acquire.contentions", "order", ""): 1,
        ("acquire.attempts", "order", "contended"): 1,
        ("held", "order", ""): 0,
        ("waiting", "order", ""): 0,
    }


def test_an_idle_process_asks_nothing_of_the_database(target, monkeypatch):
    monkeypatch.setattr(admin, "EVERY", (0.001, 0.002))
    written, ended = [], threading.Event()
    monkeypatch.setattr(process, "thread_ends", ended.set)
    monkeypatch.setattr(table, "write", written.append)
    exporter = AdminExporter()
    exporter.add(instruments.CONTENTIONS, 1, ORDER)
    until(lambda: not writers())
    assert len(written) == 1
    # A fork has to wait for the end of a thread that has had a connection.
    assert ended.wait(20)
    # The next count begins again.
    exporter.add(instruments.CONTENTIONS, 1, ORDER)
    until(lambda: len(written) == 2)
    exporter.close()
    assert len(written) == 2


def test_a_lock_that_stays_held_is_counted_without_any_event(target, monkeypatch):
    monkeypatch.setattr(admin, "EVERY", (0.001, 0.002))
    exporter = AdminExporter()
    exporter.add(instruments.HELD, 1, ORDER)

    def total():
        return sum(target.filter(period=3600).values_list("total", flat=True))

    until(lambda: total() > 0)
    first = total()
    until(lambda: total() > first)
    exporter.close()


def test_a_closed_exporter_counts_nothing(target):
    exporter = AdminExporter()
    exporter.close()
    exporter.add(instruments.CONTENTIONS, 1, ORDER)
    exporter.close()
    assert not target.exists()


def test_a_database_that_does_not_answer_delays_nothing_and_is_reported_once(monkeypatch, caplog):
    monkeypatch.setattr(admin, "EVERY", (0.001, 0.002))
    monkeypatch.setattr(table, "BUSY_TIMEOUT", 1)
    failed = []
    write = table.write

    def count(minutes):
        try:
            write(minutes)
        except OperationalError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(table, "write", count)
    file = connections["default"].settings_dict["NAME"]
    with caplog.at_level(logging.WARNING, "django_dlock"):
        exporter = AdminExporter()
        somebody_else = sqlite3.connect(file)
        somebody_else.execute("BEGIN IMMEDIATE")
        exporter.add(instruments.CONTENTIONS, 1, ORDER)
        until(lambda: len(failed) >= 3)
        exporter.add(instruments.CONTENTIONS, 1, ORDER)
        somebody_else.rollback()
        until(lambda: not writers())
        exporter.close()
    somebody_else.close()
    assert caplog.text.count("Lock statistics are not written: database is locked") == 1
    row = LockStatistics.objects.get(period=3600, metric=instruments.CONTENTIONS.name)
    assert row.count == 2
    LockStatistics.objects.all().delete()


@pytest.mark.parametrize("silent_from", ["the start", "the statement"])
def test_a_database_that_says_nothing_is_given_up(
    postgres_alias, django_db_blocker, monkeypatch, caplog, silent_from
):
    """Its connections are accepted, but not answered; what was counted is written later."""
    monkeypatch.setattr(admin, "EVERY", (0.001, 0.002))
    monkeypatch.setattr(admin, "WITHIN", 1.0)
    monkeypatch.setattr(table, "database", lambda: "silent")
    entry = connections.settings[postgres_alias]
    rows = LockStatistics.objects.using(postgres_alias)
    with (
        Proxy("127.0.0.1", int(entry["PORT"]), speaks="postgres") as proxy,
        added("silent", {**entry, "HOST": "127.0.0.1", "PORT": str(proxy.port)}),
        django_db_blocker.unblock(),
    ):
        rows.all().delete()
        if silent_from == "the start":
            proxy.black_hole()
        else:
            proxy.keep(of=("INSERT",))
        exporter = AdminExporter()
        exporter.add(instruments.CONTENTIONS, 1, ORDER)
        until(lambda: "Lock statistics are not written" in caplog.text)
        assert not rows.exists()
        proxy.heal()
        until(lambda: not writers())
        assert rows.get(period=3600).count == 1
        exporter.close()


def test_a_missing_table_is_logged_with_the_cure(target, monkeypatch, caplog):
    with monkeypatch.context() as gone:
        gone.setattr(LockStatistics._meta, "db_table", "no_such_table")
        exporter = AdminExporter()
        exporter.add(instruments.CONTENTIONS, 1, ORDER)
        exporter.close()
    assert f"run {migrate_command(target.db)}: " in caplog.text


def test_an_unexpected_error_does_not_end_the_thread(monkeypatch, caplog, target):
    monkeypatch.setattr(admin, "EVERY", (0.001, 0.002))
    write, calls = table.write, []

    def fail_first(minutes):
        calls.append(minutes)
        if len(calls) == 1:
            raise RuntimeError("unexpected")
        write(minutes)

    monkeypatch.setattr(table, "write", fail_first)
    exporter = AdminExporter()
    # Held, so that the thread goes on.
    exporter.add(instruments.HELD, 1, ORDER)
    (thread,) = writers()
    until(target.exists)
    assert writers() == {thread}
    exporter.close()
    assert "unexpected" in caplog.text


# -- processes -------------------------------------------------------------------------------

HEAD = """
import os, sys
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    DLOCK_METRICS={"EXPORTERS": ["admin"], "RECORDS": False},
)
import django
django.setup()
from django_dlock import Lock
from django_dlock.core import dispatch

def use():
    with Lock("order:1"):
        pass

def use_and_wait():
    use()
    dispatch.flush()

"""

ENDS = {
    "a main process": ("use()", 1),
    "a main process that ends before anything is counted": (
        """
import atexit, threading
gate = threading.Event()
dispatch.metrics.post(gate.wait)
use()
atexit.register(gate.set)
""",
        1,
    ),
    "an exception": ("use(); raise SystemExit(3)", 1),
    "a forked child that ends like its parent": (
        """
use_and_wait()
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
else:
    use(); use()
""",
        3,
    ),
    "children of multiprocessing": (
        """
import multiprocessing
use_and_wait()
pool = multiprocessing.get_context("fork").Pool(2)
for _ in range(4):
    pool.apply(use_and_wait)
pool.close(); pool.join()
""",
        5,
    ),
    "a child of billiard": (
        """
import billiard
child = billiard.get_context("fork").Process(target=use_and_wait); child.start(); child.join()
""",
        1,
    ),
}


def acquires_in(file):
    with sqlite3.connect(file) as connection:
        (found,) = connection.execute(
            "SELECT sum(count) FROM django_dlock_lockstatistics "
            "WHERE period = 3600 AND metric = 'django_dlock.wait.duration'"
        ).fetchone()
    connection.close()
    return found


@pytest.fixture
def file(tmp_path):
    """A migrated SQLite file."""
    path = tmp_path / "db.sqlite3"
    migrate = 'from django.core.management import call_command; call_command("migrate")'
    subprocess.run([sys.executable, "-c", HEAD + migrate, str(path)], timeout=60, check=True)
    return path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_normally_writes_what_it_has_counted_once(how, file):
    script, expected = ENDS[how]
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    assert acquires_in(file) == expected, done.stderr


def test_a_database_that_hangs_does_not_keep_a_process_from_ending(file):
    script = """
import threading
from django_dlock.metrics import table
hangs = threading.Event()
table.write = lambda minutes: hangs.wait()
use_and_wait()
"""
    done = subprocess.run([sys.executable, "-c", HEAD + script, str(file)], timeout=60, check=False)
    assert done.returncode == 0
    assert acquires_in(file) is None


# -- workers ---------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    settings = {"DLOCK_METRICS": {"EXPORTERS": ["admin"], "RECORDS": False}}
    try:
        with RedisServer() as redis, Site(redis, tmp_path / "site", settings=settings) as made:
            yield made
    except ServerNotFound as error:
        missing(str(error))


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_writes_what_its_tasks_have_counted_when_it_stops(site, pool):
    worker = site.worker(pool, 2)
    place = site.place()
    for order in range(5):
        result(site.send("locked", 8_000_000 + order, str(place)))
    worker.stop(PATIENCE)
    assert acquires_in(site.directory / "db.sqlite3") == 5
