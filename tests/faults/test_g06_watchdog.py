"""G6: renewal survives every error shorter than the lease, and always ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_dlock import BackendUnavailable, Lock, signals
from testproject.servers import RedisServer
from tests.faults.conftest import LEASE
from tests.support.aliases import TTL, Dlocks, alias, another, configured
from tests.support.databases import until
from tests.support.proxy import Proxy


def stranger(name: str = "it") -> Lock:
    return Lock(name, using="direct", bound=False)


@pytest.fixture
def doubted() -> Iterator[threading.Event]:
    """Set when half a TTL has passed without a confirmed renewal."""
    event = threading.Event()

    def receive(**facts: Any) -> None:
        event.set()

    signals.in_doubt.connect(receive)
    yield event
    signals.in_doubt.disconnect(receive)


# -- what it survives ------------------------------------------------------------------

OUTAGES: dict[str, tuple[Callable[[Proxy, RedisServer], None], Callable[..., None]]] = {
    "connections refused": (lambda proxy, _: proxy.refuse(), lambda proxy, _: proxy.accept()),
    "a black hole": (lambda proxy, _: proxy.black_hole(), lambda proxy, _: proxy.heal()),
    "a paused server": (lambda _, server: server.pause(), lambda _, server: server.resume()),
}


@pytest.mark.parametrize("outage", OUTAGES)
def test_g6_an_outage_shorter_than_the_lease_loses_nothing(
    outage: str, own_redis: RedisServer, through_proxy: Proxy, doubted: threading.Event
) -> None:
    begin, end = OUTAGES[outage]
    lock = Lock("it", ttl=2 * LEASE)
    lock.acquire()
    begin(through_proxy, own_redis)
    assert doubted.wait(30)
    end(through_proxy, own_redis)
    # Longer than the rest of the lease.
    assert not stranger().acquire(timeout=2 * TTL)
    # A busy machine may have let it come into doubt again.
    until(lambda: lock.state == "held")
    lock.release()


def test_g6_repeatedly_lost_replies_lose_no_lock(through_proxy: Proxy) -> None:
    # Enough to wait for a reply in vain, and to stand still after that.
    lock = Lock("it", ttl=1.5 * LEASE)
    lock.acquire()
    for number, how in enumerate(("close", "swallow", "close", "swallow", "close", "close"), 1):
        through_proxy.drop_replies(how=how)
        through_proxy.wait_until(lambda proxy, number=number: proxy.replies_dropped == number)
        # The renewal after it confirms the lease.
        with another(through_proxy):
            pass
    assert not stranger().acquire(timeout=TTL)
    assert lock.held
    assert through_proxy.replies_dropped == 6
    lock.release()


def test_g6_a_receiver_that_hangs_does_not_delay_renewal_and_release(
    through_proxy: Proxy,
) -> None:
    inside, free = threading.Event(), threading.Event()

    def hang(**facts: Any) -> None:
        inside.set()
        free.wait(30)

    signals.acquired.connect(hang)
    try:
        lock = Lock("it")
        lock.acquire()
        assert inside.wait(30)
        assert not stranger().acquire(timeout=2 * TTL)
        lock.release()
        assert stranger().acquire(blocking=False)
    finally:
        free.set()
        signals.acquired.disconnect(hang)


# -- what ends it ----------------------------------------------------------------------


def ends(lock: Lock | None, ttl: float = TTL) -> bool:
    """Whether another owner can acquire after the TTL, while the handle still exists."""
    entered = stranger().acquire(timeout=ttl + 20)
    return entered and (lock is None or not lock.held)


def test_g6_renewal_ends_with_the_thread_that_acquired(through_proxy: Proxy) -> None:
    lock = Lock("it")
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    assert lock.held
    assert ends(lock)
    assert lock.lost_reason == "holder_ended"


def test_g6_an_unbound_lock_outlives_the_thread_that_acquired(through_proxy: Proxy) -> None:
    lock = Lock("it", bound=False)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    assert not stranger().acquire(timeout=2 * TTL)
    lock.release()


def test_g6_renewal_ends_with_the_task_that_entered(through_proxy: Proxy) -> None:
    lock = Lock("it")

    async def main() -> bool:
        await asyncio.create_task(lock.__aenter__())
        assert lock.held
        return await stranger().aacquire(timeout=TTL + 20)

    assert asyncio.run(main())
    assert lock.lost_reason == "holder_ended"


def test_g6_renewal_ends_with_the_handle(through_proxy: Proxy) -> None:
    lock = Lock("it")
    lock.acquire()
    del lock
    gc.collect()
    assert ends(None)


def test_g6_renewal_ends_with_max_hold(through_proxy: Proxy) -> None:
    lock = Lock("it", max_hold=2 * LEASE)
    lock.acquire()
    # Longer than a lease, and shorter than ``max_hold`` on a busy machine, too.
    assert not stranger().acquire(timeout=LEASE + 0.5)
    assert lock.held
    assert ends(lock)
    assert lock.lost_reason == "max_hold"


def test_g6_renewal_ends_with_a_release_that_failed(through_proxy: Proxy) -> None:
    lock = Lock("it")
    lock.acquire()
    through_proxy.refuse()
    with pytest.raises(BackendUnavailable):
        lock.release()
    assert ends(lock)


def test_g6_renewal_ends_with_the_loss(own_redis: RedisServer, through_proxy: Proxy) -> None:
    lost = threading.Event()
    lock = Lock("it", on_lost=lambda lock, reason: lost.set())
    lock.acquire()
    own_redis.restart()
    assert lost.wait(30)
    with stranger() as mine:
        # Late commands of the former holder must neither prolong nor end the lease of another.
        assert not Lock("it", using="direct", bound=False).acquire(timeout=TTL)
        assert mine.held
    sent = through_proxy.count("EVALSHA", "EVAL")
    assert ends(lock)
    assert through_proxy.count("EVALSHA", "EVAL") == sent


# -- one alias that hangs ----------------------------------------------------------------


def test_g6_a_paused_server_delays_no_other_alias(own_redis: RedisServer, dlocks: Dlocks) -> None:
    with (
        RedisServer() as other,
        configured({"default": dlocks["default"], "other": alias(other.url, TTL=LEASE)}),
    ):
        hung = [Lock(f"it:{n}") for n in range(20)]
        well = [Lock(f"it:{n}", using="other") for n in range(20)]
        for lock in hung + well:
            lock.acquire()
        own_redis.pause()
        # As long as two leases, on the alias that works.
        assert not Lock("it:0", using="other", bound=False).acquire(timeout=2 * LEASE)
        until(lambda: all(lock.lost for lock in hung))
        assert all(lock.held for lock in well)
        assert {lock.lost_reason for lock in hung} == {"unreachable"}
        own_redis.resume()
