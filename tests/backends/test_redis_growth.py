"""How the cost of each operation grows, in commands that the server runs.

The table in ``docs/reference/cost.md`` has the same numbers. Redis documents how the cost of one
command grows with the number of entries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
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

# Both are more than one sweep samples.
FEW, MANY = 30, 1500
NOT_COUNTED = {"client", "eval", "evalsha", "hello", "info"}
"""Commands that run other commands, and the one that counts them."""


@pytest.fixture
def backend(own_redis):
    return backend_for(own_redis.url)


def work(server: RedisServer, operation: Callable[[], Any]) -> Counter[str]:
    """The commands that the server ran for it, including those inside scripts."""
    before = Counter(calls(server))
    operation()
    after = Counter(calls(server))
    return Counter({name: n for name, n in (after - before).items() if name not in NOT_COUNTED})


def hold(backend: RedisBackend, count: int, base: str = "held") -> None:
    for number in range(count):
        grant(backend, request(f"{base}:{number}", ttl=600))


def operations(backend: RedisBackend) -> dict[str, Callable[[], Any]]:
    """Calls by title; those that end a lease have a lease of their own for it."""
    holder = {name: grant(backend, request(name)) for name in "abc"}
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
        "break": lambda: backend.break_silently("c", owner=holder["c"].owner),
        "deregister": lambda: backend.deregister("somebody", deadline=deadline()),
    }


def test_the_cost_for_one_lock_does_not_grow_with_the_number_of_locks(
    backend, own_redis, monkeypatch
):
    # The cost of a sweep is limited, but depends on what it finds.
    monkeypatch.setattr(commands, "HOUSEKEEPING_EVERY", 10**9)
    seen = []
    # The first of them loads the scripts.
    for held in (0, FEW, MANY):
        hold(backend, held, f"one of {held}")
        seen.append({what: work(own_redis, run) for what, run in operations(backend).items()})
        for name in "abcfg":
            if info := backend.get(name):
                backend.break_silently(name, owner=info.owner)
    for each in seen:
        # A lock that it checks may have ended since another call chose it.
        del each["deregister"]["zrem"]
    _, few, many = seen
    assert few == many
    assert max(sum(done.values()) for done in many.values()) <= 30


def test_the_cost_of_a_renewal_grows_only_with_the_leases_it_renews(backend, own_redis):
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
def test_the_cost_of_a_page_by_age_and_of_a_count_does_not_grow(backend, own_redis, query):
    hold(backend, MANY)
    page = lambda: backend.page(query, offset=100, limit=50)  # noqa: E731
    page()
    fewer = work(own_redis, page)
    hold(backend, 500, "more")
    assert work(own_redis, page) == fewer
    assert fewer["hmget"] == 50
    assert "hmget" not in work(own_redis, backend.count)


def test_each_dead_waiter_adds_a_little_to_the_cost_of_a_release(backend, own_redis):
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
        # The index, the process and the highest token are extra; they do not depend on the number.
        assert asking.dbsize() == MANY + 3
        lock = asking.memory_usage("{dlock:0}:2:l:held:7", samples=0)
        index = asking.memory_usage("{dlock:0}:2:i", samples=0) / MANY
    assert lock + index < 420


def test_a_finished_lock_leaves_one_key_that_expires(backend, own_redis):
    release(backend, grant(backend, request()))
    with client(own_redis) as asking:
        others = {"{dlock:0}:2:clock", f"{{dlock:0}}:2:p:{current().id}"}
        assert set(asking.keys()) - others == {"{dlock:0}:2:l:name"}
        assert 0 < asking.pttl("{dlock:0}:2:l:name") <= 90_000


def test_after_a_release_the_key_expires_within_one_ttl(backend, own_redis):
    release(backend, grant(backend, request(ttl=3600)))
    with client(own_redis) as asking:
        assert 3_500_000 < asking.pttl("{dlock:0}:2:l:name") <= 3_600_001


def test_dead_processes_are_discarded(backend, own_redis):
    renew(backend)
    with client(own_redis) as asking:
        me = f"{{dlock:0}}:2:p:{current().id}"
        assert 86_000_000 < asking.pttl(me) <= 86_400_000
        backend.deregister(current().id, deadline=backend.call_deadline())
        assert 0 < asking.pttl(me) <= 3_600_000


def test_a_waiter_is_an_entry_in_the_queue_of_its_name(backend, own_redis):
    lease = grant(backend, request())
    with client(own_redis) as asking:
        before = asking.dbsize()
        for _ in range(200):
            refuse(backend, request(lease.name, waits=True))
        assert backend.get(lease.name).waiting == 200
        assert asking.dbsize() - before == 1
        queue = "{dlock:0}:2:q:name"
        # They last until the waiters ask again, at the end of the lease, and a little longer.
        assert 45_000 < asking.pttl(queue) <= 50_100
        assert asking.memory_usage(queue, samples=0) / 200 < 512


@pytest.mark.parametrize("ending", ["min_hold", "ttl"])
@pytest.mark.parametrize("sweeper", ["acquire", "renew"])
def test_leases_that_expired_are_removed_from_the_index(backend, own_redis, ending, sweeper):
    lasting = grant(backend, request("lasts", ttl=600))
    for number in range(MANY):
        if ending == "ttl":
            grant(backend, request(f"ends:{number}", ttl=0.1))
        else:
            lease = grant(backend, request(f"ends:{number}"))
            backend.release(lease.name, lease.owner, min_hold=0.1, deadline=backend.call_deadline())
    while backend.locked(f"ends:{MANY - 1}", deadline=backend.call_deadline()):
        pass
    # By a few heartbeats, one every five seconds, or by a few acquires.
    for _ in range(8 if sweeper == "renew" else 15 * HOUSEKEEPING_EVERY):
        if sweeper == "renew":
            renew(backend)
        else:
            release(backend, grant(backend, request()))
    with client(own_redis) as asking:
        assert asking.zcard("{dlock:0}:2:i") < 20
    assert backend.count() == 1
    assert release(backend, lasting) == "released"


def documented_bytes(what: str) -> range:
    """What the reference says in the row that begins like this."""
    page = Path(__file__).parents[2] / "docs/reference/cost.md"
    row = re.search(rf"^\| {what}.*\| (\d+) to (\d+) \|$", page.read_text(), re.MULTILINE)
    assert row, what
    return range(int(row[1]), int(row[2]) + 1)


def test_the_bytes_of_a_lock_are_as_the_reference_says(backend, own_redis):
    task = {"task_name": "shop.tasks.charge", "task_id": "0" * 36}
    for number in range(100):
        grant(backend, request(f"order:{number}", ttl=600))
        grant(backend, request(f"task:{number}", ttl=600, metadata=task))
    for name, metadata in (("ended", {}), ("ended task", task)):
        # Beyond 15 leases, some are forgotten.
        for _ in range(15):
            release(backend, grant(backend, request(name, metadata=metadata)))
    with client(own_redis) as asking:
        index = asking.memory_usage("{dlock:0}:2:i", samples=0) // 200
        used = {
            name: asking.memory_usage(f"{{dlock:0}}:2:l:{name}", samples=0)
            for name in ("order:7", "task:7", "ended", "ended task")
        }
    assert used["order:7"] + index in documented_bytes("a held lock")
    assert used["task:7"] + index in documented_bytes("the same with more than 64 bytes")
    assert used["ended"] in documented_bytes("a name with the remembered ends of 14 leases")
    assert used["ended task"] in documented_bytes("a name with the remembered ends of 14 leases")
