"""What a switch between two stores does to leases, waiters and processes."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import io
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections
from pytest_django import DjangoDbBlocker

from django_dlock import BackendUnavailable, LeaseLost, Lock, LockNotAcquired, clock, locks
from django_dlock.backends.failover import FailoverBackend, active, refresher
from django_dlock.backends.failover.record import LAST_EPOCH, Micros, SwitchRefused
from django_dlock.backends.failover.terms import TOKEN_BITS
from django_dlock.core import dispatch
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from django_dlock.metrics.instruments import STORE_EPOCH
from django_dlock.metrics.stores import StoreFacts
from django_dlock.models import FailoverRecord
from django_dlock.process import current
from django_dlock.signals import store_switched
from testproject.servers import RedisServer
from tests.support import databases
from tests.support.aliases import configured
from tests.support.databases import until
from tests.support.failing_over import reads_of, record_of, terms_of
from tests.support.points import heard
from tests.support.proxy import Proxy

TTL, VIEW_TTL = 3.0, 1.0
QUIET = (TTL + VIEW_TTL) * (1 + clock.DRIFT)
UNHURRIED = {"ttl": 60.0, "view_ttl": 15.0, "command_timeout": 5.0}
"""Options where no time is the subject: the machine may have other work."""


class Shop:
    """A project with two stores, and its processes: backends that share nothing."""

    def __init__(self, redis_url: str, database: str, stack: contextlib.ExitStack) -> None:
        self.database, self._stack = database, stack
        self.prefix = f"test-{secrets.token_hex(4)}"
        self.redis_url = redis_url

    def dlocks(self, redis_url: str = "", database: str = "", **options: Any) -> dict[str, Any]:
        # Of calls for which the fail-over gives no deadline; none of them is to fail.
        unhurried = {"command_timeout": UNHURRIED["command_timeout"]}
        return {
            "default": {
                "BACKEND": "django_dlock.backends.failover.FailoverBackend",
                "KEY_PREFIX": self.prefix,
                "TTL": options.pop("ttl", TTL),
                "WAIT": 30.0,
                "OPTIONS": {
                    "primary": "redis",
                    "standby": "table",
                    "database": database or self.database,
                    "view_ttl": VIEW_TTL,
                    "failover_after": None,
                    "command_timeout": 0.3,
                    "outage_patience": 30.0,
                    **options,
                },
            },
            "redis": {
                "BACKEND": "django_dlock.backends.redis.RedisBackend",
                "LOCATION": redis_url or self.redis_url,
                "KEY_PREFIX": self.prefix,
                "OPTIONS": unhurried,
            },
            "table": {
                "BACKEND": "django_dlock.backends.database.DatabaseBackend",
                "KEY_PREFIX": self.prefix,
                "OPTIONS": {"database": self.database, **unhurried},
            },
        }

    def process(self, **settings: Any) -> FailoverBackend:
        """A backend as another process would have it."""
        with configured(self.dlocks(**settings)):
            backend = locks._build("default")
            others = {alias: locks._build(alias) for alias in ("redis", "table")}
        assert isinstance(backend, FailoverBackend)
        backend.other = others.__getitem__
        for each in (*others.values(), backend):
            self._stack.callback(each.close)
        return backend

    @property
    def row(self) -> Any:
        return FailoverRecord.objects.using(self.database).filter(key_prefix=self.prefix)

    def switch_long_ago(self, backend: FailoverBackend, to: str) -> None:
        """Switch as if long ago; wait until this process grants in the new store."""
        switch(backend, to)
        self.row.update(switched_at=0)
        reads_of(backend).refresh()
        epoch = self.row.get().epoch
        until(lambda: (view := reads_of(backend).valid()) is not None and view.epoch == epoch)
        until(
            lambda: (view := reads_of(backend).valid()) is not None and view.opens_at < clock.now()
        )


@pytest.fixture
def shop(
    redis_server: RedisServer,
    postgres_alias: str,
    django_db_blocker: DjangoDbBlocker,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shop]:
    # A switch opens a connection; with the short command timeout, 1.5 s would be left for it.
    monkeypatch.setattr(active, "SWITCH_PATIENCE", 100)
    with django_db_blocker.unblock(), contextlib.ExitStack() as stack:
        yield Shop(redis_server.url, postgres_alias, stack)


def request(name: str = "name", ttl: float = TTL, **kwargs: Any) -> LeaseRequest:
    return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=ttl, **kwargs)


def soon() -> float:
    return clock.now() + 10.0


def grant(backend: FailoverBackend, asked: LeaseRequest) -> Lease:
    try:
        answer = backend.acquire(asked, deadline=soon())
    except BackendUnavailable as error:
        # Once, this thread may have stood still between its look at the view and its request.
        if "switched meanwhile" not in str(error):
            raise
        answer = backend.acquire(asked, deadline=soon())
    assert isinstance(answer, Lease), answer
    return answer


def stop_reading(backend: FailoverBackend) -> None:
    """As if the database did not answer this process any more."""
    thread = reads_of(backend)._thread
    reads_of(backend)._start = lambda: None
    reads_of(backend).close()
    if thread is not None:
        # A read that has begun still counts.
        thread.join(20)


def grant_when_open(backend: FailoverBackend, asked: LeaseRequest) -> Lease:
    answers: list[Lease] = []

    def is_granted() -> bool:
        with contextlib.suppress(BackendUnavailable):
            answers.append(grant(backend, asked))
        return bool(answers)

    until(is_granted, 30)
    return answers[0]


def renew(backend: FailoverBackend, lease: Lease) -> str:
    renewals = [Renewal(lease.name, lease.owner, TTL)]
    (result,) = backend.renew(renewals, process=current().id, deadline=soon())
    return result.outcome


def switch(backend: FailoverBackend, to: str) -> None:
    backend.switch(to, backend.read_record(), by="a test")


def test_g1_after_a_switch_nothing_is_granted_before_all_old_leases_are_over(shop):
    one, two = shop.process(), shop.process()
    lease = grant(one, request())
    assert isinstance(two.acquire(request(), deadline=soon()), Contention)
    switched_at = clock.now()
    switch(two, "table")
    until(lambda: reads_of(two).last.epoch == 2)
    with pytest.raises(BackendUnavailable, match="nothing is granted"):
        two.acquire(request(), deadline=soon())
    # A lease of the previous epoch may be alive, so nobody is told that the name is free.
    for ask in (two.get, lambda name: two.locked(name, deadline=soon())):
        with pytest.raises(BackendUnavailable, match="nothing is granted"):
            ask("name")
    with pytest.raises(BackendUnavailable, match="nothing is granted"):
        two.list()
    successor = grant_when_open(two, request())
    assert clock.now() > lease.deadline
    assert clock.now() - switched_at >= QUIET - 0.01
    assert successor.token > lease.token
    assert successor.token >> TOKEN_BITS == 2


def test_g1_leases_of_the_previous_epoch_are_not_renewed_any_more(shop):
    one, two = shop.process(), shop.process()
    lease = grant(one, request())
    assert renew(one, lease) == "renewed"
    switch(two, "table")
    until(lambda: terms_of(one).latest.epoch == 2)
    assert renew(one, lease) == "unanswered"
    # It may be released where it was granted.
    assert one.release("name", lease.owner, min_hold=0.0, deadline=soon()) == "released"


def test_g1_a_process_that_cannot_read_the_record_grants_and_renews_for_a_limited_time(shop):
    # So that the lease is not over before the view is, however late this thread goes on.
    ttl = TTL + 1.5
    one, two = shop.process(ttl=ttl), shop.process()
    lease = grant(one, request(ttl=ttl))
    stop_reading(one)
    # Of the term: the last read may have ended with the thread, too late for ``last``.
    latest = terms_of(one).latest.latest_end
    assert latest <= clock.now() + VIEW_TTL + ttl
    switch(two, "table")
    until(lambda: clock.now() > reads_of(one).last.valid_until)
    with pytest.raises(BackendUnavailable, match="did not say which store is active"):
        one.acquire(request("other"), deadline=clock.now() + 0.1)
    sent_at = clock.now()
    (result,) = one.renew(
        [Renewal("name", lease.owner, ttl)], process=current().id, deadline=soon()
    )
    assert result.outcome == "renewed"
    assert sent_at + result.ttl <= latest + 0.01
    until(lambda: clock.now() > latest)
    assert renew(one, lease) == "unanswered"
    assert grant_when_open(two, request()).token > lease.token


def test_g1_a_grant_that_comes_after_the_view_has_ended_does_not_count(shop, monkeypatch):
    one = shop.process()
    grant(one, request("warm"))
    store = terms_of(one).latest.store
    asked: list[LeaseRequest] = []
    acquire = store.acquire

    def late(attempt: LeaseRequest, *, deadline: float) -> Any:
        # As if the process had been stopped after it looked at the view.
        asked.append(attempt)
        answer = acquire(attempt, deadline=deadline)
        return answer._replace(asked_at=answer.asked_at + VIEW_TTL)

    monkeypatch.setattr(store, "acquire", late)
    attempt = request()
    with pytest.raises(BackendUnavailable, match="may have been switched"):
        one.acquire(attempt, deadline=soon())
    assert asked
    one.cancel_acquire(attempt, deadline=soon())
    monkeypatch.undo()
    assert grant(one, request()).token


def test_g3_tokens_rise_through_switches_in_both_directions(shop):
    one = shop.process()
    tokens = []
    for to in ("table", "redis", "table"):
        lease = grant_when_open(one, request())
        tokens.append(lease.token)
        one.release("name", lease.owner, min_hold=0.0, deadline=soon())
        shop.switch_long_ago(one, to)
    tokens.append(grant_when_open(one, request()).token)
    assert tokens == sorted(set(tokens))
    assert [token >> TOKEN_BITS for token in tokens] == [1, 2, 3, 4]


def test_what_was_left_in_a_store_does_not_come_back_with_it(shop):
    one = shop.process()
    grant(one, request("parked", ttl=3600.0, kind="parked"))
    grant(one, request("reserved", ttl=3600.0, kind="reserved"))
    for to in ("table", "redis"):
        shop.switch_long_ago(one, to)
    for name in ("parked", "reserved"):
        assert grant_when_open(one, request(name)).token >> TOKEN_BITS == 3


def test_a_switch_that_rests_on_an_older_state_is_refused(shop):
    one, two = shop.process(), shop.process()
    seen = one.read_record()
    switch(two, "table")
    with pytest.raises(SwitchRefused, match="epoch 1"):
        one.switch("table", seen)
    assert one.read_record().epoch == 2
    with pytest.raises(ValueError, match="'elsewhere' is no store of alias 'default'"):
        one.switch("elsewhere", seen)


def test_of_many_switches_at_once_one_happens(shop):
    processes = [shop.process() for _ in range(6)]
    seen = processes[0].read_record()
    together, refused = threading.Barrier(len(processes)), []

    def run(backend: FailoverBackend) -> None:
        together.wait(20)
        try:
            backend.switch("table", seen)
        except SwitchRefused:
            refused.append(backend)

    threads = [threading.Thread(target=run, args=[backend]) for backend in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(refused) == len(processes) - 1
    assert processes[0].read_record().epoch == 2


def test_g1_a_process_that_switches_and_dies_before_the_time_is_noted_shortens_nothing(shop):
    one = shop.process()
    grant(one, request("warm"))
    # Before the next read, which this thread may see late.
    began = clock.now()
    # The first of the two statements of a switch, an hour ago.
    shop.row.update(epoch=2, active="table", quiet=4_000_000, switched_at=None)
    until(lambda: reads_of(one).last.epoch == 2)
    grant_when_open(one, request())
    assert clock.now() - began >= 3.0
    assert shop.row.get().switched_at is not None


def test_g1_a_process_with_longer_leases_makes_all_wait_longer(shop):
    one = shop.process()
    grant(one, request())
    longest = shop.row.get().longest
    other = shop.process(max_ttl=50.0)
    grant(other, request("other", ttl=50.0))
    assert shop.row.get().longest == longest + 47_000_000
    switch(one, "table")
    assert shop.row.get().quiet == longest + 47_000_000
    # A second switch does not forget the leases of the first epoch.
    for each in (one, other):
        # It would note its longer leases again just now.
        stop_reading(each)
    shop.row.update(longest=1)
    seen = one.read_record()
    one.switch("redis", seen)
    assert shop.row.get().quiet == longest + 47_000_000


@pytest.mark.parametrize("accident", ["deleted", "restored"])
def test_g3_a_record_that_was_deleted_or_restored_gives_a_later_epoch(shop, accident):
    one = shop.process()
    for to in ("table", "redis"):
        shop.switch_long_ago(one, to)
    lease = grant_when_open(one, request("before"))
    assert lease.token >> TOKEN_BITS == 3
    if accident == "deleted":
        shop.row.delete()
    else:
        shop.row.update(epoch=2, active="table")
    until(lambda: reads_of(one).last.epoch == 4)
    row = shop.row.get()
    assert (row.epoch, row.active) == (4, "redis")
    with pytest.raises(BackendUnavailable, match="nothing is granted"):
        one.acquire(request(), deadline=soon())


def test_g1_a_restored_record_that_has_shorter_leases_opens_no_earlier(shop):
    one = shop.process()
    shop.switch_long_ago(one, "table")
    grant_when_open(one, request())
    longest = shop.row.get().longest
    # From a backup that was made when leases were shorter.
    shop.row.update(epoch=1, active="redis", longest=1, quiet=0)
    until(lambda: reads_of(one).last.epoch == 3)
    assert shop.row.get().quiet == longest


@pytest.mark.parametrize("accident", ["deleted", "restored"])
def test_g1_an_epoch_never_has_two_stores(shop, accident):
    behind, ahead = (record_of(shop.process()) for _ in range(2))
    before = behind.read()
    backup = shop.row.values().get()
    ahead.switch(ahead.read(), "table", reason="", by="")
    later = ahead.read()
    shop.row.delete()
    if accident == "restored":
        FailoverRecord.objects.using(shop.database).create(**{**backup, "epoch": 0})
    # It does not know of the switch, and gives its number away again.
    anew = behind.read(before)
    assert (anew.epoch, anew.active) == (later.epoch, "redis")
    agreed = ahead.read(later)
    assert (agreed.epoch, agreed.active) == (later.epoch + 1, "table")
    assert agreed.quiet >= later.longest
    assert behind.read(anew)[:2] == ahead.read(agreed)[:2] == agreed[:2]


def test_g1_an_epoch_that_begins_without_knowing_of_longer_leases_waits_for_them(shop):
    behind = record_of(shop.process())
    before = behind.read()
    longer = record_of(shop.process(ttl=3 * TTL))
    known = longer.read()
    shop.row.delete()
    assert behind.read(before).quiet < known.longest
    assert longer.read(known).quiet == known.longest


def test_g1_a_record_restored_within_its_epoch_learns_again_of_longer_leases(shop):
    other = record_of(shop.process(ttl=3 * TTL))
    one = record_of(shop.process())
    known = one.read(other.read())
    shop.row.update(longest=1)
    assert one.read(known).longest == known.longest > 3 * TTL


def test_the_last_epoch_refuses_a_switch(shop):
    one = shop.process()
    grant(one, request())
    shop.row.update(epoch=LAST_EPOCH)
    until(lambda: reads_of(one).last.epoch == LAST_EPOCH)
    with pytest.raises(SwitchRefused, match="last one"):
        switch(one, "table")


def test_a_record_that_names_an_unknown_store_is_refused(shop):
    one = shop.process()
    grant(one, request())
    shop.row.update(epoch=2, active="elsewhere")
    until(lambda: clock.now() > reads_of(one).last.valid_until)
    with heard("view.read", alias="default") as read:
        read.until(lambda it: any(it.each("error") - {None}))
    with pytest.raises(BackendUnavailable, match="names the active store 'elsewhere'"):
        one.acquire(request(), deadline=clock.now() + 1.0)


@pytest.mark.parametrize("kind", ["postgres_alias", "mariadb_alias"])
def test_g9_the_clock_of_the_record_does_not_depend_on_a_time_zone(
    request, kind, django_db_blocker
):
    alias = request.getfixturevalue(kind)
    with django_db_blocker.unblock(), connections[alias].cursor() as cursor:

        def now() -> int:
            rows = FailoverRecord.objects.using(alias).bulk_create(
                [FailoverRecord(id="x", epoch=1, active="", longest=0, quiet=0, answered_at=0)],
                ignore_conflicts=True,
            )
            assert rows
            return FailoverRecord.objects.using(alias).annotate(now=Micros()).get(id="x").now

        zones = ("SET time_zone = '+00:00'", "SET time_zone = '+09:00'")
        if kind == "postgres_alias":
            zones = ("SET TIME ZONE 'UTC'", "SET TIME ZONE 'Asia/Tokyo'")
        times = []
        for zone in zones:
            cursor.execute(zone)
            times.append(now())
        cursor.execute(zones[0])
        FailoverRecord.objects.using(alias).filter(id="x").delete()
    assert abs(times[1] - times[0]) < 60_000_000


# -- locks -----------------------------------------------------------------------------------


def test_g2_holders_are_told_of_a_switch_before_the_next_renewal(shop):
    with configured(shop.dlocks(ttl=120.0)), Lock("name") as lock:
        switch(locks["default"], "table")
        # The next renewal would be due after 40 s.
        until(lambda: lock.state == "in_doubt", 20)


def test_g2_holders_are_told_of_a_switch_and_lose_their_leases_at_the_deadline(shop):
    lost: list[str] = []
    over = threading.Event()

    def on_lost(lock: Lock, reason: str) -> None:
        lost.append(reason)
        over.set()

    with configured(shop.dlocks()):
        lock = Lock("name", on_lost=on_lost)
        assert lock.acquire()
        ends = clock.now() + TTL + VIEW_TTL
        switch(locks["default"], "table")
        until(lambda: lock.state == "in_doubt")
        assert over.wait(20)
        # This thread may be late.
        assert clock.now() <= ends + 3.0
        assert lost == ["unreachable"]
        with Lock("name", wait=30) as successor:
            assert successor.token > lock.token if lock.token else successor.token
            assert successor.token >> TOKEN_BITS == 2


def test_g4_waiters_go_on_waiting_in_the_new_store(shop):
    with configured(shop.dlocks()):
        holder = Lock("name")
        assert holder.acquire()
        token, got, waiting = holder.token, [], threading.Event()

        def wait_for_it() -> None:
            waiting.set()
            with Lock("name", wait=60) as lock:
                got.append(lock.token)

        thread = threading.Thread(target=wait_for_it)
        thread.start()
        assert waiting.wait(20)
        switch(locks["default"], "table")
        thread.join(60)
        assert not thread.is_alive()
        assert got[0] > token
        assert got[0] >> TOKEN_BITS == 2


def test_coroutines_lock_through_a_switch(shop):
    def switch_on_a_thread() -> None:
        shop.switch_long_ago(locks["default"], "table")
        connections[shop.database].close()

    async def main() -> list[int]:
        tokens = []
        async with Lock("name") as lock:
            tokens.append(lock.token)
        await asyncio.to_thread(switch_on_a_thread)
        async with Lock("name", wait=60) as lock:
            tokens.append(lock.token)
            with pytest.raises(LockNotAcquired):
                async with Lock("name", wait=0, bound=False):
                    pass
        return tokens

    with configured(shop.dlocks(**UNHURRIED)):
        tokens = asyncio.run(main())
    assert [token >> TOKEN_BITS for token in tokens] == [1, 2]


def test_g8_a_forked_child_reads_the_record_itself(shop):
    with configured(shop.dlocks(**UNHURRIED)), Lock("name") as lock:
        # Not at the same time as a read in the other thread.
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            answer = b"failed"
            with contextlib.suppress(BaseException):
                told = f"{lock.lost_reason} {Lock('name').acquire(blocking=False)}"
                with Lock("own") as own:
                    answer = f"{told} {own.token >> TOKEN_BITS}".encode()
            os.write(writing, answer)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"fork False 1"
        os.waitpid(pid, 0)
        assert lock.held


def test_a_coroutine_breaks_a_lease_without_giving_a_deadline(shop):
    one = shop.process()
    lease = grant(one, request())
    assert asyncio.run(one.acall(one.break_silently, "name", owner=lease.owner))


class Noting(FailoverBackend):
    """A subclass, which notes its acquires."""

    noted: list[str] = []

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        self.noted.append(request.name)
        return super().acquire(request, deadline=deadline)


def test_coroutines_call_the_override_of_a_subclass(shop):
    one = shop.process(**UNHURRIED)
    # Now this process knows which store is active, and awaits the calls that it can.
    assert asyncio.run(one.acall(one.acquire, request("first"), deadline=soon()))
    one.__class__ = Noting
    for name in ("second", "third"):
        answer = asyncio.run(one.acall(one.acquire, request(name), deadline=soon()))
        assert isinstance(answer, Lease)
    assert Noting.noted == ["second", "third"]


def test_operators_see_the_leases_of_the_active_store(shop):
    # The next renewal notices the break.
    options = {"ttl": 6.0, "view_ttl": 6.0, "command_timeout": 2.0}
    with configured(shop.dlocks(**options)), pytest.raises(LeaseLost), Lock("name") as lock:
        (info,) = locks["default"].list(prefix="na")
        assert (info.alias, info.token) == ("default", lock.token)
        found = locks["default"].get("name")
        assert found is not None
        assert (found.alias, found.token) == ("default", lock.token)
        assert locks["default"].break_("name", owner=lock.owner)
        until(lambda: lock.lost)
        assert lock.lost_reason == "broken"


def test_a_switch_is_told_in_the_log_by_a_signal_a_metric_and_in_the_admin(shop, caplog):
    told: list[dict[str, Any]] = []

    def receive(sender: type, **facts: Any) -> None:
        told.append({"sender": sender, **facts})

    store_switched.connect(receive)
    try:
        with configured(shop.dlocks(**UNHURRIED)), Lock("name"):
            assert locks["default"].notices() == []
            shop.switch_long_ago(locks["default"], "table")
            dispatch.flush()
            (notice,) = locks["default"].notices()
            samples = StoreFacts(records=False).samples()
            epochs = [it.value for it in samples if it.instrument is STORE_EPOCH]
    finally:
        store_switched.disconnect(receive)
    (facts,) = told
    facts.pop("signal")
    assert facts == {
        "sender": Lock,
        "alias": "default",
        "active": "table",
        "previous": "redis",
        "epoch": 2,
        "reason": "by hand",
        "switched_by": "a test",
    }
    assert notice == (
        "'table' is the active store of alias 'default' since switch 1, made by a test: by hand"
    )
    assert epochs == [2]
    lines = [line for line in caplog.records if "active store is now" in line.getMessage()]
    assert [line.levelname for line in lines] == ["WARNING"]


def test_a_process_makes_no_switch_soon_after_others(shop, own_redis, caplog):
    one = shop.process(redis_url=own_redis.url, failover_after=1.0)
    grant(one, request())
    shop.row.update(in_a_row=12, quiet=60_000_000)
    own_redis.kill()
    with heard("view.read", alias="default") as read:
        until(lambda: reads_of(one).valid() and "yet, after 12 switches in a row" in caplog.text)
        read.again()
    assert one.read_record().epoch == 1
    # Long ago.
    shop.row.update(switched_at=0)
    until(is_active(one, "table"), 30)
    assert shop.row.get().in_a_row == 1


def test_few_epochs_are_told_long_before_the_last_one(shop, caplog):
    one = shop.process(**UNHURRIED)
    grant(one, request())
    shop.row.update(epoch=LAST_EPOCH - 100)
    assert [problem.id for problem in one.store_problems()] == ["W023"]
    switch(one, "table")
    assert "only 99 more switches are possible" in caplog.text
    until(lambda: reads_of(one).last.epoch == LAST_EPOCH - 99)
    assert "only 99 more times" in one.notices()[-1]
    with configured(shop.dlocks(**UNHURRIED)):
        shown, _ = run_command()
        assert shown["epochs_left"] == 99


# -- health ----------------------------------------------------------------------------------


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def is_active(backend: FailoverBackend, alias: str) -> Callable[[], bool]:
    def check() -> bool:
        reads_of(backend).valid()
        return reads_of(backend).last.active == alias

    return check


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_a_store_that_answers_nobody_is_replaced_and_comes_back(shop, own_redis, how):
    options = {"redis_url": own_redis.url, "failover_after": 1.5, "failback_after": 1.5}
    one, two = shop.process(**options), shop.process(**options)
    lease = grant(one, request())
    grant(two, request("other"))
    getattr(own_redis, how)()
    until(is_active(one, "table"), 30)
    until(is_active(two, "table"), 30)
    assert one.read_record().reason == "the active store did not answer"
    assert grant_when_open(two, request()).token > lease.token
    if how == "pause":
        own_redis.resume()
        until(is_active(one, "redis"), 30)
        assert one.read_record().reason == "the primary answers again"
        assert grant_when_open(one, request("third")).token >> TOKEN_BITS == 3


def test_a_store_whose_failures_take_long_is_replaced(shop, own_redis, monkeypatch):
    # Both stores may fail as late as their time-out allows; the record is written after that.
    options = {"ttl": 60.0, "view_ttl": 6.0, "command_timeout": 2.0, "failover_after": 1.5}
    monkeypatch.setattr(refresher, "AFTER_PATIENCE", 1.0)
    one = shop.process(redis_url=own_redis.url, **options)
    grant(one, request())
    own_redis.pause()
    until(is_active(one, "table"), 30)


def test_one_process_that_cannot_reach_the_store_does_not_take_it_from_the_others(shop, own_redis):
    with Proxy("127.0.0.1", own_redis.port) as proxy:
        behind = f"redis://127.0.0.1:{proxy.port}/0"
        # Longer than a busy machine keeps the other process from noting an answer.
        one = shop.process(redis_url=behind, failover_after=3.0)
        two = shop.process(redis_url=own_redis.url, failover_after=3.0)
        grant(one, request("one"))
        grant(two, request("two"))
        proxy.refuse()
        proxy.cut()
        until(lambda: reads_of(one).valid() and one._active._health.is_failing, 20)
        since = clock.now()
        until(
            lambda: (
                (reads_of(two).valid() or True)
                and reads_of(one).valid() is not None
                and clock.now() - since > 4.5
            ),
            20,
        )
        assert one.read_record().epoch == 1


# -- the command ---------------------------------------------------------------------------------


def run_command(*args: str) -> tuple[Any, str]:
    out, err = io.StringIO(), io.StringIO()
    call_command("switch_locks", *args, "--format", "json", stdout=out, stderr=err)
    return json.loads(out.getvalue()), err.getvalue()


def test_the_command_shows_switches_and_waits(shop):
    with configured(shop.dlocks()):
        shown, _ = run_command()
        assert (shown["active"], shown["epoch"], shown["quiet_left"]) == ("redis", 1, 0.0)
        shown, _ = run_command("--to", "table")
        assert (shown["active"], shown["epoch"], shown["reason"]) == ("table", 2, "switch_locks")
        assert 0 < shown["quiet_left"] <= QUIET
        # Repeated, it changes nothing.
        shown, told = run_command("--to", "table", "--wait")
        assert (shown["epoch"], shown["quiet_left"]) == (2, 0.0)
        assert "active already" in told
        with Lock("name", wait=10) as lock:
            assert lock.token >> TOKEN_BITS == 2
        out = io.StringIO()
        call_command("switch_locks", "--to", "redis", stdout=out)
        page = (Path(__file__).parents[2] / "docs/howto/failover.md").read_text()
        shown = "default: zookeeper is active (epoch 2; switched by deploy: switch_locks)."
        assert f"$ python manage.py switch_locks --to zookeeper --wait\n{shown}\n" in page
        here = {"zookeeper": "redis", "epoch 2": "epoch 3", "deploy": getpass.getuser()}
        for there, name in here.items():
            shown = shown.replace(there, name)
        assert shown in out.getvalue().splitlines()
        assert re.search(r"Nothing is granted for another [1-4] s\.", out.getvalue())


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("redis", "The record cannot be read: gone"),
        ("table", "The switch was made, but the record cannot be read any more: gone"),
    ],
)
def test_the_command_says_whether_a_switch_was_made_if_the_record_is_gone(
    shop, monkeypatch, to, told
):
    with configured(shop.dlocks()):
        read, left = FailoverBackend.read_record, [1]

        def once(backend):
            if left:
                left.pop()
                # As if it had been switched just now.
                return read(backend)._replace(quiet=60.0, elapsed=0.0)
            raise DatabaseError("gone")

        monkeypatch.setattr(FailoverBackend, "read_record", once)
        with pytest.raises(CommandError) as raised:
            run_command("--to", to, "--wait")
        assert str(raised.value) == told


def test_diagnosis_says_which_store_is_active(shop):
    with configured(shop.dlocks(**UNHURRIED)):
        out = io.StringIO()
        call_command("diagnose_locks", "--using", "default", stdout=out, stderr=out)
        assert "'redis' is active (epoch 1), 'table' is the standby" in out.getvalue()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--to", "elsewhere"], "'elsewhere' is no store of alias 'default'"),
        (["--using", "elsewhere"], "There is no alias 'elsewhere'"),
        (["--using", "redis"], "Alias 'redis' has one store only, RedisBackend"),
    ],
)
def test_wrong_use_of_the_command_is_reported(shop, args, message):
    with configured(shop.dlocks()), pytest.raises(CommandError, match=message) as error:
        run_command(*args)
    assert error.value.returncode == 2


def test_the_command_says_that_the_database_is_away(shop):
    with configured(shop.dlocks()):
        nowhere = {**connections.settings[shop.database], "PORT": "1"}
        with (
            databases.added("nowhere", nowhere),
            configured(shop.dlocks(database="nowhere")),
            pytest.raises(CommandError, match="The record cannot be read") as error,
        ):
            run_command("--to", "table")
    assert error.value.returncode == 1


def test_a_missing_table_is_reported_by_the_check(shop, tmp_path):
    empty = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}
    with databases.added("empty", empty):
        backend = shop.process(database="empty", **UNHURRIED)
        (problem,) = backend.store_problems()
    assert problem.id == "E012"
    assert "django_dlock_failoverrecord" in problem.message
    assert shop.process(**UNHURRIED).store_problems() == []


# -- the refresher ---------------------------------------------------------------------------


def test_statements_are_committed_where_the_project_has_autocommit_off(shop):
    settings = {**connections.settings[shop.database], "AUTOCOMMIT": False}
    with databases.added("manual", settings):
        one = shop.process(database="manual")
        grant(one, request())
        assert shop.row.get().epoch == 1
        switch(one, "table")
        assert shop.row.get().epoch == 2
        one.close()


def test_g6_reads_that_hang_are_replaced_by_others(monkeypatch, shop):
    one = shop.process()
    hanging, hung = threading.Event(), []
    read = reads_of(one)._read

    def hangs() -> Any:
        if len(hung) < 6:
            hung.append(threading.current_thread())
            hanging.wait(30)
        return read()

    reads_of(one)._read = hangs
    monkeypatch.setattr(refresher, "HANGING_AFTER", 0.05)
    monkeypatch.setattr(refresher, "LATER_AFTER", 0.2)

    def is_granted() -> bool:
        with contextlib.suppress(BackendUnavailable):
            grant(one, request())
            return True
        return False

    try:
        until(is_granted, 30)
        assert len(set(hung)) == 6
    finally:
        hanging.set()
        for thread in hung:
            thread.join(20)
    # A read that was only slow may have been replaced, too.
    until(lambda: reads_of(one)._hanging == set())
