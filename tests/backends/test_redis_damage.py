"""The holder keeps its lock after another program has damaged the lock's hash."""

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
# Except for an end in the past.
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
def test_the_holder_keeps_and_releases_a_damaged_lock(it, own_redis, field, wrong):
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
def test_an_operator_can_break_a_damaged_lock(it, own_redis, field, wrong):
    lease = damaged(it, own_redis, field, wrong)
    assert it.break_silently("name", owner=lease.owner)
    assert renew(it, lease) == ["broken"]
    assert grant(it, request()).token > lease.token


@pytest.mark.parametrize("wrong", WRONG)
def test_the_holder_renews_a_completely_damaged_lock(it, own_redis, wrong):
    sound = grant(it, request("sound"))
    lease = damaged(it, own_redis, "token", wrong)
    end = "" if wrong == "-1" else wrong
    with client(own_redis) as stranger:
        stranger.hset(LOCK, mapping=dict.fromkeys(("ttl", "at", "n"), wrong) | {"until": end})
    assert {info.name for info in it.list()} == {"sound", "name"}
    assert renew(it, sound, lease) == ["renewed"] * 2
    # The machine may have other work meanwhile.
    assert it.get("name").ttl > 20


@pytest.mark.parametrize(("field", "wrong"), DAMAGE)
def test_a_repeated_acquire_finds_its_grant_in_a_damaged_lock(it, own_redis, field, wrong):
    attempt = request()
    lease = grant(it, attempt)
    with client(own_redis) as stranger:
        stranger.hset(LOCK, field, wrong)
    assert grant(it, attempt).owner == lease.owner
    assert release(it, lease) == "released"


@pytest.mark.parametrize(("field", "wrong"), DAMAGE)
def test_min_hold_works_for_a_damaged_lock(it, own_redis, field, wrong):
    lease = damaged(it, own_redis, field, wrong)
    call = it.call_deadline()
    assert it.release("name", lease.owner, min_hold=60.0, deadline=call) == "released"
    assert renew(it, lease) == ["released"]


def test_a_lease_without_an_owner_belongs_to_nobody(it, own_redis):
    damaged(it, own_redis, "owner", "")
    assert not it.locked("name", deadline=it.call_deadline())
    assert it.get("name") is None
    assert it.list() == []
    lease = grant(it, request(replaces="another"))
    assert it.get("name").owner == lease.owner


def test_a_release_makes_a_key_without_an_end_expire(it, own_redis):
    for end in (release, undo):
        lease = grant(it, request())
        with client(own_redis) as stranger:
            stranger.persist(LOCK)
            end(it, lease)
            assert stranger.pttl(LOCK) > 0


def undo(it: RedisBackend, lease: Lease) -> None:
    it.cancel_acquire(request()._replace(owner=lease.owner), deadline=it.call_deadline())


def test_a_message_is_ignored_if_the_token_cannot_be_read(it, own_redis):
    damaged(it, own_redis, "token", "soon")
    assert refuse(it, request()).ticket.token >= 2**53


@pytest.mark.parametrize("wrong", WRONG)
def test_tokens_rise_although_the_clock_key_was_overwritten(it, own_redis, wrong):
    lease = grant(it, request())
    release(it, lease)
    with client(own_redis) as stranger:
        stranger.set("{dlock:0}:2:clock", wrong)
    assert lease.token < grant(it, request()).token < 2**53
