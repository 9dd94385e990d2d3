"""G1: while the holder runs and reaches the backend once per TTL, nobody else acquires."""

from __future__ import annotations

import redis

from django_dlock import Lock, locks
from testproject.servers import RedisServer
from tests.support.aliases import TTL, Dlocks, another
from tests.support.holder import Holder
from tests.support.proxy import Proxy


def stranger(using: str = "direct") -> Lock:
    """A handle that is not bound to the test's thread, so that it meets the lock as others do."""
    return Lock("it", bound=False, using=using)


def test_g1_a_body_longer_than_the_ttl_keeps_every_waiter_out(
    through_proxy: Proxy, holder: Holder
) -> None:
    lock = Lock("it")
    lock.acquire()
    holder.begin("waiter = Lock('it'); waiter.acquire(timeout=60); say(waiter.token)")
    # Longer than a lease.
    with another(through_proxy, commands=4):
        pass
    assert lock.held
    token = lock.token or 0
    assert not holder.answered
    lock.release()
    holder.answer()
    [[entered]] = holder.said
    assert entered > token


def test_g1_repeated_cuts_of_connections_lose_no_lock(through_proxy: Proxy) -> None:
    lock = Lock("it")
    lock.acquire()
    for _ in range(5):
        with another(through_proxy):
            through_proxy.cut()
        assert not stranger().acquire(blocking=False)
    assert lock.held
    lock.release()


def test_g1_pauses_of_the_server_shorter_than_a_lease_lose_no_lock(
    own_redis: RedisServer, through_proxy: Proxy
) -> None:
    lock = Lock("it")
    lock.acquire()
    for _ in range(4):
        # Until a renewal has been sent that gets no answer.
        with another(through_proxy):
            own_redis.pause()
        own_redis.resume()
        assert not stranger().acquire(timeout=0.1)
    assert lock.held
    lock.release()
    assert stranger().acquire(blocking=False)


def test_g1_lost_scripts_and_killed_clients_lose_no_lock(
    own_redis: RedisServer, dlocks: Dlocks
) -> None:
    lock = Lock("it")
    lock.acquire()
    with redis.Redis(port=own_redis.port) as admin:
        for _ in range(8):
            admin.script_flush()
            admin.client_kill_filter(_type="normal", skipme=True)
            assert not stranger("default").acquire(timeout=0.3 * TTL)
    assert lock.held
    info = locks["default"].get("it")
    assert info is not None
    # More than one lease.
    assert info.renewals >= 3
