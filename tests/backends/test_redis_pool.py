"""How many connections threads use, who gets one first, and what is never lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_dlock import clock
from django_dlock.backends.redis_connections import Place, RedisConnections
from django_dlock.exceptions import BackendUnavailable
from testproject.servers import RedisServer
from tests.proxy import Proxy

from .tools import backend_for, grant, release, renew, request

LIMIT = 2


@pytest.fixture
def pool(own_redis: RedisServer) -> Iterator[RedisConnections]:
    backend = backend_for(own_redis.url, options={"max_connections": LIMIT})
    yield backend._connections
    backend.close()


def soon() -> float:
    return clock.now() + 10


def take_all(pool: RedisConnections) -> list[Place]:
    return [pool.take(soon(), urgent=False) for _ in range(LIMIT)]


def until(condition: Callable[[], object]) -> None:
    give_up_at = clock.now() + 10
    while not condition():
        assert clock.now() < give_up_at
        time.sleep(0.001)


def start(function: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


# -- how many --------------------------------------------------------------------------


def test_threads_with_names_of_their_own_share_a_few_connections(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, options={"max_connections": 4}, command_timeout=20.0)
    together = threading.Barrier(200)
    fates: list[str] = []

    def cycle(number: int) -> None:
        together.wait()
        fates.append(release(backend, grant(backend, request(f"it:{number}"))))

    threads = [start(cycle, number) for number in range(200)]
    for thread in threads:
        thread.join()
    assert fates == ["released"] * 200
    assert 2 <= proxy.connections <= 4
    backend.close()


def test_by_default_there_are_32_at_the_most(own_redis: RedisServer) -> None:
    pool = backend_for(own_redis.url)._connections
    places = [pool.take(soon(), urgent=False) for _ in range(32)]
    with pytest.raises(RedisTimeoutError, match="no connection was free"):
        pool.take(clock.now(), urgent=True)
    assert len(set(map(id, places))) == 32


# -- who gets one ----------------------------------------------------------------------


def test_g6_renewals_and_releases_go_before_those_that_want_a_lease(
    pool: RedisConnections,
) -> None:
    places = take_all(pool)
    served: list[str] = []

    def queue(who: str, urgent: bool) -> None:
        place = pool.take(soon(), urgent=urgent)
        served.append(who)
        pool.give_back(place)

    threads = []
    for who, urgent in [("first", False), ("second", False), ("renewal", True), ("release", True)]:
        threads.append(start(queue, who, urgent))
        until(lambda: len(pool._urgent) + len(pool._ordinary) == len(threads))
    pool.give_back(places.pop())
    for thread in threads:
        thread.join()
    assert served == ["renewal", "release", "first", "second"]


def test_g6_a_lease_is_renewed_and_released_although_all_connections_are_taken(
    own_redis: RedisServer,
) -> None:
    backend = backend_for(own_redis.url, options={"max_connections": LIMIT})
    pool = backend._connections
    lease = grant(backend, request())
    places = take_all(pool)
    waiting = [
        start(lambda name: release(backend, grant(backend, request(name))), f"it:{number}")
        for number in range(20)
    ]
    until(lambda: len(pool._ordinary) == 20)
    fates: list[str] = []
    urgent = start(lambda: fates.extend([*renew(backend, lease), release(backend, lease)]))
    until(lambda: pool._urgent)
    # Those that wait have theirs once the urgent one has had its own.
    pool.give_back(places.pop())
    urgent.join()
    assert fates == ["renewed", "released"]
    for thread in waiting:
        thread.join()
    backend.close()


def test_one_who_comes_while_others_queue_stands_behind_them(pool: RedisConnections) -> None:
    places = take_all(pool)
    taken: list[Place] = []
    waiter = start(lambda: taken.append(pool.take(soon(), urgent=False)))
    until(lambda: pool._ordinary)
    pool.give_back(places.pop())
    waiter.join()
    assert len(taken) == 1
    assert not pool._free


# -- in time ---------------------------------------------------------------------------


# Who is not told so would wait for ever.
@pytest.mark.timeout(20)
def test_g10_who_gets_no_connection_in_time_is_told_so(own_redis: RedisServer) -> None:
    backend = backend_for(own_redis.url, options={"max_connections": LIMIT})
    places = take_all(backend._connections)
    started = clock.now()
    with pytest.raises(BackendUnavailable, match="no connection was free"):
        backend.acquire(request(), deadline=started + 0.2)
    assert 0.2 <= clock.now() - started < 0.7
    # It left the queue: the place goes to one who is there.
    backend._connections.give_back(places.pop())
    assert grant(backend, request())


# -- never lost ------------------------------------------------------------------------


def test_g7_a_place_that_an_interrupt_lets_go_of_is_replaced(pool: RedisConnections) -> None:
    places = take_all(pool)
    taken: list[Place] = []
    waiter = start(lambda: taken.append(pool.take(soon(), urgent=False)))
    until(lambda: pool._ordinary)
    # As from the stack of a thread that is interrupted between two steps.
    places.clear()
    waiter.join()
    assert len(taken) == 1
    assert len(pool._free) == LIMIT - 1


def test_g7_a_place_offered_to_one_who_is_interrupted_goes_to_the_next(
    pool: RedisConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_dlock.backends import redis_connections

    places = take_all(pool)

    def interrupted(turn: Any, timeout: float) -> None:
        pool.give_back(places.pop())
        raise KeyboardInterrupt

    monkeypatch.setattr(redis_connections._Turn, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.take(soon(), urgent=False)
    assert len(pool._free) == 1
    assert not pool._ordinary


def test_g8_a_place_of_the_parent_does_not_come_back_in_the_child(pool: RedisConnections) -> None:
    places = take_all(pool)
    # What runs in a forked child.
    pool.forget()
    for place in places:
        pool.give_back(place)
    places.clear()
    assert len(pool._free) == LIMIT
    assert all(place.connection is None for place in pool._free)


def test_a_connection_that_failed_is_not_used_again(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, options={"max_connections": LIMIT}, command_timeout=0.3)
    lease = grant(backend, request())
    for _ in range(3 * LIMIT):
        proxy.drop_replies(how="swallow")
        with pytest.raises(BackendUnavailable):
            renew(backend, lease)
    assert renew(backend, lease) == ["renewed"]
    assert len(backend._connections._free) == LIMIT


# -- through redis-py's client ---------------------------------------------------------


def test_what_patches_execute_command_sees_every_command(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    seen: list[tuple[str, Any]] = []
    original = redis.Redis.execute_command

    def traced(self: Any, *args: Any, **options: Any) -> Any:
        seen.append((args[0], self.connection_pool.connection_kwargs["port"]))
        return original(self, *args, **options)

    monkeypatch.setattr(redis.Redis, "execute_command", traced)
    backend = backend_for(own_redis.url, options={"client": "redis-py"})
    lease = grant(backend, request())
    sent = backend.start_renew([], process="p", deadline=backend.call_deadline())
    assert sent.result() == []
    release(backend, lease)
    assert [name for name, _ in seen] == ["EVALSHA", "EVAL"] * 3
    assert {port for _, port in seen} == {own_redis.port}
    assert backend.eviction_policy() is None
    assert seen[-1][0] == "INFO"
    backend.close()


def test_the_client_counts_a_reply_that_is_late_as_none(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, options={"client": "redis-py"}, command_timeout=2.0)
    grant(backend, request())
    proxy.black_hole()
    started = clock.now()
    with pytest.raises(BackendUnavailable):
        backend.locked("name", deadline=started + 0.2)
    assert clock.now() - started < 1.0
