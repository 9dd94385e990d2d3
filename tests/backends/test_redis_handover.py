"""A release hands the lease to the first waiter, whatever is lost, cut, stopped or interrupted."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from django_dlock import clock
from django_dlock.backends.redis import RedisBackend, handover
from django_dlock.core import acquire
from django_dlock.lease import Contention, Lease, LeaseRequest
from testproject.servers import RedisServer
from tests.support.proxy import Proxy
from tests.support.redis_calls import (
    backend_for,
    client,
    grant,
    refuse,
    release,
    renew,
    request,
    wait,
)

PATIENCE = 20.0


@pytest.fixture
def direct(own_redis: RedisServer) -> Iterator[RedisBackend]:
    """Holds what others wait for; never waits itself."""
    yield from backend(own_redis.url)


@pytest.fixture
def listener(proxy: Proxy) -> Iterator[RedisBackend]:
    """Waits, by a proxy, and listens already."""
    yield from (listening(it) for it in backend(proxy.url))


def backend(url: str) -> Iterator[RedisBackend]:
    it = backend_for(url, command_timeout=2.0)
    yield it
    it.close()


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
    """Run it; the function returned waits for the result."""
    results: list[Lease | None] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result() -> Lease | None:
        thread.join(PATIENCE)
        assert results, "still waiting, or raised"
        return results[0]

    return result


# -- who gets it -----------------------------------------------------------------------


def test_the_lease_is_the_waiters_in_all_its_facts(direct, listener):
    lease = grant(direct, request())
    attempt = waiter(ttl=60.0, kind="parked", metadata='{"task_name": "x"}')
    (met,) = queue(listener, attempt)
    before = clock.now()
    release(direct, lease)
    handed = wait(listener, attempt, met, PATIENCE)
    assert (handed.owner, handed.name) == (attempt.owner, "name")
    # From the ask on, for the whole TTL that it asked for.
    assert handed.ttl == 60.0
    assert handed.asked_at <= before
    info = direct.get("name")
    assert (info.owner, info.token, info.kind) == (attempt.owner, handed.token, "parked")
    assert info.metadata == {"task_name": "x"}
    assert info.process.pid == os.getpid()
    assert 59 < info.ttl <= 60.1
    assert info.renewals == 0
    assert [info.name for info in direct.list()] == ["name"]
    assert renew(listener, handed._replace(ttl=60.0)) == ["renewed"]
    assert direct.get("name").ttl > 59
    assert release(listener, handed) == "released"
    assert renew(direct, handed) == ["released"]


def test_a_break_hands_over_too_and_the_holder_is_told(direct, listener):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    assert direct.break_("name", owner=lease.owner)
    assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner
    assert renew(direct, lease) == ["broken"]


def test_a_fixed_lease_is_asked_for_and_begins_in_full(direct, listener):
    lease = grant(direct, request())
    attempt = request(waits=True, ttl=40.0)
    (met,) = queue(listener, attempt)
    release(direct, lease)
    assert wait(listener, attempt, met, PATIENCE) is None
    token = direct.get("name").token
    mine = grant(listener, attempt)
    assert (mine.token, mine.ttl) == (token, 40.0)
    assert direct.get("name").ttl > 39


def test_nobody_is_handed_a_name_that_cools(direct, listener):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    deadline = direct.call_deadline()
    assert direct.release("name", lease.owner, min_hold=0.8, deadline=deadline) == "released"
    # Told that the end is nearer than it knew.
    assert wait(listener, attempt, met, PATIENCE) is None
    assert direct.get("name").waiting == 1
    met = refuse(listener, attempt)
    assert met.kind == "cooling"
    assert wait(listener, attempt, met, PATIENCE) is None
    grant(listener, attempt)


def test_one_that_may_not_publish_can_release(own_redis, direct, listener):
    with client(own_redis) as admin:
        admin.execute_command(
            *("ACL", "SETUSER", "mute", "on", ">pw", "~*", "+@all", "resetchannels")
        )
    mute = backend_for(own_redis.url.replace("redis://", "redis://mute:pw@"))
    lease = grant(mute, request())
    queue(listener, waiter())
    assert release(mute, lease) == "released"
    grant(direct, request())


# -- lost replies and late packets -----------------------------------------------------


def test_who_was_handed_a_lease_may_keep_the_name_taken_all_the_same(direct, listener):
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


def test_g2_who_releases_too_late_leaves_the_waiters_where_they_stood(direct, listener, own_redis):
    lease = grant(direct, request(ttl=0.2))
    queue(listener, waiter(), waiter())
    with client(own_redis) as asking:
        waiters = asking.zrange("{dlock:0}:2:q:name", 0, -1, withscores=True)
        assert len(waiters) == 2
        while direct.locked("name", deadline=direct.call_deadline()):
            pass
        assert release(direct, lease) == "expired"
        assert asking.zrange("{dlock:0}:2:q:name", 0, -1, withscores=True) == waiters
        assert asking.pttl("{dlock:0}:2:q:name") > 0


def test_g5_a_release_whose_reply_was_lost_hands_on_once(direct, listener, proxy):
    first = grant(listener, request())
    second, third = waiter(), waiter()
    met, _ = queue(listener, second, third)
    proxy.drop_replies()
    assert release(listener, first) == "released"
    assert proxy.replies_dropped == 1
    assert direct.get("name").owner == second.owner
    handed = wait(listener, second, met, PATIENCE)
    assert renew(listener, handed) == ["renewed"]


def test_g5_ends_are_remembered_while_others_have_had_the_name_since(direct, listener):
    leases = [grant(direct, request())]
    for outcome in ("released", "broken", "released"):
        attempt = waiter()
        (met,) = queue(listener, attempt)
        if outcome == "broken":
            direct.break_("name", owner=leases[-1].owner)
        else:
            release(direct, leases[-1])
        leases.append(wait(listener, attempt, met, PATIENCE))
    # Replies that were lost, asked for again by those who are late.
    assert [release(direct, lease) for lease in leases[:3]] == ["released", "broken", "released"]
    assert direct.release("name", "x", min_hold=0.0, deadline=direct.call_deadline()) == "refused"
    assert renew(direct, leases[3]) == ["renewed"]


@pytest.mark.parametrize("how", ["released", "broken", "expired"])
def test_g5_an_end_is_remembered_when_another_acquired_since(direct, own_redis, how):
    first = grant(direct, request())
    if how == "released":
        assert release(direct, first) == how
    elif how == "broken":
        assert direct.break_("name", owner=first.owner)
    else:
        with client(own_redis) as stranger:
            stranger.hset("{dlock:0}:2:l:name", "until", "1")
    since = grant(direct, request())
    for _ in range(2):
        # As if the first reply had been lost.
        assert release(direct, first) == how
        assert renew(direct, first) == [how]
        release(direct, since)


def test_g5_ends_are_remembered_when_nobody_waited_since(direct, listener):
    first, attempt = grant(direct, request()), waiter()
    (met,) = queue(listener, attempt)
    release(direct, first)
    second = wait(listener, attempt, met, PATIENCE)
    release(listener, second)
    third = grant(direct, request())
    for lease in (first, second, third, first):
        assert release(direct, lease) == "released"


def test_g5_what_is_forgotten_is_forgotten_whole(direct, listener, own_redis):
    leases = [grant(direct, request()._replace(owner="first"))]
    for number in range(20):
        # As long as that of a task.
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


def test_g5_a_late_packet_revives_nothing_that_was_given_back(direct):
    attempt = request()
    release(direct, grant(direct, attempt))
    assert refuse(direct, attempt).owner == ""
    release(direct, grant(direct, request()))
    assert refuse(direct, attempt).owner == ""
    assert not direct.locked("name", deadline=direct.call_deadline())


def test_g1_a_message_from_before_the_last_ask_is_not_believed(direct, listener):
    # B waits ──► is handed the lease ──► an operator breaks it ──► another gets it
    #                 └─ B asks, meets the other, and reads its message only now
    lease = grant(direct, request())
    attempt = waiter()
    queue(listener, attempt)
    release(direct, lease)
    assert direct.break_("name", owner=attempt.owner)
    other = grant(direct, request())
    met = refuse(listener, attempt)
    assert wait(listener, attempt, met, 0.5) is None
    assert renew(direct, other) == ["renewed"]


def test_g1_a_message_about_a_lease_that_was_broken_is_not_believed(direct, listener):
    # B waits ──► is handed the lease ──► an operator breaks it, and nobody else wants it yet
    #                 └─ B asks, and reads its message only now
    lease = grant(direct, request())
    attempt = waiter()
    queue(listener, attempt)
    release(direct, lease)
    assert direct.break_("name", owner=attempt.owner)
    met = refuse(listener, attempt)
    assert wait(listener, attempt, met, 0.5) is None


def test_a_waiter_whose_lease_was_broken_on_its_way_gives_up(direct, listener, monkeypatch):
    # Its attempt is over, and it would ask in vain for as long as nobody else wants the name.
    lease, attempt = grant(direct, request()), waiter()
    handed_over = listener._commands.handed_over

    def broken_first(*args: object) -> Lease | None:
        assert handed_over(*args)
        assert direct.break_("name", owner=attempt.owner)

    monkeypatch.setattr(listener._commands, "handed_over", broken_first)
    flow = acquire.acquisition(listener, attempt, patience=None, met=id, broke=id)
    result = on_a_thread(lambda: acquire.drive(flow, listener))
    all_wait(listener, 1)
    release(direct, lease)
    assert result() is None
    assert not direct.locked("name", deadline=direct.call_deadline())


def test_g1_a_message_that_a_replica_passes_on_is_not_believed(own_redis, proxy, listener):
    # Scripts' messages are replicated: a waiter that still listens to a former master would hear
    # of what the new one, where nobody listens, gave to others.
    at_once = ("--repl-diskless-sync-delay", "0")
    with RedisServer(args=at_once) as server, client(own_redis) as former:
        proxy.lead_to(server.port)
        listener._pool.close()
        former.replicaof("127.0.0.1", server.port)
        lease, attempt = grant(listener, request()), waiter()
        with client(server) as promoted:
            assert promoted.wait(1, 4000) == 1
        (met,) = queue(listener, attempt)
        # As if the two had changed roles only after it asked.
        met = met._replace(ticket=met.ticket._replace(listens=True))
        assert release(listener, lease) == "released"
        assert wait(listener, attempt, met, 1.0) is None
        assert not listener.locked("name", deadline=listener.call_deadline())


def test_g1_a_lease_asked_for_long_ago_is_asked_for_again(direct, listener):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    release(direct, lease)
    # As if it had waited for long: less than two thirds of the TTL are left.
    met = met._replace(ticket=met.ticket._replace(asked_at=clock.now() - 10.1))
    listener._listener._subscribed_at -= 20
    assert wait(listener, attempt, met, PATIENCE) is None
    assert grant(listener, attempt).token == direct.get("name").token


def test_g7_one_interrupted_when_it_was_just_handed_the_lease_passes_it_on(direct, listener):
    lease = grant(direct, request())
    first, second = waiter(), waiter()
    _, met = queue(listener, first, second)
    release(direct, lease)
    listener.cancel_acquire(first, deadline=listener.call_deadline())
    assert wait(listener, second, met, PATIENCE).owner == second.owner
    assert isinstance(listener.acquire(first, deadline=listener.call_deadline()), Contention)


def test_g7_a_cancelled_waiter_is_handed_nothing(direct, listener):
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


def test_a_waiter_whose_patience_ends_with_the_hand_over_has_it(direct, listener):
    lease = grant(direct, request())
    attempt = waiter()
    queue(listener, attempt)
    release(direct, lease)
    last = attempt._replace(waits=False)
    assert grant(listener, last).token == direct.get("name").token
    assert direct.get("name").ttl > 29


def test_a_full_server_frees_and_hands_over(own_redis, direct, listener):
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
def test_waiters_of_a_server_that_forgot_ask_again(loss, own_redis, direct, listener, monkeypatch):
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


def test_an_ask_from_before_the_subscription_counts_for_nothing(proxy, direct):
    lease = grant(direct, request())
    fresh = backend_for(proxy.url)
    attempt = waiter()
    (met,) = queue(fresh, attempt)
    # There is no listener: the name is free, and no message will come.
    release(direct, lease)
    assert not direct.locked("name", deadline=direct.call_deadline())
    started = clock.now()
    assert wait(fresh, attempt, met, PATIENCE) is None
    assert clock.now() - started < PATIENCE / 2
    grant(fresh, attempt)
    fresh.close()


def test_all_waiters_ask_again_when_the_subscription_was_cut(direct, listener, proxy):
    names = [f"n{number}" for number in range(5)]
    leases = [grant(direct, request(name)) for name in names]
    attempts = [waiter(name) for name in names]
    mets = queue(listener, *attempts)
    results = [
        on_a_thread(lambda a=attempt, m=met: wait(listener, a, m, PATIENCE))
        for attempt, met in zip(attempts, mets, strict=True)
    ]
    all_wait(listener, 5)
    proxy.cut()
    assert [result() for result in results] == [None] * 5
    # One subscription serves them all again.
    mets = queue(listener, *attempts)
    for lease, attempt, met in zip(leases, attempts, mets, strict=True):
        release(direct, lease)
        assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner
    assert proxy.count("SUBSCRIBE") == 2


def all_wait(it: RedisBackend, count: int) -> None:
    """Wait until ``count`` threads wait and one of them reads."""
    listener = it._listener
    end = clock.now() + PATIENCE
    while len(listener._waiting) < count or not listener._reading:
        assert clock.now() < end


def test_g5_a_message_that_was_lost_is_made_up_for_by_asking(direct, listener, proxy):
    lease = grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    result = on_a_thread(lambda: wait(listener, attempt, met, PATIENCE))
    all_wait(listener, 1)
    proxy.black_hole()
    release(direct, lease)
    token = direct.get("name").token
    proxy.heal()
    assert result() is None
    assert grant(listener, attempt).token == token


def test_a_subscription_behind_a_black_hole_is_found_out(direct, listener, proxy, monkeypatch):
    monkeypatch.setattr(handover, "SILENCE", 0.0)
    grant(direct, request())
    attempt = waiter()
    (met,) = queue(listener, attempt)
    proxy.black_hole()
    started = clock.now()
    assert wait(listener, attempt, met, PATIENCE) is None
    assert clock.now() - started < PATIENCE / 2
    assert listener._listener._connection is None


def test_a_silent_subscription_that_lives_is_kept(direct, listener, proxy, monkeypatch):
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


def test_a_subscription_that_answered_when_nobody_read_is_kept(
    direct, listener, proxy, monkeypatch
):
    monkeypatch.setattr(handover, "SILENCE", 0.0)
    inner = listener._listener
    lease, attempt = grant(direct, request()), waiter()
    proxy.delay = 0.1
    # Its patience ends before the answer comes.
    assert wait(listener, waiter(), refuse(listener, attempt), 0.05) is None
    assert inner._pinged_at
    proxy.delay = 0.0
    met = refuse(listener, attempt)
    release(direct, lease)
    inner._pinged_at -= 10
    assert select.select([inner._connection._sock], [], [], PATIENCE)[0]
    assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner
    assert proxy.count("SUBSCRIBE") == 1


def test_g7_one_interrupted_while_it_reads_leaves_nobody_without_a_reader(direct, listener):
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
        all_wait(listener, 1)
        results.append(on_a_thread(lambda: wait(listener, second, met_second, PATIENCE)))
        all_wait(listener, 2)
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
    # A cut, for half a message may have been read: the other asks again, and then reads.
    assert results[0]() is None
    listener.cancel_acquire(first, deadline=listener.call_deadline())
    met = refuse(listener, second)
    for lease in leases:
        release(direct, lease)
    assert wait(listener, second, met, PATIENCE).owner == second.owner
    assert not direct.locked("first", deadline=direct.call_deadline())


def test_g7_one_interrupted_between_messages_leaves_nobody_waiting_for_its_own(
    direct, listener, proxy, monkeypatch
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
    all_wait(listener, 1)
    other = on_a_thread(lambda: wait(listener, second, met_second, PATIENCE))
    all_wait(listener, 2)
    with monkeypatch.context() as patch:
        patch.setattr(handover, "read_message", interrupt)
        release(direct, lease)
        reading()
    assert interrupted
    # A cut, for more messages may have been read: the other subscribes anew and asks again.
    assert other() is None
    assert proxy.count("SUBSCRIBE") == 2
    listener.cancel_acquire(first, deadline=listener.call_deadline())
    met = refuse(listener, second)
    release(direct, later)
    assert wait(listener, second, met, PATIENCE).owner == second.owner


def test_g7_another_reads_when_the_reader_leaves(direct, listener):
    leases = {name: grant(direct, request(name)) for name in "abc"}
    attempts = {name: waiter(name) for name in "abc"}
    results = {}
    for number, (name, attempt) in enumerate(attempts.items(), start=1):
        met = refuse(listener, attempt)
        results[name] = on_a_thread(lambda a=attempt, m=met: wait(listener, a, m, PATIENCE))
        all_wait(listener, number)
    # The reader last, then first: the message reaches its waiter in both cases.
    for name in "cab":
        release(direct, leases[name])
        assert results[name]().owner == attempts[name].owner


def test_a_thousand_threads_wait_on_one_connection(direct, listener, own_redis):
    leases = [grant(direct, request(f"n{number}")) for number in range(1000)]
    attempts = [waiter(lease.name) for lease in leases]
    results = []
    for attempt in attempts:
        met = refuse(listener, attempt)
        results.append(on_a_thread(lambda a=attempt, m=met: wait(listener, a, m, 120.0)))
    all_wait(listener, 1000)
    with client(own_redis) as admin:
        listening_now = [each for each in admin.client_list() if int(each["sub"])]
        assert len(listening_now) == 1
        # The holder's, the waiters', the subscription, the asking one.
        assert len(admin.client_list()) <= 5
    for lease in leases:
        assert release(direct, lease) == "released"
    for result, attempt in zip(results, attempts, strict=True):
        handed = result()
        # Long after its ask, it asks again and finds its own grant, or a name that is free again.
        assert handed is None or handed.owner == attempt.owner
    assert not listener._listener._waiting


def test_g8_a_child_is_handed_leases_by_a_subscription_of_its_own(direct, listener):
    lease = grant(direct, request())
    channel = listener._commands.keys.channel
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
            status = 0 if mine and listener._commands.keys.channel != channel else 2
        finally:
            os._exit(status)
    os.read(ready, 1)
    release(direct, lease)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # The parent's still brings its messages.
    lease, attempt = grant(direct, request("parent's")), waiter("parent's")
    met = refuse(listener, attempt)
    release(direct, lease)
    assert wait(listener, attempt, met, PATIENCE).owner == attempt.owner


# -- who is told, and who is forgotten --------------------------------------------------


def test_g5_a_late_copy_of_an_acquire_that_is_over_makes_no_waiter(direct, listener):
    # X waits, is granted, releases ──► Y holds ──► the late copy of X's acquire arrives
    late = waiter()
    release(direct, grant(direct, late))
    holder = grant(direct, request())
    refuse(direct, late)
    assert direct.get("name").waiting == 0
    release(direct, holder)
    assert not direct.locked("name", deadline=direct.call_deadline())


def test_g4_waiters_keep_their_place_when_a_handed_over_name_has_cooled(direct, listener):
    lease = grant(direct, request())
    first, second = waiter(), waiter()
    met, met_second = queue(listener, first, second)
    release(direct, lease)
    handed = wait(listener, first, met, PATIENCE)
    # Before it was ever renewed.
    deadline = listener.call_deadline()
    assert listener.release("name", handed.owner, min_hold=0.3, deadline=deadline) == "released"
    while direct.locked("name", deadline=direct.call_deadline()):
        pass
    other = grant(direct, request())
    assert direct.get("name").waiting == 1
    # It was told that the name cools.
    assert wait(listener, second, met_second, PATIENCE) is None
    met_second = refuse(listener, second)
    release(direct, other)
    assert wait(listener, second, met_second, PATIENCE).owner == second.owner


def test_g4_all_waiters_hear_that_a_name_cools(direct, listener):
    lease = grant(direct, request())
    first, second = waiter(), waiter()
    met, met_second = queue(listener, first, second)
    deadline = direct.call_deadline()
    assert direct.release("name", lease.owner, min_hold=60.0, deadline=deadline) == "released"
    # The first may leave before the name is free; then nobody else would tell the second.
    started = clock.now()
    for attempt, known in ((first, met), (second, met_second)):
        assert wait(listener, attempt, known, PATIENCE) is None
        assert clock.now() - started < PATIENCE / 2
        assert refuse(listener, attempt).kind == "cooling"


async def test_g6_a_thread_that_came_too_late_to_read_is_followed_by_another(direct, listener):
    inner = listener._listener
    # All coroutines have gone before it began.
    inner._read_for_coroutines()
    end = clock.now() + PATIENCE
    while inner._waiting:
        assert clock.now() < end
    lease, attempt = grant(direct, request()), waiter()
    met = refuse(listener, attempt)
    release(direct, lease)
    until = clock.now() + PATIENCE
    handed = await listener.async_wait(attempt, met, until=until, interrupted=lambda: False)
    assert handed is not None
    assert handed.owner == attempt.owner


def test_g4_a_subscription_to_a_former_primary_is_noticed(own_redis, proxy, direct, listener):
    # A fail-over behind one address: commands go to the new primary, and the subscription, which
    # nothing has cut, stays with the old one.
    with RedisServer() as promoted:
        proxy.lead_to(promoted.port)
        listener._pool.close()
        # Some time ago.
        listener._listener._subscribed_at -= 10
        holder = backend_for(promoted.url)
        lease, attempt = grant(holder, request()), waiter()
        assert wait(listener, attempt, refuse(listener, attempt), PATIENCE) is None
        # It subscribes where it asks.
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
