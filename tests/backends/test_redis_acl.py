"""Users of Redis with limited rights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock import Lock, clock, locks
from django_dlock.backends.redis import RedisBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease, LeaseQuery, LeaseRequest
from django_dlock.process import current
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured
from tests.support.limited_users import COMMANDS, keys_of, redis_url_for
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

# As in docs/howto/own-redis.md.
LEAST = " ".join([*keys_of("dlock"), COMMANDS])


@pytest.fixture
def direct(own_redis: RedisServer) -> Iterator[RedisBackend]:
    backend = backend_for(own_redis.url)
    yield backend
    backend.close()


def test_the_minimal_rights_in_the_documentation_are_enough(own_redis, direct):
    theirs = backend_for(redis_url_for(own_redis, *LEAST.split()))
    lease, attempt = grant(theirs, request()), request(waits=True, renewed=True)
    refuse(theirs, attempt)
    wait(theirs, attempt, refuse(theirs, attempt), 20.0)
    met = refuse(theirs, attempt)
    assert release(theirs, lease) == "released"
    handed = wait(theirs, attempt, met, 20.0)
    assert handed.owner == attempt.owner
    assert renew(theirs, handed) == ["renewed"]
    assert theirs.get("name").holder_state == "alive"
    for query in (LeaseQuery(), LeaseQuery(sort=["age"]), LeaseQuery(sort=["waiting"])):
        assert theirs.page(query, limit=1).total == 1
    assert theirs.locked("name", deadline=theirs.call_deadline())
    assert theirs.store_problems() == []
    deadline = theirs.call_deadline()
    assert theirs.release("name", attempt.owner, min_hold=60.0, deadline=deadline) == "released"
    assert theirs.break_silently("name", owner=attempt.owner)
    theirs.cancel_acquire(request(), deadline=theirs.call_deadline())
    theirs.deregister(current().id, deadline=theirs.call_deadline())
    theirs.close()


@pytest.mark.parametrize("missing", ["&{dlock:0}:2:m:*", "+subscribe"])
def test_waiters_without_the_right_to_subscribe_poll(missing, own_redis, direct, monkeypatch):
    rules = [rule for rule in LEAST.split() if rule != missing]
    # So that no request is repeated because its answer came late.
    entry = alias(redis_url_for(own_redis, *rules), TTL=60.0, OPTIONS={"command_timeout": 20.0})
    lease = grant(direct, request())
    with configured({"default": entry}):
        asked: list[LeaseRequest] = []
        acquire = locks["default"].acquire

        def ask(attempt: LeaseRequest, *, deadline: float) -> Lease | Contention:
            asked.append(attempt)
            if len(asked) == 3:
                # They get no message, and the remaining TTL that they know is long.
                release(direct, lease)
            return acquire(attempt, deadline=deadline)

        monkeypatch.setattr(locks["default"], "acquire", ask)
        with Lock("name", wait=20):
            assert direct.get("name").waiting == 0
        assert len({attempt.owner for attempt in asked}) == 1
        # None of them returned because its patience had ended.
        assert all(attempt.waits for attempt in asked)
        assert 3 <= len(asked) <= 4


async def test_coroutines_without_the_right_to_subscribe_poll(own_redis, direct):
    rules = [rule for rule in LEAST.split() if rule != "+subscribe"]
    lease, attempt = grant(direct, request()), request(waits=True, renewed=True)
    theirs = backend_for(redis_url_for(own_redis, *rules))

    async def wait_for_it(met):
        until = clock.now() + 20
        return await theirs.async_wait(attempt, met, until=until, interrupted=lambda: False)

    for _ in range(3):
        assert await wait_for_it(refuse(theirs, attempt)) is None
    release(direct, lease)
    grant(theirs, attempt)
    theirs.close()


def test_a_holder_without_the_right_to_publish_keeps_the_order_of_waiters(own_redis, direct):
    rules = [rule for rule in LEAST.split() if not rule.startswith("&")]
    mute = backend_for(redis_url_for(own_redis, *rules))
    lease, attempt = grant(mute, request()), request(waits=True)
    # The first wait makes the process subscribe.
    wait(direct, attempt, refuse(direct, attempt), 20.0)
    refuse(direct, attempt)
    assert release(mute, lease) == "released"
    with client(own_redis) as asking:
        assert asking.zcard("{dlock:0}:2:q:name") == 1
    grant(direct, attempt)
    with client(own_redis) as asking:
        assert asking.zcard("{dlock:0}:2:q:name") == 0
    mute.close()


def test_a_user_without_rights_to_the_keys_gets_an_error_at_once(own_redis):
    theirs = backend_for(redis_url_for(own_redis, "~other:*", "+@all"))
    with pytest.raises(BackendUnavailable, match=r"NOPERM|permission"):
        grant(theirs, request())
    theirs.close()
