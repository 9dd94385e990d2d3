"""How the work of each operation grows, in commands that the server runs.

``docs/reference/cost.md`` says the same in a table. What one command costs among many names is
for Redis' own pages to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from django_dlock.backends.redis import RedisBackend, commands
from django_dlock.backends.redis.commands import HOUSEKEEPING_EVERY
from django_dlock.lease import LeaseQuery
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
    request,
)

# More than are sampled in one sweep.
FEW, MANY = 30, 1500
NOT_COUNTED = {"client", "eval", "evalsha", "hello", "info"}
"""What calls the others, and what counts them."""


@pytest.fixture
def backend(own_redis):
    return backend_for(own_redis.url)


def work(server: RedisServer, operation: Callable[[], Any]) -> Counter[str]:
    """Which commands the server ran for it, inside of the scripts."""
    before = Counter(calls(server))
    operation()
    after = Counter(calls(server))
    return Counter({name: n for name, n in (after - before).items() if name not in NOT_COUNTED})


def hold(backend: RedisBackend, count: int, base: str = "held") -> None:
    for number in range(count):
        grant(backend, request(f"{base}:{number}", ttl=600))


def operations(backend: RedisBackend) -> dict[str, Callable[[], Any]]:
    """Each on a name of its own, and the first time it is run there."""
    holder = {name: grant(backend, request(name)) for name in ("a", "b", "c", "d", "e")}
    undone, attempt = request("f"), request("g")
    grant(backend, undone)
    deadline = backend.call_deadline
    return {
        "acquire": lambda: grant(backend, attempt),
        "acquire, repeated": lambda: grant(backend, attempt),
        "acquire, held by another": lambda: refuse(backend, request("a")),
        "renew": lambda: renew(backend, holder["a"]),
        "release": lambda: release(backend, holder["b"]),
        "release, repeated": lambda: release(backend, holder["b"]),
        "undo": lambda: backend.cancel_acquire(undone, deadline=deadline()),
        "locked": lambda: backend.locked("a", deadline=deadline()),
        "get": lambda: backend.get("a"),
        "break": lambda: backend.break_("c", owner=holder["c"].owner),
        "deregister": lambda: backend.deregister("somebody", deadline=deadline()),
    }


def test_the_work_on_one_lock_does_not_grow_with_the_others(backend, own_redis, monkeypatch):
    # Its work is bounded, but depends on what it finds.
    monkeypatch.setattr(commands, "HOUSEKEEPING_EVERY", 10**9)
    seen = []
    # The scripts are loaded by the first of them.
    for held in (0, FEW, MANY):
        hold(backend, held, f"one of {held}")
        seen.append({what: work(own_redis, run) for what, run in operations(backend).items()})
        for name in "abcdefg":
            if info := backend.get(name):
                backend.break_(name, owner=info.owner)
    _, few, many = seen
    assert few == many
    assert max(sum(done.values()) for done in many.values()) <= 30


def test_a_renewal_grows_with_what_it_renews_and_nothing_else(backend, own_redis):
    leases = [grant(backend, request(f"mine:{number}")) for number in range(500)]
    renew(backend, *leases)
    one, two, all_ = (
        sum(work(own_redis, lambda count=count: renew(backend, *leases[:count])).values())
        for count in (1, 2, 500)
    )
    assert all_ - two == 498 * (two - one)
    hold(backend, MANY)
    assert sum(work(own_redis, lambda: renew(backend, *leases)).values()) == all_


@pytest.mark.parametrize("query", [LeaseQuery(), LeaseQuery(sort=["age"])])
def test_a_page_by_age_and_the_count_do_not_grow(backend, own_redis, query):
    hold(backend, MANY)
    page = lambda: backend.page(query, offset=100, limit=50)  # noqa: E731
    page()
    fewer = work(own_redis, page)
    hold(backend, 500, "more")
    assert work(own_redis, page) == fewer
    assert fewer["hmget"] == 50
    assert "hmget" not in work(own_redis, backend.count)


def test_waiters_who_are_gone_cost_the_release_a_little_each(backend, own_redis):
    def released_past(waiters: int) -> int:
        lease = grant(backend, request(f"waited for by {waiters}"))
        for _ in range(waiters):
            refuse(backend, request(lease.name, waits=True))
        return sum(work(own_redis, lambda: release(backend, lease)).values())

    released_past(1)
    one, two, many = map(released_past, (1, 2, 50))
    assert many - two == 48 * (two - one)
    assert two - one <= 3


def test_a_held_lock_is_one_key_of_some_400_bytes(backend, own_redis):
    hold(backend, MANY)
    renew(backend)
    with client(own_redis) as asking:
        # And the index, this process and the highest token, which do not depend on the number.
        assert asking.dbsize() == MANY + 3
        lock = asking.memory_usage("{dlock:0}:2:l:held:7", samples=0)
        index = asking.memory_usage("{dlock:0}:2:i", samples=0) / MANY
    assert lock + index < 420


def test_what_is_over_leaves_one_key_that_ends_by_itself(backend, own_redis):
    release(backend, grant(backend, request()))
    with client(own_redis) as asking:
        others = {"{dlock:0}:2:clock", f"{{dlock:0}}:2:p:{current().id}"}
        assert set(asking.keys()) - others == {"{dlock:0}:2:l:name"}
        assert 0 < asking.pttl("{dlock:0}:2:l:name") <= 90_000


def test_a_release_leaves_its_key_for_no_longer_than_a_ttl(backend, own_redis):
    release(backend, grant(backend, request(ttl=3600)))
    with client(own_redis) as asking:
        assert 3_500_000 < asking.pttl("{dlock:0}:2:l:name") <= 3_600_001


def test_processes_that_are_gone_are_forgotten(backend, own_redis):
    renew(backend)
    with client(own_redis) as asking:
        me = f"{{dlock:0}}:2:p:{current().id}"
        assert 86_000_000 < asking.pttl(me) <= 86_400_000
        backend.deregister(current().id, deadline=backend.call_deadline())
        assert 0 < asking.pttl(me) <= 3_600_000


def test_a_waiter_is_an_entry_of_its_names_queue(backend, own_redis):
    lease = grant(backend, request())
    with client(own_redis) as asking:
        before = asking.dbsize()
        for _ in range(200):
            refuse(backend, request(lease.name, waits=True))
        assert backend.get(lease.name).waiting == 200
        assert asking.dbsize() - before == 1
        queue = "{dlock:0}:2:q:name"
        # Until they ask again, when the lease would end, and some time for their asking.
        assert 45_000 < asking.pttl(queue) <= 50_100
        assert asking.memory_usage(queue, samples=0) / 200 < 512


@pytest.mark.parametrize("ending", ["min_hold", "ttl"])
@pytest.mark.parametrize("sweeper", ["acquire", "renew"])
def test_the_index_loses_what_ended_unseen(backend, own_redis, ending, sweeper):
    lasting = grant(backend, request("lasts"))
    for number in range(MANY):
        if ending == "ttl":
            grant(backend, request(f"ends:{number}", ttl=0.1))
        else:
            lease = grant(backend, request(f"ends:{number}"))
            backend.release(lease.name, lease.owner, min_hold=0.1, deadline=backend.call_deadline())
    while backend.locked(f"ends:{MANY - 1}", deadline=backend.call_deadline()):
        pass
    # A heartbeat every five seconds, or a few acquires.
    for _ in range(2 if sweeper == "renew" else 15 * HOUSEKEEPING_EVERY):
        if sweeper == "renew":
            renew(backend)
        else:
            release(backend, grant(backend, request()))
    with client(own_redis) as asking:
        assert asking.zcard("{dlock:0}:2:i") < 20
    assert backend.count() == 1
    assert release(backend, lasting) == "released"
