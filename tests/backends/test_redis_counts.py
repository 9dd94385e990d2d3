"""The cost of an operation, as counts at the server and on the wire; no time is measured."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
import redis

from django_dlock import clock
from django_dlock.backends import holder_state
from django_dlock.lease import SORT_KEYS, LeaseQuery, ReleaseRequest
from django_dlock.process import current
from testproject.servers import RedisServer
from tests.support.redis_calls import (
    backend_for,
    calls,
    client,
    grant,
    refuse,
    release,
    renew,
    renewals,
    request,
    wait,
)

SCRIPTS = ("EVALSHA", "EVAL")


@pytest.fixture
def backend(proxy):
    backend = backend_for(proxy.url)
    lease = grant(backend, request("warm"))
    renew(backend, lease)
    release(backend, lease)
    return backend


def test_an_uncontended_acquire_and_release_take_two_commands(backend, proxy, own_redis):
    before, seen = calls(own_redis), proxy.count()
    release(backend, grant(backend, request()))
    after = calls(own_redis)
    assert after["evalsha"] - before["evalsha"] == 2
    assert proxy.commands[seen:] == ["EVALSHA", "EVALSHA"]


def made(before, after):
    """The calls between two counts, by command, without those of the counting itself."""
    calls_made = {name: after[name] - before.get(name, 0) for name in after}
    of_the_question = ("info", "hello", "client", "select")
    # Before Redis 7, a subcommand is counted under the name of its command.
    return {
        name.partition("|")[0]: count
        for name, count in calls_made.items()
        if count and not name.startswith(of_the_question)
    }


def test_commands_that_an_uncontended_acquire_and_release_run_at_the_server(backend, own_redis):
    before = calls(own_redis)
    release(backend, grant(backend, request()))
    after = calls(own_redis)
    assert made(before, after) == {
        "evalsha": 2,
        "time": 1,
        "pttl": 1,
        "hmget": 2,
        "exists": 1,
        "zrange": 1,
        "set": 1,
        "hset": 2,
        "pexpireat": 1,
        "zadd": 1,
        "zrem": 1,
    }


def test_a_hand_over_runs_eleven_commands_at_the_server(own_redis):
    backend = listening(backend_for(own_redis.url))
    lease, attempt = grant(backend, request()), request(waits=True, renewed=True)
    met = refuse(backend, attempt)
    before = calls(own_redis)
    release(backend, lease)
    assert wait(backend, attempt, met, 20.0) is not None
    assert made(before, calls(own_redis)) == {
        "evalsha": 1,
        "hmget": 1,
        "time": 1,
        "zrange": 1,
        "pubsub": 1,
        "zrem": 1,
        "set": 1,
        "publish": 1,
        "hset": 1,
        "pexpireat": 1,
        "zadd": 1,
    }


@pytest.mark.parametrize("ttl", [0.5, 30.0, 100.0])
@pytest.mark.parametrize("renewed_for", [None, 0.5, 200.0])
def test_a_released_name_is_remembered_for_its_ttl_and_a_minute(ttl, renewed_for, own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request(ttl=ttl))
    if renewed_for is not None:
        assert renew(backend, lease._replace(ttl=renewed_for)) == ["renewed"]
    assert release(backend, lease) == "released"
    with client(own_redis) as asking:
        assert asking.pttl("{dlock:0}:2:l:name") > max(ttl - 5, 60) * 1000
    assert release(backend, lease) == "released"


def test_a_listing_checks_each_process_once(backend, monkeypatch):
    for number in range(5):
        grant(backend, request(f"n{number}"))
    looked = []
    monkeypatch.setattr(holder_state, "death_proof", lambda *_, **__: looked.append(1))
    assert len(backend.list()) == 5
    assert len(looked) == 1
    # The next listing checks again, because the process may have died.
    backend.list()
    assert len(looked) == 2


def test_500_leases_are_renewed_in_one_round_trip(backend, proxy):
    leases = [grant(backend, request(f"n{number}")) for number in range(500)]
    seen = proxy.count()
    assert renew(backend, *leases) == ["renewed"] * 500
    assert proxy.count() - seen == 1


def test_500_leases_are_released_in_one_round_trip(backend, proxy, own_redis):
    leases = [grant(backend, request(f"n{number}")) for number in range(500)]
    # The server need not know these leases.
    with client(own_redis) as asking:
        asking.script_flush()
    releases = [ReleaseRequest(lease.name, lease.owner) for lease in leases]
    seen, outcomes = proxy.count(), list[str]()
    own_redis.pause()
    try:
        thread = threading.Thread(
            target=lambda: outcomes.extend(
                backend.release_many(releases, deadline=clock.now() + 60)
            )
        )
        thread.start()
        # All are sent before any is answered.
        proxy.wait_until(lambda proxy: proxy.count() == seen + 500)
    finally:
        own_redis.resume()
    thread.join(30)
    assert outcomes == ["released"] * 500
    assert backend.count() == 0


@pytest.mark.parametrize("leases", [1, 500])
def test_a_renewal_sent_ahead_takes_one_command(backend, proxy, leases):
    held = [grant(backend, request(f"n{number}")) for number in range(leases)]
    seen = proxy.count()
    ours, deadline = current().id, backend.call_deadline()
    pending = backend.start_renew(renewals(*held), process=ours, deadline=deadline)
    assert [r.outcome for r in pending.result()] == ["renewed"] * leases
    assert proxy.count() - seen == 1


def test_a_waiter_sends_nothing_while_it_waits(backend, proxy, own_redis):
    grant(backend_for(own_redis.url), request())
    attempt = request(waits=True)
    met = refuse(backend, attempt)
    # The first wait of a process subscribes, and then its caller asks again.
    wait(backend, attempt, met, 20.0)
    met = refuse(backend, attempt)
    seen = proxy.count()
    assert wait(backend, attempt, met, 1.5) is None
    assert proxy.count() == seen
    refuse(backend, attempt)
    assert proxy.count() - seen == 1


def listening(backend):
    """Make the process subscribe."""
    holder = grant(backend, request("before"))
    attempt = request("before", waits=True)
    wait(backend, attempt, refuse(backend, attempt), 20.0)
    backend.cancel_acquire(attempt, deadline=backend.call_deadline())
    release(backend, holder)
    return backend


def test_a_release_hands_the_lease_to_the_first_waiter(backend, own_redis, proxy):
    holder = backend_for(own_redis.url)
    lease = grant(holder, request())
    listening(backend)
    attempts = [request(waits=True, renewed=True) for _ in range(4)]
    mets = [refuse(backend, attempt) for attempt in attempts]
    # A waiter that asks again keeps its position.
    mets[0] = refuse(backend, attempts[0])
    seen, tokens = proxy.count(), [lease.token]
    for attempt, met in zip(attempts, mets, strict=True):
        assert release(holder, lease) == "released"
        # It sends nothing before it releases.
        lease = wait(backend, attempt, met, 30.0)
        assert lease.owner == attempt.owner
        tokens.append(lease.token)
        assert holder.get("name").owner == attempt.owner
    assert proxy.count() == seen
    assert tokens == sorted(set(tokens))


def three_waiters_die(server: RedisServer) -> None:
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            doomed = listening(backend_for(server.url))
            for _ in range(3):
                refuse(doomed, request(waits=True))
            os.write(told, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_dead_waiter_does_not_delay_living_waiters(own_redis):
    lease = grant(backend_for(own_redis.url), request())
    three_waiters_die(own_redis)
    living = listening(backend_for(own_redis.url))
    attempt = request(waits=True, renewed=True)
    met = refuse(living, attempt)
    with client(own_redis) as asking:
        while len(asking.pubsub_channels()) > 1:
            pass
    assert living.get("name").waiting == 4
    release(living, lease)
    assert wait(living, attempt, met, 30.0).owner == attempt.owner
    assert living.get("name").waiting == 0


def test_listings_never_scan_the_key_space(own_redis):
    backend = backend_for(own_redis.url)
    for number in range(30):
        grant(backend, request(f"n{number}"))
    backend.list(prefix="n", contains="1")
    backend.count(contains="2")
    assert not {"scan", "keys"} & set(calls(own_redis))


def test_a_page_reads_no_more_locks_than_it_shows(own_redis):
    backend = backend_for(own_redis.url)
    for number in range(1500):
        grant(backend, request(f"n{number}", ttl=600.0))
    before = calls(own_redis)
    page = backend.list(limit=20)
    assert [info.name for info in page] == [f"n{number}" for number in range(20)]
    assert calls(own_redis)["hmget"] - before["hmget"] == 20
    newest = backend.list(sort=["age"], offset=1000, limit=2)
    assert [info.name for info in newest] == ["n499", "n498"]
    assert len(backend.list()) == 1500
    assert backend.count() == backend.count(prefix="n") == 1500
    assert [info.name for info in backend.list(contains="149", offset=2, limit=3)] == [
        "n1490",
        "n1491",
        "n1492",
    ]


def test_stale_names_leave_the_index_by_the_heartbeats(own_redis):
    backend = backend_for(own_redis.url)
    with client(own_redis) as stranger:
        stranger.zadd("{dlock:0}:2:i", {f"stale{number}": number for number in range(30)})
        while stranger.zcard("{dlock:0}:2:i"):
            renew(backend)


def test_all_keys_but_two_of_the_alias_end_by_themselves(own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    refuse(backend, request(waits=True))
    renew(backend, lease)
    release(backend, lease)
    backend.cancel_acquire(request(), deadline=backend.call_deadline())
    with client(own_redis) as asking:
        lasting = {key for key in asking.scan_iter() if asking.pttl(key) == -1}
    assert lasting <= {"{dlock:0}:2:i", "{dlock:0}:2:clock"}


def test_a_key_without_an_end_is_listed_and_can_be_broken(own_redis):
    backend = backend_for(own_redis.url)
    owners = {name: grant(backend, request(name)).owner for name in ("a", "b")}
    with client(own_redis) as stranger:
        stranger.persist("{dlock:0}:2:l:a")
        stranger.hdel("{dlock:0}:2:l:b", "until")
    assert [(info.name, info.ttl) for info in backend.list()] == [("a", None), ("b", None)]
    lasting = grant(backend, request("c", ttl=60.0))
    with client(own_redis) as stranger:
        stranger.hset("{dlock:0}:2:l:a", "until", "1")
    by_ttl = backend.list(sort=["ttl"])
    assert [(info.name, info.ttl is None) for info in by_ttl] == [
        ("c", False),
        ("a", True),
        ("b", True),
    ]
    release(backend, lasting)
    met = refuse(backend, request("b"))
    assert met.remaining > 0
    for name, owner in owners.items():
        assert backend.break_silently(name, owner=owner)
    assert backend.list() == []
    with client(own_redis) as asking:
        assert asking.pttl("{dlock:0}:2:l:a") > 0


def test_a_silent_process_is_distinguished_from_a_living_one(own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    key = "{dlock:0}:2:l:name"
    with client(own_redis) as stranger:
        # A heartbeat 20 s old by the server's clock.
        for field in ("at", "until"):
            stranger.hincrby(key, field, -20_000)
        me = f"{{dlock:0}}:2:p:{current().id}"
        stranger.set(me, f"{(stranger.time()[0] - 20) * 1000} {json.dumps(current().as_dict())}")
        assert backend.get("name").holder_state == "silent"
        assert backend.get("name").silent_for >= 20
        # The clock was set back after the grant: the filter and the display must agree.
        stranger.hincrby(key, "at", 60_000)
        (shown,) = backend.list(holder_state="silent")
        assert shown.holder_state == "silent"
        renew(backend)
        assert backend.get("name").holder_state == "alive"
    assert release(backend, lease) == "released"


def test_two_prefixes_are_two_name_spaces(redis_server: RedisServer):
    one, two = (backend_for(redis_server.url, key_prefix=prefix) for prefix in ("p1", "p2"))
    first, second = grant(one, request()), grant(two, request())
    assert one.count() == two.count() == 1
    assert (release(one, first), release(two, second)) == ("released", "released")


def hashes_read(server: RedisServer, question) -> int:
    """The number of lock hashes that the server read to answer the query."""
    before = calls(server)
    question()
    return calls(server)["hmget"] - before.get("hmget", 0)


@pytest.fixture
def many(backend, own_redis):
    """1500 locks, more than one call reads; every third is parked."""
    for number in range(1500):
        kind = "parked" if number % 3 == 0 else "held"
        # None may end before the last one is there, and read.
        grant(backend, request(f"n{number * 7 % 1500:04}", ttl=600.0, kind=kind))
    # Load the scripts at the server.
    assert backend.list(sort=["name"], limit=1)
    return backend


@pytest.mark.parametrize("sort", [["-age"], ["age"]])
def test_the_first_page_costs_no_more_among_more_locks(backend, own_redis, proxy, sort):
    """Among 6000 locks it runs as many commands, and sends as many requests, as among 1500."""
    costs, held = [], 0
    for size in (100, 1500, 6000):
        for number in range(held, size):
            grant(backend, request(f"n{number:06}", ttl=600.0))
        held = size
        backend.page(LeaseQuery(sort=sort), limit=50)
        before, seen = calls(own_redis), proxy.count()
        page = backend.page(LeaseQuery(sort=sort), limit=50)
        assert (len(page.infos), page.total) == (50, size)
        costs.append((sum(made(before, calls(own_redis)).values()), proxy.count() - seen))
    few, many, more = costs
    assert more == many
    assert many[0] <= 20 * few[0]


@pytest.mark.parametrize("sort", [["name"], ["-ttl"], ["holder_state", "-waiting"], ["kind"]])
def test_another_order_reads_each_lock_once_and_the_shown_ones_again(many, own_redis, proxy, sort):
    seen = proxy.count()
    page = LeaseQuery(sort=sort)
    assert hashes_read(own_redis, lambda: many.page(page, offset=700, limit=20)) == 1520
    # Two calls for each thousand names, one for the page, and one for the processes.
    assert proxy.count() - seen == 6


def test_a_page_by_name_is_a_part_of_all_names(many):
    page = many.page(LeaseQuery(sort=["-name"]), offset=1200, limit=3)
    assert [info.name for info in page.infos] == ["n0299", "n0298", "n0297"]
    assert page.total == 1500


def test_a_search_reads_only_the_metadata_of_locks_that_do_not_match(many, own_redis):
    found = []
    before = calls(own_redis).get("hget", 0)
    search = LeaseQuery(contains="149", sort=["name"])
    asked = hashes_read(own_redis, lambda: found.append(many.page(search, limit=3)))
    assert [info.name for info in found[0].infos] == ["n0149", "n1149", "n1490"]
    assert found[0].total == 12
    assert asked == 12 + 3
    assert calls(own_redis)["hget"] - before == 1500 - 12


def test_a_search_among_few_locks_reads_only_the_matching_ones(backend, own_redis):
    for number in range(30):
        grant(backend, request(f"n{number}"))
    backend.list(contains="9", limit=1)
    assert hashes_read(own_redis, lambda: backend.list(contains="9")) == 2 * 3
    # Locks that ended unseen are removed first, so that positions and the total are right.
    assert hashes_read(own_redis, lambda: backend.list(limit=5)) == 30 + 5


def test_a_filter_reads_each_lock_once(many, own_redis, proxy):
    parked = LeaseQuery(kind="parked")
    seen, found = proxy.count(), []
    asked = hashes_read(own_redis, lambda: found.append(many.page(parked, offset=2, limit=2)))
    assert [info.name for info in found[0].infos] == ["n0042", "n0063"]
    assert (asked, found[0].total, proxy.count() - seen) == (1502, 500, 6)
    assert hashes_read(own_redis, lambda: many.count(holder_state="alive")) == 1500


@pytest.mark.parametrize(
    ("query", "limit"),
    [
        (LeaseQuery(), None),
        # Only count the rows: fetching the page would add calls.
        (LeaseQuery(sort=["ttl"]), 0),
        (LeaseQuery(contains="n"), 0),
        (LeaseQuery(holder_state="dead"), 0),
    ],
)
def test_no_call_reads_more_than_a_thousand_names(many, own_redis, query, limit):
    with client(own_redis) as asking:
        asking.config_resetstat()
        assert many.page(query, limit=limit).total in (0, 1500)
        made = calls(own_redis)
        assert 1500 <= made["hmget"] <= 1000 * made["evalsha"]
        assert made["zrange"] + made.get("zrangebyscore", 0) >= 2


@pytest.mark.parametrize(
    "query", [LeaseQuery(), LeaseQuery(sort=["name"]), LeaseQuery(contains="n")]
)
def test_a_lock_that_changes_hands_during_a_listing_is_listed_once(many, own_redis, query):
    moving, listing = backend_for(own_redis.url), many._listing
    ask = listing._ask

    def after_a_move(answer):
        listing._ask = ask
        assert moving.break_silently("n0007", owner=moving.get("n0007").owner)
        moved.append(grant(moving, request("n0007")).owner)
        return answer

    moved = []
    listing._ask = lambda *args: after_a_move(ask(*args))
    infos = many.page(query).infos
    assert [info.owner for info in infos if info.name == "n0007"] == moved
    assert len(infos) == 1500


def test_a_server_that_lost_its_scripts_gets_them_again_on_the_same_connection(many, own_redis):
    with client(own_redis) as asking:
        before = asking.info("stats")["total_connections_received"]
        asking.script_flush()
        assert many.page(LeaseQuery(sort=["name"]), limit=1).total == 1500
        assert asking.info("stats")["total_connections_received"] == before


def test_the_identity_of_a_process_is_sent_once_per_call(many, own_redis):
    with client(own_redis) as asking:
        before = asking.info("stats")["total_net_output_bytes"]
        assert len(many.list()) == 1500
        sent = asking.info("stats")["total_net_output_bytes"] - before
    # A whole row is shorter than the identity alone.
    assert sent / 1500 < len(json.dumps(current().as_dict()))


def test_a_damaged_entry_does_not_hide_others(own_redis):
    backend = backend_for(own_redis.url)
    for name in ("sound", "damaged", "nobody"):
        grant(backend, request(name))
    with client(own_redis) as stranger:
        damage = {"until": "soon", "at": "", "n": "1e", "ttl": "x", "proc": "[", "meta": "{"}
        stranger.hset("{dlock:0}:2:l:damaged", mapping={**damage, "token": "inf", "kind": ""})
        stranger.hdel("{dlock:0}:2:l:nobody", "pid", "proc", "at", "n", "kind", "token", "meta")
    for key in SORT_KEYS:
        infos = {info.name: info for info in backend.list(sort=[key])}
        assert set(infos) == {"sound", "damaged", "nobody"}, key
        assert infos["damaged"].ttl is None
        assert infos["damaged"].holder_state == infos["nobody"].holder_state == "unknown"
        assert infos["sound"].holder_state == "alive"
    assert backend.get("damaged").kind == "held"


def test_a_name_that_is_not_text_is_shown_in_every_order(own_redis):
    backend = backend_for(own_redis.url)
    for name in ("a", "quote\"'\\/", "line\u2028", "ü", "😀"):
        grant(backend, request(name))
    with redis.Redis.from_url(own_redis.url) as stranger:
        for number, name in enumerate((b"b\xff\xfe", b"\x00\n\x1b", b"")):
            fields = stranger.hgetall(b"{dlock:0}:2:l:a")
            stranger.hset(b"{dlock:0}:2:l:" + name, mapping={**fields, b"owner": b"\xff"})
            stranger.zadd("{dlock:0}:2:i", {name: 10 + number})
    shown = {"a", "quote\"'\\/", "line\u2028", "ü", "😀", "b\ufffd\ufffd", "\x00\n\x1b", ""}
    for key in SORT_KEYS:
        assert {info.name for info in backend.list(sort=[key])} == shown
    assert {info.name for info in backend.list()} == shown
    assert [info.name for info in backend.list(contains="ü")] == ["ü"]
