"""A release hands the lease to the first waiter, even after lost replies, cuts and interrupts."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_dlock import clock
from django_dlock.backends import handover_mac
from django_dlock.backends.redis import RedisBackend, handover
from django_dlock.core import granting
from django_dlock.core.flow import drive
from django_dlock.lease import Contention, Lease, LeaseRequest
from testproject.servers import RedisServer
from tests.support.databases import until
from tests.support.points import Heard, at, heard
from tests.support.proxy import Proxy
from tests.support.redis_calls import (
    backend_for,
    client,
    grant,
    pool_of,
    refuse,
    release,
    renew,
    request,
    wait,
)

PATIENCE = 20.0


@pytest.fixture
def direct(own_redis: RedisServer) -> Iterator[RedisBackend]:
    """Holds the locks that others wait for; never waits itself."""
    yield from backend(own_redis.url)


@pytest.fixture
def listener(proxy: Proxy) -> Iterator[RedisBackend]:
    """Waits through a proxy, and already listens."""
    yield from (listening(it) for it in backend(proxy.url))


def backend(url: str, **options: Any) -> Iterator[RedisBackend]:
    it = backend_for(url, **{"command_timeout": 5.0, **options})
    yield it
    it.close()


@pytest.fixture
def asleep() -> Iterator[Heard]:
    """Who waits, and would be woken: each thread that reads, or that another one wakes."""
    with heard("wait.asleep") as it:
        yield it


def all_wait(asleep: Heard, *attempts: LeaseRequest) -> None:
    """Wait until all of these wait, and one of them reads."""
    owners = {attempt.owner for attempt in attempts}
    asleep.until(lambda it: owners <= it.each("waiter"))


def time_passes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """As if this process had been standing still for so long."""
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + seconds)


def listening(it: RedisBackend) -> RedisBackend:
    with_nobody = waiter("nobody's")
    lease = grant(it, request("nobody's"))
    assert wait(it, with_nobody, refuse(it, with_nobody), PATIENCE) is None
    it.cancel_acquire(with_nobody, deadline=it.call_deadline())
    release(it, lease)
    return it


def waiter(name: str = "name", **kwargs: object) -> LeaseRequest:
    return request(name, waits=True, renewed=True, **kwargs)


def queue(it: RedisBackend, *attempts: LeaseRequest) -> list[Contention]:
    return [refuse(it, attempt) for attempt in attempts]


def on_a_thread(call: Callable[[], Lease | None]) -> Callable[[], Lease | None]:
    """Run it on a thread; the returned function waits for the result."""
    results: list[Lease | None] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result() -> Lease | None:
        thread.join(PATIENCE)
        assert results, "still waiting, or raised"
        return results[0]

    return result


# -- which waiter gets it -----------------------------------------------------------------------


def test_a_handed_over_lease_has_all_values_of_its_waiter(direct, listener):
    lease = grant(direct, request())
    attempt = waiter(ttl=60.0, kind="parked", metadata='{"task_name": "x"}')
    (met,) = queue(listener, attempt)
    before = clock.now()
    release(direct, lease)
    handed = wait(listener, attempt, met, PATIENCE)
    assert (handed.owner, handed.name) == (attempt.owner, "name")
    # The lease counts from the waiter's request, with the whole TTL that it asked for.
    assert handed.ttl == 60.0
    assert handed.asked_at <= before
    info = direct.get("name")
    assert (info.owner, info.token, info.kind) == (attempt.owner, handed.token, "parked")
    assert info.metadata == {"task_name": "x"}
    assert info.process.pid == os.getpid()
    # Of its own 60 s, and not of the 30 s of the lease before.
    assert 45 < info.ttl <= 60.1
    assert info.renewals == 0
    assert [info.name for info in direct.list()] == ["name"]
    assert renew(listener, handed._replace(ttl=60.0)) == ["renewed"]
    assert direct.get("name").ttl > 45
    assert release(listener, handed) == "released"
    assert renew(direct, handed) == ["released"]


def test_a_break_hands_over_and_the_holder_learns_of_it(direct, listener):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    assert direct.break_silently("name", owner=lease.owner)
    assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner
    assert renew(direct, lease) == ["broken"]


def test_a_waiter_for_a_fixed_lease_asks_again_and_gets_the_whole_ttl(direct, listener):
    lease = grant(direct, request())
    attempt = request(waits=True, ttl=40.0)
    (met,) = queue(listener, attempt)
    release(direct, lease)
    assert wait(listener, attempt, met, PATIENCE) is None
    token = direct.get("name").token
    mine = grant(listener, attempt)
    assert (mine.token, mine.ttl) == (token, 40.0)
    assert direct.get("name").ttl > 33


def test_a_cooling_name_is_not_handed_over(direct, listener):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    deadline = direct.call_deadline()
    # Longer than a busy machine may take until the waiter asks again.
    assert direct.release("name", lease.owner, min_hold=2.5, deadline=deadline) == "released"
    # The message says that the name will be free earlier than the waiter was told before.
    assert wait(listener, attempt, met, PATIENCE) is None
    assert direct.get("name").waiting == 1
    met = refuse(listener, attempt)
    assert met.kind == "cooling"
    assert wait(listener, attempt, met, PATIENCE) is None
    grant(listener, attempt)


def test_a_user_without_the_right_to_publish_can_release(own_redis, direct, listener):
    with client(own_redis) as admin:
        admin.execute_command(
            *("ACL", "SETUSER", "mute", "on", ">pw", "~*", "+@all", "resetchannels")
        )
    mute = backend_for(own_redis.url.replace("redis://", "redis://mute:pw@"))
    lease = grant(mute, request())
    queue(listener, waiter())
    assert release(mute, lease) == "released"
    grant(direct, request())


def test_min_hold_works_for_a_handed_over_lease(direct, listener):
    lease, attempt = grant(direct, request()), waiter()
    (met,) = queue(listener, attempt)
    release(direct, lease)
    handed = wait(listener, attempt, met, PATIENCE)
    deadline = listener.call_deadline()
    assert (
        listener.release(handed.name, handed.owner, min_hold=60.0, deadline=deadline) == "released"
    )
    met = listener.acquire(request(), deadline=listener.call_deadline())
    assert (met.kind, met.owner) == ("cooling", handed.owner)


# -- lost replies and late packets -----------------------------------------------------


def test_g2_a_late_release_keeps_the_order_of_waiters(direct, listener, own_redis):
    lease = grant(direct, request())
    queue(listener, waiter(), waiter())
    with client(own_redis) as asking:
        # Only now, so that both had met the lease.
        asking.hset("{dlock:0}:2:l:name", "until", "1")
        waiters = asking.zrange("{dlock:0}:2:q:name", 0, -1, withscores=True)
        assert len(waiters) == 2
        assert not direct.locked("name", deadline=direct.call_deadline())
        assert release(direct, lease) == "expired"
        assert asking.zrange("{dlock:0}:2:q:name", 0, -1, withscores=True) == waiters
        assert asking.pttl("{dlock:0}:2:q:name") > 0


def test_g5_a_release_whose_reply_was_lost_hands_over_once(direct, listener, proxy):
    first = grant(listener, request())
    second, third = waiter(), waiter()
    met, _ = queue(listener, second, third)
    proxy.drop_replies()
    assert release(listener, first) == "released"
    assert proxy.replies_dropped == 1
    assert direct.get("name").owner == second.owner
    handed = wait(listener, second, met, PATIENCE)
    assert renew(listener, handed) == ["renewed"]


def test_g5_the_end_of_a_lease_is_remembered_after_later_holders(direct, listener):
    leases = [grant(direct, request())]
    for outcome in ("released", "broken", "released"):
        attempt = waiter()
        (met,) = queue(listener, attempt)
        if outcome == "broken":
            direct.break_silently("name", owner=leases[-1].owner)
        else:
            release(direct, leases[-1])
        leases.append(wait(listener, attempt, met, PATIENCE))
    # Replies were lost, so the late holders ask again.
    assert [release(direct, lease) for lease in leases[:3]] == ["released", "broken", "released"]
    assert direct.release("name", "x", min_hold=0.0, deadline=direct.call_deadline()) == "refused"
    assert renew(direct, leases[3]) == ["renewed"]


@pytest.mark.parametrize("how", ["released", "broken", "expired"])
def test_g5_the_end_of_a_lease_is_remembered_after_another_acquire(direct, own_redis, how):
    first = grant(direct, request())
    if how == "released":
        assert release(direct, first) == how
    elif how == "broken":
        assert direct.break_silently("name", owner=first.owner)
    else:
        with client(own_redis) as stranger:
            stranger.hset("{dlock:0}:2:l:name", "until", "1")
    since = grant(direct, request())
    for _ in range(2):
        # As if the first reply had been lost.
        assert release(direct, first) == how
        assert renew(direct, first) == [how]
        release(direct, since)


def test_g5_the_end_of_a_lease_is_remembered_if_nobody_waited(direct, listener):
    first, attempt = grant(direct, request()), waiter()
    (met,) = queue(listener, attempt)
    release(direct, first)
    second = wait(listener, attempt, met, PATIENCE)
    release(listener, second)
    third = grant(direct, request())
    for lease in (first, second, third, first):
        assert release(direct, lease) == "released"


def test_g5_old_ends_are_discarded_as_whole_entries(direct, listener, own_redis):
    leases = [grant(direct, request()._replace(owner="first"))]
    for number in range(20):
        # A TTL as long as a task's.
        attempt = waiter()._replace(owner=f"{number:032}.12345:0123456789abcdef")
        (met,) = queue(listener, attempt)
        release(direct, leases[-1])
        leases.append(wait(listener, attempt, met, PATIENCE))
    outcomes = [release(direct, lease) for lease in leases]
    known = outcomes.count("released")
    assert outcomes == ["refused"] * (21 - known) + ["released"] * known
    assert known > 5
    with client(own_redis) as asking:
        assert len(asking.hget("{dlock:0}:2:l:name", "past")) <= 512


def test_g5_a_late_packet_does_not_revive_a_released_lease(direct):
    attempt = request()
    release(direct, grant(direct, attempt))
    assert refuse(direct, attempt).owner == ""
    release(direct, grant(direct, request()))
    assert refuse(direct, attempt).owner == ""
    assert not direct.locked("name", deadline=direct.call_deadline())


def test_g1_a_message_older_than_the_last_request_is_ignored(direct, listener):
    # B waits ──► is handed the lease ──► an operator breaks it ──► another gets it
    #                 └─ B asks, meets the other, and reads its message only now
    lease = grant(direct, request())
    attempt = waiter()
    queue(listener, attempt)
    release(direct, lease)
    assert direct.break_silently("name", owner=attempt.owner)
    other = grant(direct, request())
    met = refuse(listener, attempt)
    assert wait(listener, attempt, met, 0.5) is None
    assert renew(direct, other) == ["renewed"]


def test_g1_a_message_about_a_broken_lease_is_ignored(direct, listener):
    # B waits ──► is handed the lease ──► an operator breaks it, and nobody else wants it yet
    #                 └─ B asks, and reads its message only now
    lease = grant(direct, request())
    attempt = waiter()
    queue(listener, attempt)
    release(direct, lease)
    assert direct.break_silently("name", owner=attempt.owner)
    met = refuse(listener, attempt)
    assert wait(listener, attempt, met, 0.5) is None


def test_g1_a_message_from_before_the_request_is_ignored(direct, listener, own_redis):
    # B waits ──► is handed the lease ──► a replica takes over, and knows nothing of it
    #                 └─ B asks the replica, whose tokens are lower, and reads its message only now
    grant(direct, request())
    lease, reader, attempt = grant(direct, request("other")), waiter("other"), waiter()
    (met,) = queue(listener, reader)
    reading = on_a_thread(lambda: wait(listener, reader, met, PATIENCE))
    with heard("listener.message", waiter=attempt.owner) as read, client(own_redis) as sending:
        (channel,) = sending.pubsub_channels()
        # As the former primary has sent it.
        key, text = handover_mac.key_of("dlock", "name"), f"{attempt.owner} {2**52}"
        sending.publish(channel, f"{text} {handover_mac.mac('sha1', key, channel, text)}")
        read.wait()
    assert wait(listener, attempt, refuse(listener, attempt), 0.5) is None
    release(direct, lease)
    assert reading().owner == reader.owner


def test_a_waiter_whose_lease_was_broken_during_the_hand_over_gives_up(direct, listener, asleep):
    # Its attempt was cancelled, so asking again would be useless while the name stays free.
    # A lease that is not renewed is asked for once more after the hand-over.
    lease, attempt, broken = grant(direct, request()), request(waits=True), []
    flow = granting.grant_flow(listener, attempt, patience=None, met=id, broke=lambda *_: None)
    result = on_a_thread(lambda: drive(flow))
    all_wait(asleep, attempt)

    def break_it(_: object) -> None:
        broken.append(direct.break_silently("name", owner=attempt.owner))

    with at("listener.message", break_it, waiter=attempt.owner):
        release(direct, lease)
        assert result() is None
    assert broken == [True]
    assert not direct.locked("name", deadline=direct.call_deadline())


def test_g1_a_message_repeated_by_a_replica_is_ignored(own_redis, proxy, listener):
    # Replicas repeat the messages of scripts. A waiter that still listens to a former primary would
    # get messages about leases that the new primary granted to others.
    at_once = ("--repl-diskless-sync-delay", "0")
    with RedisServer(args=at_once) as server, client(own_redis) as former:
        proxy.lead_to(server.port)
        pool_of(listener).close()
        former.replicaof("127.0.0.1", server.port)
        lease, attempt = grant(listener, request()), waiter()
        with client(server) as promoted:
            assert promoted.wait(1, 4000) == 1
        (met,) = queue(listener, attempt)
        # As if the two had swapped roles only after its request.
        met = met._replace(ticket=met.ticket._replace(listens=True))
        assert release(listener, lease) == "released"
        assert wait(listener, attempt, met, 1.0) is None
        assert not listener.locked("name", deadline=listener.call_deadline())


def test_g1_a_waiter_asks_again_if_much_of_the_handed_over_ttl_has_passed(
    direct, listener, monkeypatch
):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    release(direct, lease)
    # Less than two thirds of the TTL are left.
    time_passes(monkeypatch, 10.1)
    assert wait(listener, attempt, met, PATIENCE) is None
    assert grant(listener, attempt).token == direct.get("name").token


def test_g7_a_waiter_interrupted_right_after_the_hand_over_passes_the_lease_on(direct, listener):
    lease = grant(direct, request())
    first, second = waiter(), waiter()
    _, met = queue(listener, first, second)
    release(direct, lease)
    listener.cancel_acquire(first, deadline=listener.call_deadline())
    assert wait(listener, second, met, PATIENCE).owner == second.owner
    assert isinstance(listener.acquire(first, deadline=listener.call_deadline()), Contention)


def test_g7_a_cancelled_waiter_gets_no_lease(direct, listener):
    lease = grant(direct, request())
    gone, late, second = waiter(), waiter(), waiter()
    *_, met = queue(listener, gone, second)
    for attempt in (gone, late):
        listener.cancel_acquire(attempt, deadline=listener.call_deadline())
    # Its packet comes later than its cancellation.
    queue(listener, late)
    assert direct.get("name").waiting == 1
    release(direct, lease)
    assert wait(listener, second, met, PATIENCE).owner == second.owner


def test_a_waiter_whose_patience_ends_at_the_hand_over_gets_the_lease(direct, listener):
    lease = grant(direct, request())
    attempt = waiter()
    queue(listener, attempt)
    release(direct, lease)
    last = attempt._replace(waits=False)
    assert grant(listener, last).token == direct.get("name").token
    assert direct.get("name").ttl > 20


def test_a_server_without_free_memory_releases_and_hands_over(own_redis, direct, listener):
    first, second = grant(direct, request()), grant(direct, request("other"))
    attempt = waiter()
    (met,) = queue(listener, attempt)
    with client(own_redis) as admin:
        admin.config_set("maxmemory", "1")
        assert release(direct, first) == "released"
        assert release(direct, second) == "released"
        assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner
        assert release(direct, first) == "released"


@pytest.mark.parametrize("loss", ["flush", "script flush", "restart"])
def test_waiters_ask_again_after_the_server_lost_its_data(
    loss, own_redis, direct, listener, monkeypatch
):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    with client(own_redis) as admin:
        if loss == "flush":
            admin.flushall()
        elif loss == "script flush":
            admin.script_flush()
        else:
            own_redis.restart()
    outcome = release(direct, lease)
    handed = wait(listener, attempt, met, PATIENCE)
    assert (outcome, handed is None) == (
        ("released", False) if loss == "script flush" else ("refused", True)
    )
    assert grant(listener, attempt).token > lease.token


# -- the listener ----------------------------------------------------------------------


def test_a_request_from_before_the_subscription_is_repeated(proxy, direct):
    lease = grant(direct, request())
    fresh = backend_for(proxy.url)
    attempt = waiter()
    (met,) = queue(fresh, attempt)
    # Nobody listens yet: the name is free, and no message will come.
    release(direct, lease)
    assert not direct.locked("name", deadline=direct.call_deadline())
    started = clock.now()
    assert wait(fresh, attempt, met, PATIENCE) is None
    assert clock.now() - started < PATIENCE / 2
    grant(fresh, attempt)
    fresh.close()


def test_all_waiters_ask_again_when_the_subscription_was_cut(direct, listener, proxy, asleep):
    names = [f"n{number}" for number in range(5)]
    leases = [grant(direct, request(name)) for name in names]
    attempts = [waiter(name) for name in names]
    mets = queue(listener, *attempts)
    results = [
        on_a_thread(lambda a=attempt, m=met: wait(listener, a, m, PATIENCE))
        for attempt, met in zip(attempts, mets, strict=True)
    ]
    all_wait(asleep, *attempts)
    proxy.cut()
    assert [result() for result in results] == [None] * 5
    # One new subscription serves all of them.
    mets = queue(listener, *attempts)
    for lease, attempt, met in zip(leases, attempts, mets, strict=True):
        release(direct, lease)
        # Those whose last request was sent twice, because its connection was cut, ask again.
        granted = wait(listener, attempt, met, PATIENCE) or grant(listener, attempt)
        assert granted.owner == attempt.owner
    assert proxy.count("SUBSCRIBE") == 2


def test_g5_a_waiter_whose_message_was_lost_asks_again(direct, listener, proxy, asleep):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    result = on_a_thread(lambda: wait(listener, attempt, met, PATIENCE))
    all_wait(asleep, attempt)
    proxy.black_hole()
    release(direct, lease)
    token = direct.get("name").token
    proxy.heal()
    assert result() is None
    assert grant(listener, attempt).token == token


def test_a_subscription_that_receives_nothing_is_noticed(direct, proxy, monkeypatch):
    for listener in map(listening, backend(proxy.url, command_timeout=2.0)):
        monkeypatch.setattr(handover, "SILENCE", 0.0)
        grant(direct, request())
        attempt = waiter()
        (met,) = queue(listener, attempt)
        proxy.black_hole()
        started = clock.now()
        assert wait(listener, attempt, met, PATIENCE) is None
        assert clock.now() - started < PATIENCE / 2
        # It was given up: the next wait subscribes anew.
        proxy.heal()
        assert wait(listener, attempt, refuse(listener, attempt), PATIENCE) is None
        assert proxy.count("SUBSCRIBE") == 2


def test_a_silent_subscription_that_works_is_kept(direct, listener, proxy, monkeypatch):
    monkeypatch.setattr(handover, "SILENCE", 0.0)
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    result = on_a_thread(lambda: wait(listener, attempt, met, PATIENCE))
    proxy.wait_until(lambda it: it.count("PING") >= 3)
    release(direct, lease)
    handed = result()
    assert handed is None or handed.owner == attempt.owner
    assert proxy.count("SUBSCRIBE") == 1


def test_a_subscription_that_answered_while_nobody_read_is_kept(
    direct, listener, proxy, monkeypatch
):
    monkeypatch.setattr(handover, "SILENCE", 0.0)
    inner = listener._listener
    lease, attempt = grant(direct, request()), waiter()
    met = refuse(listener, attempt)
    proxy.delay = 0.1

    def asks_in_vain() -> bool:
        assert wait(listener, waiter(), met, 0.05) is None
        return bool(inner._pinged_at)

    # Its patience ends before the reply arrives, unless this process stands still just then.
    until(asks_in_vain)
    proxy.delay = 0.0
    met = refuse(listener, attempt)
    release(direct, lease)
    inner._pinged_at -= 10
    assert select.select([inner._connection._sock], [], [], PATIENCE)[0]
    assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner
    assert proxy.count("SUBSCRIBE") == 1


def test_g7_after_an_interrupt_of_the_reader_another_waiter_reads(direct, listener, asleep):
    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    leases = [grant(direct, request(name)) for name in ("first", "second")]
    first, second = attempts = [waiter("first"), waiter("second")]
    met, met_second = queue(listener, *attempts)
    all_there = threading.Event()
    results: list[Callable[[], Lease | None]] = []

    def come_second() -> None:
        all_wait(asleep, first)
        results.append(on_a_thread(lambda: wait(listener, second, met_second, PATIENCE)))
        all_wait(asleep, second)
        all_there.set()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Thread(target=come_second, daemon=True).start()
        with pytest.raises(Interrupt):
            wait(listener, first, met, PATIENCE)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert all_there.is_set()
    # Part of a message may have been read, so the connection is cut; the other waiter then reads.
    assert results[0]() is None
    listener.cancel_acquire(first, deadline=listener.call_deadline())
    met = refuse(listener, second)
    for lease in leases:
        release(direct, lease)
    assert wait(listener, second, met, PATIENCE).owner == second.owner
    assert not direct.locked("first", deadline=direct.call_deadline())


def test_g7_an_interrupt_between_messages_loses_no_waiters_message(
    direct, listener, proxy, monkeypatch, asleep
):
    class Interrupt(BaseException):
        pass

    def interrupt(_: bytes) -> None:
        raise Interrupt

    lease, later = grant(direct, request("first")), grant(direct, request("second"))
    first, second = attempts = [waiter("first"), waiter("second")]
    met, met_second = queue(listener, *attempts)
    interrupted = []

    def read_first() -> None:
        try:
            wait(listener, first, met, PATIENCE)
        except Interrupt:
            interrupted.append(True)

    reading = on_a_thread(read_first)
    all_wait(asleep, first)
    other = on_a_thread(lambda: wait(listener, second, met_second, PATIENCE))
    all_wait(asleep, second)
    with monkeypatch.context() as patch:
        patch.setattr(handover, "read_message", interrupt)
        release(direct, lease)
        reading()
    assert interrupted
    # More messages may have been read, so the connection is cut; the other waiter subscribes
    # and asks again.
    assert other() is None
    assert proxy.count("SUBSCRIBE") == 2
    listener.cancel_acquire(first, deadline=listener.call_deadline())
    met = refuse(listener, second)
    release(direct, later)
    assert wait(listener, second, met, PATIENCE).owner == second.owner


def test_g7_another_waiter_reads_when_the_reader_leaves(direct, listener, asleep):
    leases = {name: grant(direct, request(name)) for name in "abc"}
    attempts = {name: waiter(name) for name in "abc"}
    results = {}
    for name, attempt in attempts.items():
        met = refuse(listener, attempt)
        results[name] = on_a_thread(lambda a=attempt, m=met: wait(listener, a, m, PATIENCE))
        all_wait(asleep, attempt)
    # With the reader as last and as first waiter: the message reaches its waiter in both cases.
    for name in "cab":
        release(direct, leases[name])
        assert results[name]().owner == attempts[name].owner


async def test_g5_a_blocked_event_loop_loses_no_message(direct, listener, monkeypatch, asleep):
    # As after a minute.
    monkeypatch.setattr(handover, "KEPT_FOR", 0.0)
    monkeypatch.setattr(handover, "PRUNE_EVERY", -1.0)
    attempts = [waiter(name, ttl=600.0) for name in ("first", "second")]
    leases = [grant(direct, request(attempt.name)) for attempt in attempts]
    known = queue(listener, *attempts)
    end = clock.now() + PATIENCE
    waits = [
        asyncio.ensure_future(
            listener.async_wait(attempt, met, until=end, interrupted=lambda: False)
        )
        for attempt, met in zip(attempts, known, strict=True)
    ]
    await asyncio.sleep(0)
    assert {attempt.owner for attempt in attempts} <= asleep.each("waiter")
    # From here on, nothing else runs in this event loop, but the listening thread reads on.
    with heard("listener.message") as read:
        for lease, attempt in zip(leases, attempts, strict=True):
            release(direct, lease)
            read.wait(waiter=attempt.owner)
    for handed, attempt in zip(await asyncio.gather(*waits), attempts, strict=True):
        assert handed is not None
        assert handed.owner == attempt.owner


def test_g5_a_message_waits_half_a_minute_for_its_waiter(direct, listener, monkeypatch, asleep):
    attempts = [waiter(name, ttl=600.0) for name in ("first", "second")]
    leases = [grant(direct, request(attempt.name)) for attempt in attempts]
    met, met_second = queue(listener, *attempts)
    # The second waits and reads both messages, the first one half a minute earlier.
    second = on_a_thread(lambda: wait(listener, attempts[1], met_second, 30.0 + PATIENCE))
    all_wait(asleep, attempts[1])
    owner = attempts[0].owner
    with heard("listener.message", waiter=owner) as read:
        release(direct, leases[0])
        read.wait()
    time_passes(monkeypatch, 30.0)
    release(direct, leases[1])
    assert second().owner == attempts[1].owner
    first = wait(listener, attempts[0], met, PATIENCE)
    assert first is not None
    assert first.owner == owner


async def test_a_coroutine_that_waits_keeps_one_reading_thread_asleep(
    direct, listener, monkeypatch
):
    waits = []
    wait_of = handover.HandoverListener.wait

    def counted(self, owner, *args, **kwargs):
        waits.append(owner)
        return wait_of(self, owner, *args, **kwargs)

    monkeypatch.setattr(handover.HandoverListener, "wait", counted)
    grant(direct, request())
    attempt = waiter()
    met = refuse(listener, attempt)
    # Until the second of its checks, more than half a second later.
    checks = iter([False, True])
    end = clock.now() + PATIENCE
    handed = await listener.async_wait(attempt, met, until=end, interrupted=lambda: next(checks))
    assert handed is None
    assert waits == [""]


def test_a_thousand_threads_wait_on_one_connection(direct, listener, own_redis, asleep):
    # Longer than a busy machine takes to start so many threads.
    leases = [grant(direct, request(f"n{number}", ttl=600.0)) for number in range(1000)]
    attempts = [waiter(lease.name) for lease in leases]
    results = []
    for attempt in attempts:
        met = refuse(listener, attempt)
        results.append(on_a_thread(lambda a=attempt, m=met: wait(listener, a, m, 120.0)))
    all_wait(asleep, *attempts)
    with client(own_redis) as admin:
        listening_now = [each for each in admin.client_list() if int(each["sub"])]
        assert len(listening_now) == 1
        # The holder's, the waiters', the subscription's and the test's own.
        assert len(admin.client_list()) <= 5
    for lease in leases:
        assert release(direct, lease) == "released"
    for result, attempt in zip(results, attempts, strict=True):
        handed = result()
        # Long after its request it asks again and finds its own grant, or a free name.
        assert handed is None or handed.owner == attempt.owner
    assert not listener._listener._waiters.by_owner


def test_g8_a_child_gets_leases_through_its_own_subscription(direct, listener, own_redis):
    lease = grant(direct, request())
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            listener.after_fork()
            listening(listener)
            attempt = waiter()
            met = refuse(listener, attempt)
            os.write(told, b"!")
            handed = wait(listener, attempt, met, PATIENCE)
            mine = handed is not None and handed.owner == attempt.owner
            with client(own_redis) as asking:
                # The parent has the other one.
                status = 0 if mine and len(asking.pubsub_channels()) == 2 else 2
        finally:
            os._exit(status)
    os.read(ready, 1)
    release(direct, lease)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # The parent still gets its messages on its own subscription.
    lease, attempt = grant(direct, request("parent's")), waiter("parent's")
    met = refuse(listener, attempt)
    release(direct, lease)
    assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner


# -- messages and stale waiters --------------------------------------------------


def test_g5_a_late_copy_of_a_finished_acquire_makes_no_waiter(direct, listener):
    # X waits, is granted, releases ──► Y holds ──► the late copy of X's acquire arrives
    late = waiter()
    release(direct, grant(direct, late))
    holder = grant(direct, request())
    refuse(direct, late)
    assert direct.get("name").waiting == 0
    release(direct, holder)
    assert not direct.locked("name", deadline=direct.call_deadline())


def test_g4_a_waiter_whose_hand_over_was_broken_unseen_is_told_to_begin_anew(direct, listener):
    # W waits ──► it is handed the lease, unseen ──► that is broken ──► Y holds ──► W asks again
    lease, attempt = grant(direct, request()), waiter()
    queue(listener, attempt)
    release(direct, lease)
    assert direct.break_silently("name", owner=attempt.owner)
    grant(direct, request())
    # No owner: the caller goes on with a new attempt, which becomes a waiter.
    assert refuse(listener, attempt).owner == ""
    assert direct.get("name").waiting == 0


def test_g4_a_waiter_whose_hand_over_expired_unseen_is_told_to_begin_anew(direct, listener):
    lease, attempt = grant(direct, request()), waiter()._replace(ttl=0.1)
    queue(listener, attempt)
    release(direct, lease)
    while direct.locked("name", deadline=direct.call_deadline()):
        pass
    grant(direct, request())
    assert refuse(listener, attempt).owner == ""
    assert direct.get("name").waiting == 0


def test_g4_waiters_keep_their_order_while_a_handed_over_name_cools(direct, listener):
    lease = grant(direct, request())
    first, second = waiter(), waiter()
    met, met_second = queue(listener, first, second)
    release(direct, lease)
    handed = wait(listener, first, met, PATIENCE)
    # Before the first renewal.
    deadline = listener.call_deadline()
    assert listener.release("name", handed.owner, min_hold=0.3, deadline=deadline) == "released"
    while direct.locked("name", deadline=direct.call_deadline()):
        pass
    other = grant(direct, request())
    assert direct.get("name").waiting == 1
    # It got the message that the name is cooling.
    assert wait(listener, second, met_second, PATIENCE) is None
    met_second = refuse(listener, second)
    release(direct, other)
    assert wait(listener, second, met_second, PATIENCE).owner == second.owner


def test_g4_all_waiters_learn_that_a_name_cools(direct, listener):
    lease = grant(direct, request())
    first, second = waiter(), waiter()
    met, met_second = queue(listener, first, second)
    deadline = direct.call_deadline()
    assert direct.release("name", lease.owner, min_hold=60.0, deadline=deadline) == "released"
    # The first waiter may leave before the name is free; then nobody would tell the second.
    started = clock.now()
    for attempt, known in ((first, met), (second, met_second)):
        assert wait(listener, attempt, known, PATIENCE) is None
        assert clock.now() - started < PATIENCE / 2
        assert refuse(listener, attempt).kind == "cooling"


async def test_g6_after_a_reading_thread_that_started_too_late_another_one_starts(direct, listener):
    inner = listener._listener
    # All coroutines have left before the thread started to read.
    inner._read_for_coroutines()
    until(lambda: "dlock-listener-redis" not in {each.name for each in threading.enumerate()})
    lease, attempt = grant(direct, request()), waiter()
    met = refuse(listener, attempt)
    release(direct, lease)
    end = clock.now() + PATIENCE
    handed = await listener.async_wait(attempt, met, until=end, interrupted=lambda: False)
    assert handed is not None
    assert handed.owner == attempt.owner


def test_g4_a_subscription_to_a_former_primary_is_noticed(proxy, direct, listener, monkeypatch):
    # A fail-over behind one address: commands go to the new primary, but the subscription was not
    # cut and still leads to the old one.
    with RedisServer() as promoted:
        proxy.lead_to(promoted.port)
        pool_of(listener).close()
        # The subscription is not new.
        time_passes(monkeypatch, 10)
        holder = backend_for(promoted.url)
        lease, attempt = grant(holder, request()), waiter()
        assert wait(listener, attempt, refuse(listener, attempt), PATIENCE) is None
        # It subscribes at the server to which it sends commands.
        assert wait(listener, attempt, refuse(listener, attempt), PATIENCE) is None
        met = refuse(listener, attempt)
        release(holder, lease)
        assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner
        assert proxy.count("SUBSCRIBE") == 2
        holder.close()


@pytest.mark.parametrize("prefix", ["dlöck", "100%d", "{a}"])
def test_a_key_prefix_may_hold_any_text(prefix, own_redis):
    it = backend_for(own_redis.url, key_prefix=prefix)
    lease = grant(it, request("ü%b"))
    assert refuse(it, request("ü%b")).owner == lease.owner
    assert release(it, lease) == "released"
    it.close()
