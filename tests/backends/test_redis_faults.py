"""Lost replies, and servers that stop, restart or lose data: no lease is orphaned silently."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import pytest
import redis

from django_dlock import clock
from django_dlock.backends.redis.lua_source import MEMORY_MS
from django_dlock.exceptions import BackendRefused, BackendUnavailable
from django_dlock.lease import Contention, Lease, ReleaseRequest, RenewalResult
from django_dlock.process import current
from testproject.servers import RedisServer
from tests.support.databases import until
from tests.support.redis_calls import (
    backend_for,
    client,
    grant,
    pool_of,
    refuse,
    release,
    renew,
    renewals,
    request,
    wait,
)

TOLERANCE = 5.0
"""Seconds that a busy machine may add to a bounded call; less than another timeout would add."""


def warm(backend):
    """Load the scripts, so that no reply is about a missing one."""
    # With more time than the command timeout, which some tests make short.
    attempt, deadline = request("warm"), clock.now() + 20
    lease = backend.acquire(attempt, deadline=deadline)
    backend.renew(renewals(lease), process=current().id, deadline=deadline)
    backend.release("warm", attempt.owner, min_hold=0.0, deadline=deadline)
    backend.cancel_acquire(attempt, deadline=deadline)


# -- lost replies ----------------------------------------------------------------------


def test_g5_an_acquire_whose_reply_was_cut_off_finds_its_own_grant(proxy, own_redis):
    backend = backend_for(proxy.url)
    warm(backend)
    proxy.drop_replies()
    lease = grant(backend, request())
    assert proxy.replies_dropped == 1
    assert backend_for(own_redis.url).get("name").owner == lease.owner
    assert renew(backend, lease) == ["renewed"]


@pytest.mark.parametrize("lost", [2, 5])
def test_g5_a_call_is_repeated_until_its_reply_is_not_cut_off(proxy, own_redis, lost):
    warm(backend_for(own_redis.url))
    proxy.drop_replies(lost, how="close")
    lease = grant(backend_for(proxy.url), request())
    assert proxy.replies_dropped == lost
    assert backend_for(own_redis.url).get("name").owner == lease.owner


def test_g10_a_server_that_cuts_every_connection_is_unavailable_by_the_deadline(
    proxy, own_redis, monkeypatch
):
    pauses, caller, sleep = [], threading.get_ident(), time.sleep

    def pause(seconds):
        if threading.get_ident() == caller:
            pauses.append(seconds)
        sleep(seconds)

    warm(backend_for(own_redis.url))
    # Enough for several attempts, even if this process stands still meanwhile.
    backend = backend_for(proxy.url, command_timeout=3.0)
    proxy.drop_replies(10_000, how="close")
    monkeypatch.setattr(time, "sleep", pause)
    started = clock.now()
    with pytest.raises(BackendUnavailable):
        backend.acquire(request(), deadline=backend.call_deadline())
    assert clock.now() - started < backend.command_timeout + TOLERANCE
    # The first repetition follows at once; a pause precedes each other one.
    repeated = proxy.count("EVALSHA") - 1
    assert repeated >= 2
    # The deadline may come before the last attempt is sent.
    assert len(pauses) - repeated in (0, 1)
    assert pauses[0] == 0
    assert all(pauses[1:])


# -- connections that break, servers that are not ready ---------------------------------


def test_g10_every_locked_block_succeeds_while_all_connections_are_killed_every_10_ms(own_redis):
    backend = backend_for(own_redis.url, command_timeout=20.0)
    warm(backend)
    over, killed = threading.Event(), []

    def kill() -> None:
        with client(own_redis) as killing:
            while not over.wait(0.01):
                killed.append(killing.client_kill_filter(_type="normal", skipme=True))

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        sections = 0
        while sections < 100 or sum(killed) < 20:
            lease = grant(backend, request(f"section {sections}"))
            assert release(backend, lease) == "released"
            sections += 1
    finally:
        over.set()
        killer.join()


@pytest.mark.parametrize(
    "reply",
    [
        b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL.\r\n",
        b"-CLUSTERDOWN The cluster is down\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is 'no'.\r\n",
        b"-NOREPLICAS Not enough good replicas to write.\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
    ],
    ids=lambda reply: reply[1:].split()[0].decode(),
)
def test_a_server_that_is_not_ready_is_asked_again(proxy, reply):
    backend = backend_for(proxy.url)
    warm(backend)
    proxy.reply(reply, 4)
    lease = grant(backend, request())
    proxy.reply(reply, 4)
    pending = backend.start_renew(
        renewals(lease), process=current().id, deadline=backend.call_deadline()
    )
    assert pending.result() == [RenewalResult("renewed", 30.0)]
    assert proxy.replies_dropped == 8
    # The server may be ready soon, so this is no refusal.
    proxy.reply(reply, 10_000)
    started = clock.now()
    with pytest.raises(BackendUnavailable) as unavailable:
        backend.renew(renewals(lease), process=current().id, deadline=started + 1)
    assert not isinstance(unavailable.value, BackendRefused)
    assert clock.now() - started < 1 + TOLERANCE
    # The repetitions have pauses between them.
    assert proxy.replies_dropped < 200


def test_calls_wait_for_a_server_that_runs_a_long_script(own_redis):
    backend = backend_for(own_redis.url, command_timeout=5.0)
    lease = grant(backend, request())
    with client(own_redis) as other:
        other.config_set("lua-time-limit", 1)
        others = threading.Thread(
            target=lambda: other.eval(
                "local t, n = redis.call('TIME'), 0 "
                "local till = t[1] * 1000000 + t[2] + 500000 "
                "repeat n = redis.call('TIME') until n[1] * 1000000 + n[2] > till",
                0,
            )
        )
        others.start()
        assert renew(backend, lease) == ["renewed"]
        others.join()


@pytest.mark.parametrize(
    "reply",
    [
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"-NOPERM this user has no permissions to run the 'evalsha' command\r\n",
        b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
        b"-ERR unknown command 'EVALSHA'\r\n",
    ],
    ids=lambda reply: reply[1:].split()[0].decode(),
)
def test_a_refusal_is_raised_at_once_and_the_connection_is_kept(proxy, reply):
    backend = backend_for(proxy.url)
    warm(backend)
    before = proxy.connections
    proxy.reply(reply, 10_000)
    for _ in range(3):
        with pytest.raises(BackendRefused) as refused:
            grant(backend, request())
        assert refused.value.name == "name"
    assert proxy.replies_dropped == 3
    assert proxy.connections == before


def test_a_server_that_cannot_be_reached_is_reported_at_once(own_redis):
    backend = backend_for(own_redis.url, command_timeout=60.0)
    lease = grant(backend, request())
    own_redis.kill()
    started = clock.now()
    # The connection breaks, and no other one exists.
    with pytest.raises(BackendUnavailable, match="refused"):
        renew(backend, lease)
    with pytest.raises(BackendUnavailable, match="refused") as unavailable:
        grant(backend, request())
    assert not isinstance(unavailable.value, BackendRefused)
    assert clock.now() - started < 10


def test_g1_no_lease_is_lost_in_a_failover_behind_one_address(own_redis, proxy):
    """Every open connection leads to the former primary, which answers READONLY once."""
    with RedisServer() as other, client(own_redis) as old, client(other) as new:
        old.config_set("repl-diskless-sync-delay", 0)
        new.replicaof("127.0.0.1", own_redis.port)
        backend = backend_for(proxy.url)
        warm(backend)
        leases = [grant(backend, request(f"name {number}", ttl=60.0)) for number in range(21)]
        # Open several connections.
        pool = pool_of(backend)
        idle = [pool.connect(backend.call_deadline()) for _ in range(8)]
        for connection in idle:
            pool.keep(connection)
        # WAIT covers what its own connection has written, which is later than all the rest.
        old.set("mark", 1)
        assert old.wait(1, 4000) == 1
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", other.port)
        proxy.lead_to(other.port)
        # Beside them, the one of the calls before.
        opened = len(idle) + 1
        before = proxy.count("EVALSHA")
        pending = [
            backend.start_renew(
                renewals(lease), process=current().id, deadline=backend.call_deadline()
            )
            for lease in leases[:3]
        ]
        assert [one.result()[0].outcome for one in pending] == ["renewed"] * 3
        for lease in leases[3:]:
            assert renew(backend, lease) == ["renewed"]
        for lease in leases:
            assert release(backend, lease) == "released"
        # No connection got READONLY twice.
        repeated = proxy.count("EVALSHA") - before - 2 * len(leases)
        assert 1 <= repeated <= opened
        backend.close()


def test_a_wait_of_less_than_a_millisecond_ends(own_redis):
    backend = backend_for(own_redis.url)
    grant(backend, request())
    attempt = request(waits=True)
    met = refuse(backend, attempt)
    # For a server, a timeout of 0 means forever.
    for _ in range(20):
        wait(backend, attempt, met, 0.0004)


def test_g5_an_acquire_without_a_reply_has_an_unknown_outcome_and_can_be_repeated(proxy, own_redis):
    backend = backend_for(proxy.url, command_timeout=2.0)
    warm(backend)
    attempt = request()
    proxy.drop_replies(how="swallow")
    with pytest.raises(BackendUnavailable) as unknown:
        grant(backend, attempt)
    assert (unknown.value.name, unknown.value.alias) == ("name", "redis")
    assert unknown.value.__cause__ is not None
    granted = backend_for(own_redis.url).get("name")
    assert granted.owner == attempt.owner
    assert grant(backend, attempt).token == granted.token


def test_g5_an_acquire_without_a_reply_can_be_cancelled(proxy, own_redis):
    backend = backend_for(proxy.url, command_timeout=2.0)
    warm(backend)
    attempt = request()
    proxy.drop_replies(how="swallow")
    with pytest.raises(BackendUnavailable):
        grant(backend, attempt)
    backend.cancel_acquire(attempt, deadline=backend.call_deadline())
    grant(backend, request())


@pytest.mark.parametrize("how", ["close", "swallow"])
def test_g5_a_release_whose_reply_was_lost_is_a_success(proxy, how):
    backend = backend_for(proxy.url, command_timeout=2.0)
    warm(backend)
    lease = grant(backend, request())
    proxy.drop_replies(how=how)
    if how == "swallow":
        with pytest.raises(BackendUnavailable):
            release(backend, lease)
    assert release(backend, lease) == "released"
    assert proxy.replies_dropped == 1


def test_g10_a_break_ends_with_its_deadline(own_redis):
    backend = backend_for(own_redis.url, command_timeout=60.0)
    lease = grant(backend, request())
    own_redis.pause()
    try:
        began = clock.now()
        with pytest.raises(BackendUnavailable):
            backend.break_silently("name", owner=lease.owner, deadline=began + 0.1)
        assert clock.now() - began < 30.0
    finally:
        own_redis.resume()


def test_g5_a_release_and_everybody_else_see_a_lease_end_at_the_same_moment(own_redis):
    backend = backend_for(own_redis.url, command_timeout=20.0)
    # So long that the script takes its time between its look at the clock and its writes.
    grant(backend, request(metadata=" " * 50_000_000))
    forgets_at = """
        local time, left = redis.call('TIME'), redis.call('PTTL', KEYS[1])
        return time[1] * 1000 + math.floor(time[2] / 1000) + left
    """
    with redis.Redis.from_url(own_redis.url) as server:
        (key,) = server.keys("*:l:name")
        # The server may pause between the two commands, which makes the sum too small.
        forgets = max(server.eval(forgets_at, 1, key) for _ in range(50))
        assert abs(forgets - int(server.hget(key, "until")) - MEMORY_MS) <= 2


def many_turns(backend):
    """Take turns until the server no longer remembers the end of an earlier lease."""
    for _ in range(40):
        release(backend, grant(backend, request()))


@pytest.mark.parametrize("end", ["released", "broken"])
def test_g5_a_release_repeated_after_many_other_leases_is_no_loss(proxy, own_redis, end):
    backend, others = backend_for(proxy.url, command_timeout=2.0), backend_for(own_redis.url)
    warm(backend)
    lease = grant(backend, request())
    if end == "broken":
        assert others.break_silently("name", owner=lease.owner)
        many_turns(others)
    proxy.drop_replies(how="swallow")
    with pytest.raises(BackendUnavailable):
        release(backend, lease)
    many_turns(others)
    assert release(backend, lease) == ("broken" if end == "broken" else "unknown")


def test_g5_a_first_release_of_a_lease_that_left_no_trace_is_refused(own_redis):
    backend = backend_for(own_redis.url)
    many_turns(backend)
    lost = Lease("name", "lost with the primary", 1, 30.0, clock.now())
    assert release(backend, lost) == "refused"
    assert backend.release_many(
        [ReleaseRequest(lost.name, lost.owner, 0.0)], deadline=backend.call_deadline()
    ) == ["refused"]


def test_g4_the_holder_is_known_though_its_first_acquire_was_lost(proxy, own_redis):
    backend = backend_for(proxy.url)
    proxy.drop_replies(how="refuse")
    grant(backend, request())
    with client(own_redis) as asking:
        assert str(os.getpid()) in asking.get(f"{{dlock:0}}:2:p:{current().id}")


def test_a_refused_acquire_leaves_no_mark_of_a_copy(proxy, own_redis):
    backend = backend_for(proxy.url)
    warm(backend)
    attempt = request()
    proxy.reply(b"-NOPERM this user has no permissions\r\n")
    with pytest.raises(BackendRefused):
        grant(backend, attempt)
    grant(backend, attempt)
    with client(own_redis) as asking:
        assert not asking.keys(f"*{attempt.owner}")


def test_g5_a_late_copy_of_a_repeated_acquire_grants_nothing_after_many_other_leases(
    proxy, own_redis
):
    backend, others = backend_for(proxy.url, command_timeout=2.0), backend_for(own_redis.url)
    warm(backend)
    attempt = request()
    proxy.drop_replies(how="swallow")
    with pytest.raises(BackendUnavailable):
        grant(backend, attempt)
    release(backend, grant(backend, attempt))
    many_turns(others)
    assert refuse(others, attempt).owner == ""
    assert not others.locked("name", deadline=others.call_deadline())


def test_g5_a_late_copy_of_a_repeated_acquire_grants_nothing_after_a_hand_over(proxy, own_redis):
    backend, others = backend_for(proxy.url, command_timeout=2.0), backend_for(own_redis.url)
    warm(backend)
    first, attempt = grant(others, request()), request(waits=True, renewed=True)
    proxy.drop_replies(how="swallow")
    with pytest.raises(BackendUnavailable):
        refuse(backend, attempt)
    met = refuse(backend, attempt)
    # The first wait only subscribes, so that the waiter is known to listen.
    assert wait(backend, attempt, met, 20.0) is None
    met = refuse(backend, attempt)
    release(others, first)
    assert wait(backend, attempt, met, 20.0) is None
    release(backend, grant(backend, attempt))
    many_turns(others)
    assert refuse(others, attempt).owner == ""
    assert not others.locked("name", deadline=others.call_deadline())


@pytest.mark.parametrize("waiting", [False, True])
def test_g5_a_break_whose_reply_was_cut_off_is_a_success(proxy, own_redis, waiting):
    backend = backend_for(proxy.url)
    warm(backend)
    attempt = request()
    # So that the script is known.
    assert not backend.break_silently("name", owner=attempt.owner)
    lease = grant(backend, attempt)
    if waiting:
        backend.acquire(request(waits=True), deadline=backend.call_deadline())
    proxy.drop_replies(how="close")
    assert backend.break_silently("name", owner=lease.owner)
    assert proxy.replies_dropped == 1
    # Another one is told that there is nothing to break any more.
    assert not backend.break_silently("name", owner=lease.owner)


@pytest.mark.parametrize("how", ["close", "swallow"])
def test_g5_a_renewal_whose_reply_was_lost_is_repeated(proxy, how):
    backend = backend_for(proxy.url, command_timeout=2.0)
    warm(backend)
    lease = grant(backend, request())
    proxy.drop_replies(how=how)
    if how == "swallow":
        with pytest.raises(BackendUnavailable):
            renew(backend, lease)
    assert renew(backend, lease) == ["renewed"]
    assert proxy.replies_dropped == 1


def test_a_renewal_sent_ahead_whose_reply_was_cut_off_is_repeated(proxy):
    backend = backend_for(proxy.url)
    warm(backend)
    lease = grant(backend, request())
    proxy.drop_replies()
    pending = backend.start_renew(
        renewals(lease), process=current().id, deadline=backend.call_deadline()
    )
    assert pending.wait(20.0)
    assert pending.result() == [("renewed", lease.ttl)]
    assert proxy.replies_dropped == 1


def test_g6_a_renewal_sent_ahead_that_breaks_and_then_hangs_blocks_no_other_call(proxy):
    backend = backend_for(proxy.url, command_timeout=3.0)
    warm(backend)
    lease = grant(backend, request())
    proxy.drop_replies(how="swallow")
    pending = backend.start_renew(
        renewals(lease), process=current().id, deadline=backend.call_deadline()
    )
    proxy.wait_until(lambda p: p.replies_dropped == 1)
    proxy.black_hole()
    proxy.cut()
    # The break is noticed at once; another thread repeats the call, and that hangs.
    assert not pending.wait(0.2)
    assert not pending.wait(0.2)
    with pytest.raises(BackendUnavailable):
        pending.result()


def test_a_late_reply_never_answers_the_next_command(proxy):
    backend = backend_for(proxy.url, command_timeout=10.0)
    warm(backend)
    lease = grant(backend, request())
    # Longer than this process may be suspended, so that no reply has arrived when it reads.
    proxy.delay = 3.0
    # The caller's patience is much shorter than the socket's timeout.
    with pytest.raises(BackendUnavailable):
        backend.locked("name", deadline=clock.now() + 0.1)
    proxy.delay = 0.0
    assert release(backend, lease) == "released"
    assert backend.get("name") is None


def test_g2_the_deadline_after_a_slow_reply_counts_from_the_request(proxy):
    backend = backend_for(proxy.url, command_timeout=10.0)
    warm(backend)
    proxy.delay = 1.0
    lease = grant(backend, request(ttl=10.0))
    # However late this process goes on, the request was sent at least a second ago.
    assert lease.deadline <= clock.now() - 1.0 + 9.9 + 0.1


def test_the_reply_lost_to_an_interrupt_never_answers_the_next_command(proxy, own_redis):
    backend = backend_for(proxy.url, command_timeout=10.0)
    warm(backend)
    lease = grant(backend, request())
    own_redis.pause()
    main, seen = threading.main_thread().ident, proxy.count()

    def interrupt() -> None:
        # Not before the call has begun, or another line would be interrupted.
        proxy.wait_until(lambda proxy: proxy.count() > seen)
        signal.pthread_kill(main, signal.SIGINT)

    # A shell makes its background processes ignore this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupting.start()
            backend.get("name")
    finally:
        signal.signal(signal.SIGINT, before)
        own_redis.resume()
    interrupting.join()
    assert release(backend, lease) == "released"


# -- bounded calls ---------------------------------------------------------------------


def assert_bounded(backend, *, fresh=False):
    if fresh:
        backend.close()
    for call in (
        lambda: grant(backend, request("unanswered")),
        lambda: backend.release("name", "o", min_hold=0.0, deadline=backend.call_deadline()),
        lambda: backend.cancel_acquire(request(), deadline=backend.call_deadline()),
        lambda: backend.get("name"),
    ):
        before = clock.now()
        with pytest.raises(BackendUnavailable):
            call()
        assert clock.now() - before < backend.command_timeout + TOLERANCE


@pytest.mark.parametrize("fresh", [False, True])
def test_g10_calls_end_in_time_while_the_server_is_paused(own_redis, fresh):
    backend = backend_for(own_redis.url, command_timeout=1.0)
    warm(backend)
    own_redis.pause()
    try:
        assert_bounded(backend, fresh=fresh)
    finally:
        own_redis.resume()
    warm(backend)


@pytest.mark.parametrize("fresh", [False, True])
def test_g10_calls_end_in_time_behind_a_black_hole(proxy, fresh):
    backend = backend_for(proxy.url, command_timeout=1.0)
    warm(backend)
    proxy.black_hole()
    assert_bounded(backend, fresh=fresh)
    proxy.heal()
    warm(backend)


@pytest.mark.parametrize("fresh", [False, True])
def test_g10_calls_end_in_time_while_the_server_is_down(own_redis, fresh):
    backend = backend_for(own_redis.url, command_timeout=1.0)
    warm(backend)
    own_redis.kill()
    assert_bounded(backend, fresh=fresh)
    own_redis.restart()
    warm(backend)


def test_g10_an_address_that_does_not_resolve_in_time_does_not_pile_up_threads(monkeypatch):
    # We cannot make a name server hang; for us, a resolver that waits has the same effect.
    answers, resolve, hanging = threading.Event(), socket.getaddrinfo, []

    def hang(host, *args, **kwargs):
        if host != "nowhere.invalid":
            return resolve(host, *args, **kwargs)
        hanging.append(threading.current_thread().name)
        answers.wait()
        raise OSError("no such host")

    monkeypatch.setattr("socket.getaddrinfo", hang)
    backend = backend_for("redis://nowhere.invalid:6379/0", command_timeout=0.1)
    try:
        assert_bounded(backend)
        # Its thread may start late on a busy machine.
        until(lambda: bool(hanging))
        assert hanging == ["dlock-connect"]
    finally:
        answers.set()


def test_g10_a_wait_ends_in_time_while_the_server_is_paused(own_redis):
    backend = backend_for(own_redis.url, command_timeout=1.0)
    warm(backend)
    attempt, deadline = request(waits=True), clock.now() + 20
    assert isinstance(backend.acquire(request(), deadline=deadline), Lease)
    met = backend.acquire(attempt, deadline=deadline)
    assert isinstance(met, Contention)
    own_redis.pause()
    try:
        before = clock.now()
        with pytest.raises(BackendUnavailable):
            wait(backend, attempt, met, 0.5)
        assert clock.now() - before < 0.5 + backend.command_timeout + TOLERANCE
    finally:
        own_redis.resume()


def test_g10_many_callers_reconnect_after_a_restart_of_the_server(own_redis):
    backend = backend_for(own_redis.url)
    leases = [grant(backend, request(f"n{number}")) for number in range(4)]
    own_redis.restart()
    # All pooled connections are broken now; each call notices that on its own connection.
    assert [renew(backend, lease) for lease in leases] == [["refused"]] * 4


# -- late attempts ---------------------------------------------------------------------


def test_g5_an_attempt_that_a_paused_server_reads_after_its_cancellation_is_not_granted(own_redis):
    # acquire ──► paused server's socket          undo ──► another socket
    #             the server wakes up and reads the two in any order
    backend = backend_for(own_redis.url, command_timeout=2.0)
    warm(backend)
    attempt = request()
    own_redis.pause()
    for call in (backend.acquire, backend.cancel_acquire):
        with pytest.raises(BackendUnavailable):
            call(attempt, deadline=backend.call_deadline())
    own_redis.resume()
    backend.cancel_acquire(attempt, deadline=backend.call_deadline())
    assert not backend.locked("name", deadline=backend.call_deadline())
    assert isinstance(backend.acquire(attempt, deadline=backend.call_deadline()), Contention)
    grant(backend, request())


# -- a server that forgets -------------------------------------------------------------


def test_scripts_survive_script_flush(own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    client(own_redis).script_flush()
    assert renew(backend, lease) == ["renewed"]
    client(own_redis).script_flush()
    pending = backend.start_renew(
        renewals(lease), process=current().id, deadline=backend.call_deadline()
    )
    assert pending.result() == [("renewed", lease.ttl)]
    client(own_redis).script_flush()
    assert release(backend, lease) == "released"


@pytest.mark.parametrize("loss", ["flush", "restart"])
def test_g2_the_next_renewal_reports_data_loss(own_redis, loss):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    client(own_redis).flushall() if loss == "flush" else own_redis.restart()
    assert renew(backend, lease) == ["refused"]
    assert release(backend, lease) == "refused"


@pytest.mark.parametrize("loss", ["flush", "restart"])
def test_g3_tokens_rise_through_data_loss(own_redis, loss):
    backend = backend_for(own_redis.url)
    before = [grant(backend, request(f"n{number}")).token for number in range(200)]
    client(own_redis).flushall() if loss == "flush" else own_redis.restart()
    assert grant(backend, request("n0")).token > max(before)


def test_g3_tokens_rise_while_the_clock_of_the_server_is_behind(own_redis):
    # As after the clock was set back by an hour: the highest token of the bucket is in the future.
    backend = backend_for(own_redis.url)
    first = grant(backend, request())
    ahead = first.token + 3_600_000_000
    client(own_redis).set("{dlock:0}:2:clock", ahead)
    assert grant(backend, request("other")).token == ahead + 1
    release(backend, first)
    assert grant(backend, request()).token == ahead + 2


def test_g4_a_renewal_corrects_an_end_that_a_clock_step_made_too_late(own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    direct = client(own_redis)
    late = int(direct.hget("{dlock:0}:2:l:name", "until")) + 3_600_000
    direct.hset("{dlock:0}:2:l:name", "until", late)
    assert renew(backend, lease) == ["renewed"]
    assert backend.get("name").ttl <= 30.1


def test_g3_the_token_of_a_name_rises_although_the_highest_token_is_lost(own_redis):
    backend = backend_for(own_redis.url)
    first = grant(backend, request())
    ahead = first.token + 3_600_000_000
    client(own_redis).hset("{dlock:0}:2:l:name", "token", ahead)
    client(own_redis).delete("{dlock:0}:2:clock")
    release(backend, first)
    assert grant(backend, request()).token == ahead + 1


def test_a_refusal_by_the_server_is_not_contention(own_redis):
    backend = backend_for(own_redis.url)
    client(own_redis).set("{dlock:0}:2:l:name", "a stranger's")
    with pytest.raises(BackendUnavailable, match="WRONGTYPE"):
        grant(backend, request())


def test_g1_a_full_server_grants_nothing_and_renews_what_is_held(own_redis):
    backend = backend_for(own_redis.url)
    warm(backend)
    lease, cooling, undone = (grant(backend, request(name)) for name in ("a", "b", "c"))
    client(own_redis).config_set("maxmemory", "1")
    with pytest.raises(BackendUnavailable, match="memory"):
        grant(backend, request("other"))
    assert renew(backend, lease, cooling) == ["renewed", "renewed"]
    assert release(backend, lease) == "released"
    deadline = backend.call_deadline()
    assert backend.release("b", cooling.owner, min_hold=60.0, deadline=deadline) == "released"
    backend.cancel_acquire(request("c"), deadline=deadline)
    assert renew(backend, undone) == ["renewed"]


def test_a_read_only_server_is_unavailable(own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    with client(own_redis) as admin:
        admin.replicaof("127.0.0.1", "1")
        with pytest.raises(BackendUnavailable) as unavailable:
            backend.renew(renewals(lease), process=current().id, deadline=clock.now() + 1)
        # It tries other connections until its time is over, and may end a little late.
        assert not isinstance(unavailable.value, BackendRefused)
        admin.replicaof("NO", "ONE")
    assert renew(backend, lease) == ["renewed"]


def test_g8_a_child_does_not_use_the_pooled_connections_of_its_parent(own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    waiting = request(waits=True, renewed=True)
    # The first wait makes the process subscribe.
    wait(backend, waiting, refuse(backend, waiting), 30.0)
    met = refuse(backend, waiting)
    handed: list[Lease | None] = []
    waiter = threading.Thread(
        target=lambda: handed.append(wait(backend, waiting, met, 30.0)), daemon=True
    )
    waiter.start()
    stats = client(own_redis)
    renew(backend, lease)  # This leaves an idle connection, which the child must not use.
    before = stats.info("stats")["total_connections_received"]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            backend.after_fork()
            grant(backend, request("child"))
            backend.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert stats.info("stats")["total_connections_received"] == before + 1
    assert waiter.is_alive()
    assert release(backend, lease) == "released"
    waiter.join(10)
    # Through the connection on which it listened before the fork.
    assert [lease.owner for lease in handed] == [waiting.owner]
    assert backend.get("child") is not None
