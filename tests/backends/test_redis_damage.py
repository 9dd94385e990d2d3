"""A stranger wrote into a lock's hash what is no number: whoever holds it is not thrown out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from django_dlock.backends.redis import RedisBackend
from testproject.servers import RedisServer

from .tools import backend_for, client, grant, refuse, release, renew, request

LOCK = "{dlock:0}:l:name"
NUMBERS = ("until", "token", "ttl", "at", "n")
WRONG = ("soon", "", "inf", "1e400", "-1", "nan")
# All but an end that has passed.
DAMAGE = [
    (field, wrong)
    for field, wrong in itertools.product(NUMBERS, WRONG)
    if field != "until" or wrong not in ("-1", "nan")
]


@pytest.fixture
def it(own_redis: RedisServer) -> Iterator[RedisBackend]:
    backend = backend_for(own_redis.url)
    yield backend
    backend.close()


def damaged(it: RedisBackend, server: RedisServer, field: str, wrong: str):
    lease = grant(it, request())
    with client(server) as stranger:
        stranger.hset(LOCK, field, wrong)
    return lease


@pytest.mark.parametrize(("field", "wrong"), DAMAGE)
def test_its_holder_keeps_it_and_gives_it_back(it, own_redis, field, wrong):
    lease = damaged(it, own_redis, field, wrong)
    assert it.locked("name", deadline=it.call_deadline())
    met = refuse(it, request(waits=True))
    assert met.owner == lease.owner
    assert met.remaining <= 30.1
    assert renew(it, lease) == ["renewed"]
    assert it.get("name").owner == lease.owner
    assert release(it, lease) == "released"
    assert it.last_end("name") == (lease.owner, "released")
    later = grant(it, request())
    assert lease.token < later.token < 2**53
    assert release(it, later) == "released"


@pytest.mark.parametrize("field", NUMBERS)
def test_an_operator_can_break_it(it, own_redis, field):
    lease = damaged(it, own_redis, field, "soon")
    assert it.break_("name", owner=lease.owner)
    assert renew(it, lease) == ["broken"]
    assert grant(it, request()).token > lease.token


@pytest.mark.parametrize("wrong", WRONG)
def test_tokens_rise_although_the_clock_key_was_overwritten(it, own_redis, wrong):
    lease = grant(it, request())
    release(it, lease)
    with client(own_redis) as stranger:
        stranger.set("{dlock:0}:clock", wrong)
    assert lease.token < grant(it, request()).token < 2**53
