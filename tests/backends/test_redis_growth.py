"""How the work of each operation grows, in commands that the server runs.

``docs/reference/cost.md`` says the same in a table. What one command costs among many names is
for Redis' own pages to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from django_dlock.backends.redis import RedisBackend
from django_dlock.lease import LeaseQuery
from django_dlock.process import current
from testproject.servers import RedisServer

from .tools import backend_for, calls, client, grant, refuse, release, renew, request

FEW, MANY = 10, 1500
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
        "undo": lambda: backend.undo(undone, deadline=deadline()),
        "locked": lambda: backend.locked("a", deadline=deadline()),
        "get": lambda: backend.get("a"),
        "break": lambda: backend.break_("c", owner=holder["c"].owner),
        "last_end": lambda: backend.last_end("c"),
        "goodbye": lambda: backend.goodbye("somebody", deadline=deadline()),
    }


def test_the_work_on_one_lock_does_not_grow_with_the_others(backend, own_redis):
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
    assert max(sum(done.values()) for done in many.values()) <= 10


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


def test_a_held_lock_is_one_key_of_a_kilobyte(backend, own_redis):
    hold(backend, MANY)
    renew(backend)
    with client(own_redis) as asking:
        # And the index, the heartbeats and the highest token, whatever their number.
        assert asking.dbsize() == MANY + 3
        lock = asking.memory_usage("{dlock:0}:l:held:7", samples=0)
        index = asking.memory_usage("{dlock:0}:index", samples=0) / MANY
    assert lock + index < 1536


def test_what_is_over_leaves_one_key_that_ends_by_itself(backend, own_redis):
    release(backend, grant(backend, request()))
    with client(own_redis) as asking:
        assert set(asking.keys()) - {"{dlock:0}:clock"} == {"{dlock:0}:l:name"}
        assert 0 < asking.pttl("{dlock:0}:l:name") <= 90_000


def test_processes_that_are_gone_leave_no_heartbeat_behind(backend, own_redis):
    with client(own_redis) as stranger:
        day = 86_400
        now = stranger.time()[0]
        old = {f"gone{number}": (now - day - 60) * 1000 for number in range(100)}
        stranger.zadd("{dlock:0}:beats", old)
        renew(backend)
        assert stranger.zrange("{dlock:0}:beats", 0, -1) == [current().id]


def test_a_waiter_is_one_key_and_a_place_in_line(backend, own_redis):
    lease = grant(backend, request())
    with client(own_redis) as asking:
        before = asking.dbsize()
        for _ in range(200):
            refuse(backend, request(lease.name, waits=True))
        waiting = backend.get(lease.name).waiting
        assert asking.dbsize() - before == waiting + 1 == 201
        theirs = list(asking.scan_iter("{dlock:0}:[qw]:*"))
        assert len(theirs) == 201
        assert all(asking.pttl(key) > 0 for key in theirs)
        assert sum(asking.memory_usage(key, samples=0) for key in theirs) / 200 < 1024
