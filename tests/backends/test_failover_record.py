"""The record of fail-over when its database does not answer, or its clock is set back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connections
from django.db.models import F

from django_dlock import clock
from django_dlock.backends.failover.own_connection import on_own_connection
from django_dlock.backends.failover.record import Micros
from testproject.processes import HOST
from tests.support.databases import added, until
from tests.support.failing_over import reads_of, record_of
from tests.support.points import heard
from tests.support.postgres import settings_for
from tests.support.proxy import Proxy

from .test_failover_switch import (
    QUIET,
    VIEW_TTL,
    grant,
    grant_when_open,
    is_active,
    own_redis,
    request,
    shop,
    switch,
)

__all__ = ["own_redis", "shop"]

AGO, SET_BACK = 30_000_000, 40
"""A switch whose old leases are over, in microseconds; and seconds that put it into the future."""


def set_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the clock of the record's database was set back now."""
    now = Micros.as_postgresql

    def behind(self: Micros, *args: Any, **kwargs: Any) -> tuple[str, list[Any]]:
        sql, params = now(self, *args, **kwargs)
        return f"({sql} - {SET_BACK * 1_000_000})", params

    monkeypatch.setattr(Micros, "as_postgresql", behind)


def read_again(backend) -> None:
    with heard("view.read", alias="default") as read:
        reads_of(backend).refresh()
        read.wait(2)


def test_a_clock_that_is_set_back_after_a_switch_closes_nothing(shop, monkeypatch):
    one = shop.process(failover_after=60.0)
    shop.switch_long_ago(one, "table")
    shop.row.update(switched_at=F("answered_at") - AGO)
    read_again(one)
    set_clock_back(monkeypatch)
    read_again(one)
    assert reads_of(one).last.opens_at <= clock.now()
    grant(one, request())
    # It has corrected the record for those that know nothing of the time before.
    other = record_of(shop.process()).read()
    assert other.elapsed >= AGO / 1_000_000
    assert other.silent_for >= -1.0


def test_g1_a_clock_that_is_set_back_opens_nothing_early(shop, monkeypatch):
    one = shop.process()
    grant(one, request("before"))
    switched_at = clock.now()
    switch(one, "table")
    until(lambda: reads_of(one).last.epoch == 2)
    set_clock_back(monkeypatch)
    grant_when_open(one, request())
    assert QUIET - 0.01 <= clock.now() - switched_at < QUIET + SET_BACK / 2


def test_a_process_that_starts_after_the_clock_was_set_back_waits_no_longer_than_after_a_switch(
    shop, monkeypatch
):
    one = shop.process()
    shop.switch_long_ago(one, "table")
    one.close()
    shop.row.update(switched_at=F("answered_at") - AGO)
    set_clock_back(monkeypatch)
    two, began = shop.process(), clock.now()
    grant_when_open(two, request())
    assert clock.now() - began < QUIET + SET_BACK / 2


def test_g1_a_process_that_stands_still_while_it_reads_does_not_take_the_clock_for_set_back(
    shop, monkeypatch
):
    record = record_of(shop.process())
    record.switch(record.read(), "table", reason="", by="")
    # Twice, because the first read may note what is missing.
    record.read()
    known, row = record.read(), shop.row.get()
    now = clock.now
    # An hour passes here after the database has answered.
    times = iter([now()])
    monkeypatch.setattr(clock, "now", lambda: next(times, now() + 3600))
    record.read(known)
    assert shop.row.get().switched_at == row.switched_at


def test_a_clock_that_is_set_back_does_not_put_off_a_switch(shop, own_redis, monkeypatch):
    one = shop.process(redis_url=own_redis.url, failover_after=1.5)
    grant(one, request())
    set_clock_back(monkeypatch)
    own_redis.kill()
    began = clock.now()
    until(is_active(one, "table"), 30)
    assert clock.now() - began < SET_BACK / 2


def test_g10_reads_go_on_soon_after_a_network_has_come_back(shop):
    settings = connections.settings[shop.database]
    with (
        Proxy("127.0.0.1", int(settings["PORT"]), speaks="postgres") as proxy,
        added("behind", {**settings, "HOST": "127.0.0.1", "PORT": str(proxy.port)}),
    ):
        one = shop.process(database="behind", view_ttl=VIEW_TTL)
        grant(one, request())
        proxy.black_hole()
        # Longer than the first threads hung, and all that was waited for is lost for good.
        until(lambda: clock.now() > reads_of(one).last.valid_until + 12.0, 30)
        proxy.black_holed = False
        began = clock.now()
        grant_when_open(one, request("afterwards"))
        assert clock.now() - began < 8.0
        one.close()


def test_a_connection_that_goes_silent_while_it_is_set_up_ends_its_thread(
    postgres_url, django_db_blocker
):
    """Django sends a new connection statements of its own."""
    entry = {**settings_for(postgres_url), "TIME_ZONE": "Asia/Tokyo"}
    with Proxy(entry["HOST"], int(entry["PORT"]), speaks="postgres") as proxy:
        proxy.always("swallow", of="SELECT")
        before = set(threading.enumerate())
        with added("silent", {**entry, "HOST": HOST, "PORT": proxy.port}):
            with django_db_blocker.unblock(), pytest.raises(TimeoutError):
                on_own_connection(lambda: None, "silent", 1.0)
            # The thread that cuts connections goes on for a while.
            until(
                lambda: (
                    "dlock-failover"
                    not in {thread.name for thread in set(threading.enumerate()) - before}
                ),
                5,
            )
        assert proxy.count("SELECT") == 1
