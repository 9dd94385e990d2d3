"""A message that hands a lease over counts only with its MAC; every other one is asked about.

The stranger here reads the store and publishes on it, but may not write.
"""

from __future__ import annotations

import gc
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_dlock import clock
from django_dlock.backends import handover_mac
from django_dlock.backends.base import BaseLockBackend
from django_dlock.backends.redis.commands import HandoverMessage
from django_dlock.core import granting
from django_dlock.core.flow import drive
from django_dlock.lease import Lease, LeaseRequest
from testproject.servers import RedisServer
from tests.backends.test_database_handover import backend_for as database_backend
from tests.support.database_bed import store_of
from tests.support.points import heard
from tests.support.redis_calls import backend_for, client, grant, refuse, request, wait

PATIENCE = 20.0
HUGE = 2**52
"""A token that no real grant reaches. Whoever trusts it shuts out all later holders."""


class Bed:
    """A backend whose waiters listen, and a stranger."""

    backend: Any
    prefix: str

    def queued(self) -> list[tuple[str, str]]:
        """Owner and channel of each waiter of ``name``, as a stranger reads them."""
        raise NotImplementedError

    def publish(self, channel: str, text: str) -> None:
        raise NotImplementedError

    def listens(self) -> None:
        """Return once messages arrive; they are read at once."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class OnRedis(Bed):
    def __init__(self, server: RedisServer) -> None:
        self.backend, self.prefix, self._server = backend_for(server.url), "dlock", server
        self._reading = threading.Thread()

    def queued(self) -> list[tuple[str, str]]:
        with client(self._server) as stranger:
            waiting = stranger.zrange("{dlock:0}:2:q:name", 0, -1)
        found = [it.split("\n") for it in waiting]
        return [(owner, f"{{dlock:0}}:2:m:{process}") for owner, _, _, process, _ in found]

    def publish(self, channel: str, text: str) -> None:
        with client(self._server) as stranger:
            assert stranger.publish(channel, text) == 1

    def publish_all(self, channel: str, texts: list[str]) -> None:
        with client(self._server) as stranger, stranger.pipeline(transaction=False) as sending:
            for text in texts:
                sending.publish(channel, text)
            sending.execute()

    def listens(self) -> None:
        # Threads that wait read the messages of all; so one waits all the time.
        self._other, reader = grant(self.backend, request("other")), waiter("other")
        flow = granting.grant_flow(
            self.backend, reader, patience=None, met=id, broke=lambda *_: None
        )
        self._reading = threading.Thread(target=drive, args=(flow,), daemon=True)
        with heard("listener.listening", store="redis") as listening:
            self._reading.start()
            listening.wait()

    def close(self) -> None:
        release(self.backend, self._other)
        self._reading.join(PATIENCE)
        assert not self._reading.is_alive()


class OnPostgres(Bed):
    def __init__(self, alias: str, stranger: str) -> None:
        self.backend = database_backend(alias)
        self.prefix, self._stranger = self.backend.options.key_prefix, stranger

    def queued(self) -> list[tuple[str, str]]:
        with connections[self._stranger].cursor() as cursor:
            cursor.execute(
                "SELECT queue FROM django_dlock_leaserecord WHERE key_prefix = %s AND name = %s",
                [self.prefix, "name"],
            )
            ((queue,),) = cursor.fetchall()
        fields = [line.split("\t") for line in queue.splitlines()]
        return [(it[0], it[5]) for it in fields]

    def publish(self, channel: str, text: str) -> None:
        with connections[self._stranger].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [channel, text])

    def listens(self) -> None:
        wakeup = store_of(self.backend).wakeup
        assert wakeup is not None
        with heard("listener.tested", store="postgresql") as listening:
            wakeup.keep_listening()
            listening.wait()

    def close(self) -> None:
        self.backend.close()


@contextmanager
def reader_of(alias: str) -> Iterator[str]:
    """An alias of the same database, for a role that may only connect and read."""
    name = f"reader_{secrets.token_hex(4)}"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'reader'")
        cursor.execute(f"GRANT SELECT ON django_dlock_leaserecord TO {name}")
    connections.settings[name] = {**connections.settings[alias], "USER": name, "PASSWORD": "reader"}
    try:
        yield name
    finally:
        connections[name].close()
        del connections.settings[name]
        with connections[alias].cursor() as cursor:
            cursor.execute(f"DROP OWNED BY {name}")
            cursor.execute(f"DROP ROLE {name}")


@pytest.fixture(params=["redis", "postgresql"])
def bed(request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker) -> Iterator[Bed]:
    made: Bed
    if request.param == "redis":
        made = OnRedis(request.getfixturevalue("own_redis"))
        made.listens()
        yield made
        made.close()
        return
    alias = request.getfixturevalue("postgres_alias")
    with django_db_blocker.unblock(), reader_of(alias) as stranger:
        made = OnPostgres(alias, stranger)
        made.listens()
        yield made
        made.close()


@pytest.fixture
def redis_bed(own_redis: RedisServer) -> Iterator[OnRedis]:
    made = OnRedis(own_redis)
    made.listens()
    yield made
    made.close()


def waiter(name: str = "name") -> LeaseRequest:
    return request(name, waits=True, renewed=True)


def release(backend: BaseLockBackend, lease: Lease) -> None:
    deadline = backend.call_deadline()
    assert backend.release(lease.name, lease.owner, min_hold=0.0, deadline=deadline) == "released"


def signed(bed: Bed, name: str, of_channel: str, of_grant: str, **other: str) -> str:
    """A message as a holder of the secret makes it, but for what ``other`` changes."""
    algorithm = "sha1" if isinstance(bed, OnRedis) else "sha256"
    key = handover_mac.key_of(bed.prefix, name)
    mac = handover_mac.mac(
        algorithm, key, other.get("channel", of_channel), other.get("grant", of_grant)
    )
    return f"{of_grant} {mac}"


FORGERIES: dict[str, Callable[[Bed, str, str], str]] = {
    "no MAC": lambda bed, channel, owner: f"{owner} {HUGE}",
    "a random MAC": lambda bed, channel, owner: f"{owner} {HUGE} {secrets.token_hex(20)}",
    "not even text": lambda bed, channel, owner: f"{owner} {HUGE} \u00e9\u0661",
    "of another name": lambda bed, channel, owner: signed(bed, "other", channel, f"{owner} {HUGE}"),
    "of another channel": lambda bed, channel, owner: signed(
        bed, "name", channel, f"{owner} {HUGE}", channel=f"{channel}0"
    ),
    "of another owner": lambda bed, channel, owner: signed(
        bed, "name", channel, f"{owner} {HUGE}", grant=f"{owner}0 {HUGE}"
    ),
    "of another token": lambda bed, channel, owner: signed(
        bed, "name", channel, f"{owner} {HUGE}", grant=f"{owner} {HUGE - 1}"
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_g1_a_forged_message_grants_nothing(bed: Bed, forgery: str) -> None:
    lease, attempt = grant(bed.backend, request()), waiter()
    met = refuse(bed.backend, attempt)
    ((owner, channel),) = bed.queued()
    with heard("listener.message", waiter=owner) as read:
        bed.publish(channel, FORGERIES[forgery](bed, channel, owner))
        read.wait()
    give_up_at = clock.now() + PATIENCE
    assert wait(bed.backend, attempt, met, PATIENCE) is None
    # It is never dropped, because it may come from a process with another key.
    assert clock.now() < give_up_at
    met = refuse(bed.backend, attempt)
    assert met.owner == lease.owner
    # The real hand-over still counts, without a further request.
    release(bed.backend, lease)
    given = wait(bed.backend, attempt, met, PATIENCE)
    assert given is not None
    assert lease.token < given.token < HUGE


def test_g1_a_message_with_its_mac_grants_the_lease(bed: Bed) -> None:
    # What the forgeries above would have been with the right MAC.
    grant(bed.backend, request())
    attempt = waiter()
    met = refuse(bed.backend, attempt)
    ((owner, channel),) = bed.queued()
    bed.publish(channel, signed(bed, "name", channel, f"{owner} {HUGE}"))
    given = wait(bed.backend, attempt, met, PATIENCE)
    assert given is not None
    assert given.token == HUGE


@pytest.mark.parametrize("ends", ["release", "break", "cancel"])
def test_g4_a_waiter_with_another_secret_key_asks_once(bed: Bed, ends: str) -> None:
    backend, (lease, attempt) = bed.backend, (grant(bed.backend, request()), waiter())
    flow = granting.grant_flow(
        backend, attempt, patience=None, met=lambda met: None, broke=lambda *_: None
    )
    given: list[Lease | None] = []
    with heard("wait.asleep", waiter=attempt.owner) as asleep:
        thread = threading.Thread(target=lambda: given.append(drive(flow)), daemon=True)
        thread.start()
        asleep.wait()
        # Settings are of the whole process, so the key changes back before the waiter looks.
        with heard("listener.message", waiter=attempt.owner) as message, keys_differ():
            end(backend, lease, ends)
            message.wait()
        thread.join(PATIENCE)
    assert given[0] is not None
    # Long before the lease that it found would have ended.
    assert given[0].asked_at < clock.now() < lease.asked_at + 10
    assert given[0].token == backend.get("name").token


@contextmanager
def keys_differ() -> Iterator[None]:
    """The commands in this context are those of a process with another ``SECRET_KEY``."""
    real = handover_mac.key_of
    me = threading.current_thread()

    def key_of(prefix: str, name: str) -> str:
        key = real(prefix, name)
        return key[::-1] if threading.current_thread() is me else key

    handover_mac.key_of = key_of
    try:
        yield
    finally:
        handover_mac.key_of = real


def end(backend: Any, lease: Lease, how: str) -> None:
    if how == "release":
        release(backend, lease)
    elif how == "break":
        assert backend.break_silently(lease.name, owner=lease.owner)
    else:
        cancelled = LeaseRequest(lease.name, lease.owner, lease.ttl)
        backend.cancel_acquire(cancelled, deadline=backend.call_deadline())


@pytest.mark.parametrize("secret", ["another", ""])
def test_g4_messages_are_asked_about_where_keys_differ_or_are_missing(
    bed: Bed, secret: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover_mac, "_reported_at", float("-inf"))
    for _ in range(2):
        lease, attempt = grant(bed.backend, request()), waiter()
        met = refuse(bed.backend, attempt)
        with heard("listener.message", waiter=attempt.owner) as read:
            with override_settings(SECRET_KEY=secret):
                release(bed.backend, lease)
            read.wait()
        assert wait(bed.backend, attempt, met, PATIENCE) is None
        lease = grant(bed.backend, attempt)
        release(bed.backend, lease)
    # A line for each would fill the log while a stranger publishes.
    (line,) = [it.getMessage() for it in caplog.records if "SECRET_KEY" in it.getMessage()]
    assert "'name'" in line


def test_a_project_without_a_secret_key_hands_over(
    bed: Bed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover_mac, "_reported_at", float("-inf"))
    with override_settings(SECRET_KEY=""):
        assert handover_mac.key_of("dlock", "name") == ""
        lease, attempt = grant(bed.backend, request()), waiter()
        met = refuse(bed.backend, attempt)
        release(bed.backend, lease)
        give_up_at = clock.now() + PATIENCE
        assert wait(bed.backend, attempt, met, PATIENCE) is None
        assert clock.now() < give_up_at
        assert grant(bed.backend, attempt).token > lease.token
    # Nobody is to be alarmed by what is always so.
    assert not caplog.records


@pytest.mark.parametrize("forged_first", [True, False])
@pytest.mark.parametrize("token", [0, 1, HUGE])
def test_g4_a_forged_message_does_not_hide_the_real_one(
    bed: Bed, token: int, forged_first: bool
) -> None:
    # Both arrive between the waiter's request and its wait.
    lease, attempt = grant(bed.backend, request()), waiter()
    met = refuse(bed.backend, attempt)
    ((owner, channel),) = bed.queued()

    def forge() -> None:
        bed.publish(channel, f"{owner} {token}")

    with heard("listener.message", waiter=owner) as read:
        if forged_first:
            forge()
        release(bed.backend, lease)
        if not forged_first:
            forge()
        read.wait(times=2)
    give_up_at = clock.now() + PATIENCE
    given = wait(bed.backend, attempt, met, PATIENCE)
    assert clock.now() < give_up_at
    assert (given or grant(bed.backend, attempt)).token == bed.backend.get("name").token


def test_messages_for_strangers_are_not_kept_for_ever(redis_bed: OnRedis) -> None:
    lease, attempt = grant(redis_bed.backend, request()), waiter()
    met = refuse(redis_bed.backend, attempt)
    ((_, channel),) = redis_bed.queued()
    with heard("listener.message") as read:
        # The real message is one of those that are too many.
        release(redis_bed.backend, lease)
        redis_bed.publish_all(channel, [f"{'x' * 200}{number} {HUGE}" for number in range(3000)])
        read.until(lambda it: it.count() >= 3001)
    with heard("listener.message") as read:
        # No message of ours is that long.
        redis_bed.publish(channel, f"{'x' * 5000} {HUGE}")
        redis_bed.publish(channel, f"stranger {HUGE}")
        read.wait()
        assert read.each("waiter") == {"stranger"}
    kept = [it for it in gc.get_objects() if isinstance(it, HandoverMessage)]
    assert len(kept) < 1100
    give_up_at = clock.now() + PATIENCE
    given = wait(redis_bed.backend, attempt, met, PATIENCE)
    assert clock.now() < give_up_at, "its message was dropped, and it was not told"
    assert (given or grant(redis_bed.backend, attempt)).token > lease.token


def test_a_waiter_whose_owner_is_damaged_keeps_no_release_from_ending(
    postgres_alias: str, django_db_blocker: DjangoDbBlocker
) -> None:
    with django_db_blocker.unblock():
        backend = database_backend(postgres_alias)
        lease = grant(backend, request())
        refuse(backend, waiter())
        with connections[postgres_alias].cursor() as cursor:
            cursor.execute(
                r"UPDATE django_dlock_leaserecord SET queue = E'a\\xzz\\' || queue "
                "WHERE owner = %s",
                [lease.owner],
            )
        release(backend, lease)
        assert backend.get("name").owner.startswith("a\\xzz\\")
        backend.close()


def test_a_mac_is_that_of_one_prefix_one_name_and_one_secret() -> None:
    key = handover_mac.key_of("dlock", "name")
    assert len(key) == 40
    assert key != handover_mac.key_of("other", "name")
    assert key != handover_mac.key_of("dlock", "Name")
    with override_settings(SECRET_KEY="another"):
        assert key != handover_mac.key_of("dlock", "name")
    assert handover_mac.key_of("dlock", "name") == key
    assert not handover_mac.is_genuine("", "sha1", key, "channel", "owner 1")
    # An empty key is no key, whatever the MAC.
    empty = handover_mac.mac("sha1", "", "channel", "owner 1")
    assert not handover_mac.is_genuine(empty, "sha1", "", "channel", "owner 1")


@pytest.mark.parametrize("secret", ["not \udcff UTF-8", bytearray(b"secret"), b"secret", 5])
def test_a_secret_key_of_any_kind_fails_no_release(secret: Any) -> None:
    # Django's signing refuses some of them, but a worker that signs nothing runs with them.
    with override_settings(SECRET_KEY=secret):
        assert len(handover_mac.key_of("dlock", "name")) == 40


def test_a_key_prefix_that_is_not_utf8_fails_no_release(own_redis: RedisServer) -> None:
    backend = backend_for(own_redis.url, key_prefix="not \udcff UTF-8")
    release(backend, grant(backend, request()))
