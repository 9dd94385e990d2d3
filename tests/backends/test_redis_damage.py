"""Another program damaged a lock's hash: its holder still keeps the lock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from django_dlock.backends.redis import RedisBackend
from django_dlock.lease import Lease
from testproject.servers import RedisServer
from tests.support.redis_calls import backend_for, client, grant, refuse, release, renew, request

LOCK = "{dlock:0}:2:l:name"
NUMBERS = ("until", "token", "ttl", "at", "n")
WRONG = ("soon", "", "inf", "nan", "1e19", "1e400", "-1")
# But for an end that has passed.
DAMAGE = [
    (field, wrong)
    for field, wrong in itertools.product(NUMBERS, WRONG)
    if field != "until" or wrong != "-1"
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
    assert renew(it, lease) == ["released"]
    later = grant(it, request())
    assert lease.token < later.token < 2**53
    assert release(it, later) == "released"


@pytest.mark.parametrize(("field", "wrong"), DAMAGE)
def test_an_operator_can_break_it(it, own_redis, field, wrong):
    lease = damaged(it, own_redis, field, wrong)
    assert it.break_("name", owner=lease.owner)
    assert renew(it, lease) == ["broken"]
    assert grant(it, request()).token > lease.token


@pytest.mark.parametrize("wrong", WRONG)
def test_all_of_it_damaged_keeps_nobody_from_renewing(it, own_redis, wrong):
    sound = grant(it, request("sound"))
    lease = damaged(it, own_redis, "token", wrong)
    end = "" if wrong == "-1" else wrong
    with client(own_redis) as stranger:
        stranger.hset(LOCK, mapping=dict.fromkeys(("ttl", "at", "n"), wrong) | {"until": end})
    assert {info.name for info in it.list()} == {"sound", "name"}
    assert renew(it, sound, lease) == ["renewed"] * 2
    assert it.get("name").ttl > 29


@pytest.mark.parametrize(("field", "wrong"), DAMAGE)
def test_one_that_asks_again_finds_its_grant(it, own_redis, field, wrong):
    attempt = request()
    lease = grant(it, attempt)
    with client(own_redis) as stranger:
        stranger.hset(LOCK, field, wrong)
    assert grant(it, attempt).owner == lease.owner
    assert release(it, lease) == "released"


@pytest.mark.parametrize(("field", "wrong"), DAMAGE)
def test_a_name_cools_all_the_same(it, own_redis, field, wrong):
    lease = damaged(it, own_redis, field, wrong)
    call = it.call_deadline()
    assert it.release("name", lease.owner, min_hold=60.0, deadline=call) == "released"
    assert renew(it, lease) == ["released"]


def test_a_lease_without_an_owner_is_nobodys(it, own_redis):
    damaged(it, own_redis, "owner", "")
    assert not it.locked("name", deadline=it.call_deadline())
    assert it.get("name") is None
    assert it.list() == []
    lease = grant(it, request(replaces="another"))
    assert it.get("name").owner == lease.owner


def test_a_key_that_would_stay_for_ever_does_not_when_it_is_released(it, own_redis):
    for end in (release, undo):
        lease = grant(it, request())
        with client(own_redis) as stranger:
            stranger.persist(LOCK)
            end(it, lease)
            assert stranger.pttl(LOCK) > 0


def undo(it: RedisBackend, lease: Lease) -> None:
    it.cancel_acquire(request()._replace(owner=lease.owner), deadline=it.call_deadline())


def test_a_letter_is_not_believed_where_the_token_cannot_be_read(it, own_redis):
    damaged(it, own_redis, "token", "soon")
    assert refuse(it, request()).ticket.token >= 2**53


@pytest.mark.parametrize("wrong", WRONG)
def test_tokens_rise_although_the_clock_key_was_overwritten(it, own_redis, wrong):
    lease = grant(it, request())
    release(it, lease)
    with client(own_redis) as stranger:
        stranger.set("{dlock:0}:2:clock", wrong)
    assert lease.token < grant(it, request()).token < 2**53
