"""G3: a holder that was stopped at any point does not overwrite its successor.

Real processes hold a real Redis lock and stop themselves (SIGSTOP) at a chosen point. Meanwhile
their lease ends and another process takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from django.db import connections

from testproject.shop.models import Effect, Stock
from tests.faults.conftest import NewHolder
from tests.support.aliases import LONG, Dlocks
from tests.support.databases import wait_until_one_waits
from tests.support.holder import Holder, HolderError

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

NewWriter: TypeAlias = Callable[[], Holder]

SHORT = 2.0
"""TTL of a holder that stops."""

WRITES = """
import itertools
from django.db import connection
from django_dlock import BackendUnavailable
from testproject.shop.models import Effect, Stock

def stop():
    # Not earlier, so that it cannot end before it is stopped.
    while True:
        try:
            lock.renew(ttl=SHORT)
            break
        except BackendUnavailable:
            pass
    os.kill(os.getpid(), signal.SIGSTOP)

def stop_before(number, table="django_dlock_fence"):
    # Stop before the statement with this number that writes to the table.
    numbers = itertools.count(1)

    def count(execute, sql, params, many, context):
        if sql.startswith("UPDATE") and table in sql and next(numbers) == number:
            stop()
        return execute(sql, params, many, context)

    connection.execute_wrappers.append(count)

def stop_before_commit():
    commit = connection._commit

    def late_commit():
        stop()
        connection._commit = commit
        commit()

    connection._commit = late_commit

def book(by, pause=lambda: None):
    with lock.atomic():
        Effect.objects.create(order_number=1, by=by)
        pause()

def sell(count):
    return lock.fence(Stock.objects.filter(article=1)).update(count=count)

def sell_one(count, pause=lambda: None):
    stock = Stock.objects.get(article=1)
    stock.count = count
    pause()
    lock.fence(stock).save()

lock = Lock("it", ttl=LONG, wait=30)
"""


@pytest.fixture
def new_writer(new_holder: NewHolder, dlocks: Dlocks, database: str) -> NewWriter:
    """Starts processes that can hold the lock and write to the database."""
    told = connections[database].settings_dict
    entry = {name: told[name] for name in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")}
    # SQLite's default transaction mode, the only one in Django that locks only at the first write.
    options = {"timeout": 20} if told["ENGINE"].endswith("sqlite3") else {}
    settings: dict[str, Any] = {
        "DATABASES": {"default": {**entry, "NAME": str(entry["NAME"]), "OPTIONS": options}},
        "INSTALLED_APPS": ["django_dlock", "testproject.shop"],
        "USE_TZ": True,
    }

    # Such that ``SHORT`` can be renewed.
    timeout = {"OPTIONS": {"command_timeout": SHORT / 3}}
    entry_of_locks = {**dlocks["default"], **timeout}

    def start() -> Holder:
        holder = new_holder(dlocks={"default": entry_of_locks}, settings=settings)
        holder.do(f"SHORT, LONG = {SHORT}, {LONG}")
        holder.do(WRITES)
        return holder

    return start


@pytest.fixture
def holders(new_writer: NewWriter) -> tuple[Holder, Holder]:
    """The process that will be stopped while it holds the lock, and the one that comes after it."""
    first, second = new_writer(), new_writer()
    assert first.do("lock.acquire()")
    return first, second


def effects(using: str) -> list[str]:
    return list(Effect.objects.using(using).order_by("pk").values_list("by", flat=True))


def end_of(holder: Holder) -> str:
    """How the started line ended: the name of the error."""
    with pytest.raises(HolderError) as raised:
        holder.answer()
    return raised.value.kind


# -- lock.atomic() ---------------------------------------------------------------------


def test_g3_a_transaction_that_stopped_after_its_check_does_not_begin(holders, database):
    first, second = holders
    first.do("stop_before(1)")
    first.begin("book('late')")
    first.wait_until_stopped()
    second.do("lock.acquire(); book('second')")
    first.resume()
    assert end_of(first) == "StaleToken"
    second.do("book('second again')")
    assert effects(database) == ["second", "second again"]


@pytest.mark.parametrize(
    ("before", "line"),
    [
        # Between its writes and the end of its body.
        ("pass", "book('late', stop)"),
        # Between the end of its body and its last statement.
        ("stop_before(2)", "book('late')"),
    ],
)
def test_g3_a_transaction_that_stopped_after_its_write_does_not_commit(
    holders, database, before, line
):
    first, second = holders
    first.do(before)
    first.begin(line)
    first.wait_until_stopped()
    second.do("lock.acquire()")
    second.begin("book('second')")
    # It waits for the row that the stopped transaction has locked.
    wait_until_one_waits(database, over=lambda: second.answered)
    assert not second.answered
    first.resume()
    assert end_of(first) == "LeaseLost"
    second.answer()
    assert effects(database) == ["second"]


def test_g3_a_transaction_past_its_deadline_does_not_commit_even_without_a_successor(
    holders, database
):
    first, second = holders
    first.begin("book('late', stop)")
    first.wait_until_stopped()
    second.do("lock.acquire(); lock.release()")
    first.resume()
    assert end_of(first) == "LeaseLost"
    assert effects(database) == []


def test_g3_a_transaction_that_stopped_in_its_commit_commits_before_the_newer_one(
    holders, database
):
    """It cannot be refused any more, but nobody has read meanwhile what it was about to change."""
    first, second = holders
    # The row of the name is created before, in its own transaction.
    first.do("book('before'); stop_before_commit()")
    first.begin("book('first')")
    first.wait_until_stopped()
    second.do("lock.acquire()")
    second.begin("book('second')")
    wait_until_one_waits(database, over=lambda: second.answered)
    assert not second.answered
    first.resume()
    first.answer()
    second.answer()
    assert effects(database) == ["before", "first", "second"]


# -- lock.fence() ----------------------------------------------------------------------


@pytest.fixture
def stock(database: str) -> Callable[[], int]:
    """Reads the number in stock."""
    Stock.objects.using(database).create(article=1, count=10)
    return lambda: Stock.objects.using(database).get(article=1).count


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("stop_before(1, 'shop_stock')", "sell(99)"),
        ("stop_before(1, 'shop_stock')", "sell_one(99)"),
    ],
)
def test_g3_a_write_that_stopped_after_its_check_is_refused(holders, stock, before, line):
    first, second = holders
    first.do(before)
    first.begin(line)
    first.wait_until_stopped()
    second.do("lock.acquire(); sell(9)")
    first.resume()
    assert end_of(first) == "StaleToken"
    assert stock() == 9


def test_g3_a_holder_that_was_paused_after_its_read_does_not_write(holders, stock):
    first, second = holders
    first.begin("sell_one(99, stop)")
    first.wait_until_stopped()
    second.do("lock.acquire(); sell(9)")
    first.resume()
    # Its own clock tells it, before it asks the database.
    assert end_of(first) == "LeaseLost"
    assert stock() == 9


def test_g3_a_write_that_stopped_between_its_statements_is_rolled_back(holders, stock, database):
    first, second = holders
    first.do("stop_before(2, 'shop_stock')")
    first.begin("sell_one(99)")
    first.wait_until_stopped()
    second.do("lock.acquire()")
    second.begin("sell(9)")
    wait_until_one_waits(database, over=lambda: second.answered)
    first.resume()
    assert end_of(first) == "LeaseLost"
    assert second.answer() == 1
    assert stock() == 9


def test_g3_a_write_that_stopped_in_its_commit_commits_before_the_newer_one(
    holders, stock, database
):
    first, second = holders
    first.do("stop_before_commit()")
    first.begin("sell(8)")
    first.wait_until_stopped()
    second.do("lock.acquire()")
    second.begin("sell(7)")
    wait_until_one_waits(database, over=lambda: second.answered)
    assert not second.answered
    first.resume()
    assert (first.answer(), second.answer()) == (1, 1)
    assert stock() == 7
