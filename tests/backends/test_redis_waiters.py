"""What the Redis backend says about the waiters for a name."""

from __future__ import annotations

import json

import redis

from django_dlock.process import current
from testproject.servers import RedisServer
from tests.support.redis_calls import backend_for, grant, refuse, request

QUEUE, PROCESS, CHANNEL = "{dlock:0}:2:q:name", "{dlock:0}:2:p:other", "{dlock:0}:2:m:other"


def wait_elsewhere(server: redis.Redis, *, heard: float, owner: str = "stranger") -> None:
    """Queue a waiter of another machine, last heard from ``heard`` seconds ago."""
    now = server.time()[0]
    server.zadd(QUEUE, {f"{owner}\n30001\nheld\nother\n{{}}": now * 1_000_000 - 5_000_000})
    identity = current()._replace(id="other", host="elsewhere", boot_id="another")
    server.set(PROCESS, f"{(now - heard) * 1000:.0f} {json.dumps(identity.as_dict())}")


def test_a_waiter_that_no_proof_reaches_is_alive_silent_or_listens(own_redis: RedisServer) -> None:
    backend = backend_for(own_redis.url)
    grant(backend, request())
    with redis.Redis.from_url(own_redis.url) as server:
        wait_elsewhere(server, heard=3)
        (waiter,) = backend.waiters("name")
        assert waiter.state == "alive"
        assert 4 <= waiter.waited <= 30
        assert waiter.process is not None
        assert waiter.process.host == "elsewhere"
        wait_elsewhere(server, heard=60)
        assert [it.state for it in backend.waiters("name")] == ["silent"]
        with server.pubsub() as subscription:
            subscription.subscribe(CHANNEL)
            assert subscription.get_message(timeout=20) is not None
            # Its process may have no lease, and so no heartbeat.
            assert [it.state for it in backend.waiters("name")] == ["alive"]
        wait_elsewhere(server, heard=-2 * server.time()[0])
        server.set(PROCESS, b"-" + server.get(PROCESS))
        assert [it.state for it in backend.waiters("name")] == ["dead"]
        server.delete(PROCESS)
        assert [it.state for it in backend.waiters("name")] == ["unknown"]


def test_a_damaged_entry_hides_no_other_waiter(own_redis: RedisServer) -> None:
    backend = backend_for(own_redis.url)
    grant(backend, request())
    sound = request(waits=True)
    with redis.Redis.from_url(own_redis.url) as server:
        server.zadd(QUEUE, {"": 1, b"\xff\n\n\n\xfe\n[": 2, "a\nb": "+inf"})
        refuse(backend, sound)
        found = {it.owner: it for it in backend.waiters("name")}
    assert set(found) == {"", "\ufffd", "a", sound.owner}
    assert found["\ufffd"].metadata == {}
    assert found["a"].waited == 0


def test_waiters_and_their_processes_are_read_at_once_and_no_more_than_asked_for(
    own_redis: RedisServer,
) -> None:
    backend = backend_for(own_redis.url)
    grant(backend, request())
    with redis.Redis.from_url(own_redis.url) as server:
        for number in range(300):
            wait_elsewhere(server, heard=1, owner=f"n{number:03}")
        assert len(backend.waiters("name", limit=1)) == 1
        assert list(backend.waiters("name", limit=0)) == []
        server.config_resetstat()
        assert len(backend.waiters("name", limit=200)) == 200
        calls = {name: facts["calls"] for name, facts in server.info("commandstats").items()}
    assert calls.pop("cmdstat_evalsha") == 2
    # All are of one process, whose state is read once.
    assert calls["cmdstat_get"] == 1
    assert not any("scan" in name or "keys" in name for name in calls)
