"""G10: acquire and release return in time, even if the backend hangs.

Only these tests measure time: each limit is the given patience, plus one command timeout, plus a
margin for a busy machine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from django_dlock import BackendUnavailable, Lock, clock
from testproject.servers import RedisServer
from tests.support.aliases import LONG, Dlocks, alias, configured
from tests.support.proxy import Proxy

OUTAGE_PATIENCE = 0.6
TIMEOUT = 1.0
"""Command timeout."""
OPTIONS = {"outage_patience": OUTAGE_PATIENCE, "command_timeout": TIMEOUT}
SLACK = 5.0
"""Much less than one more silent retry for each of redis-py's ten."""

Fault = Callable[[RedisServer, Proxy], None]

FAULTS: dict[str, Fault] = {
    "down": lambda server, proxy: proxy.refuse(),
    "killed": lambda server, proxy: server.kill(),
    "paused": lambda server, proxy: server.pause(),
    "a black hole": lambda server, proxy: proxy.black_hole(),
}


@pytest.fixture(params=FAULTS)
def cut_off(
    request: pytest.FixtureRequest, own_redis: RedisServer, proxy: Proxy
) -> Iterator[Callable[[], None]]:
    """Makes the server of ``default`` unreachable, once called."""
    with configured({"default": alias(proxy.url, TTL=LONG, OPTIONS=OPTIONS)}):
        yield lambda: FAULTS[request.param](own_redis, proxy)


def connect() -> None:
    """Until it has succeeded: for the first time, it may take longer than the outage patience."""
    end = clock.now() + LONG
    while clock.now() < end:
        with suppress(BackendUnavailable), Lock("warm"):
            return
    raise AssertionError("no connection")


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = clock.now()
    yield
    assert clock.now() - started < seconds + TIMEOUT + SLACK


@pytest.mark.parametrize("fresh", [True, False], ids=["first use", "connected"])
@pytest.mark.parametrize("patience", [0, 0.4])
def test_g10_acquire_returns_in_time(
    cut_off: Callable[[], None], patience: float, fresh: bool
) -> None:
    if not fresh:
        connect()
    cut_off()
    with within(patience), pytest.raises(BackendUnavailable):
        Lock("it").acquire(timeout=patience)


def test_g10_release_and_renew_return_in_time(cut_off: Callable[[], None]) -> None:
    connect()
    lock = Lock("it")
    lock.acquire()
    cut_off()
    for call in (lock.renew, lock.locked, lock.release):
        with within(0), pytest.raises(BackendUnavailable):
            call()
    assert lock.state == "free"


def test_g10_leaving_a_block_returns_in_time_and_raises_nothing(
    cut_off: Callable[[], None],
) -> None:
    connect()
    with Lock("it"):
        cut_off()
        started = clock.now()
    assert clock.now() - started < TIMEOUT + SLACK


def test_g10_a_waiter_returns_in_time_when_the_backend_becomes_unreachable(
    cut_off: Callable[[], None], proxy: Proxy
) -> None:
    ended: list[bool] = []

    def cut_off_soon() -> None:
        proxy.wait_until(lambda proxy: bool(ended or proxy.count("SUBSCRIBE")))
        if not ended:
            cut_off()

    connect()
    cutting_off = threading.Thread(target=cut_off_soon)
    with Lock("it", bound=False):
        cutting_off.start()
        # Either contention or no answer, depending on the moment; but in time.
        with within(1.0):
            try:
                assert not Lock("it").acquire(timeout=1.0)
            except BackendUnavailable:
                pass
        # On a busy machine this may come before it subscribed. The other thread sees the release.
        ended.append(True)
    cutting_off.join()


async def test_g10_coroutines_return_in_time(cut_off: Callable[[], None]) -> None:
    connect()
    lock = Lock("it")
    await lock.aacquire()
    cut_off()
    with within(0.4), pytest.raises(BackendUnavailable):
        await Lock("other").aacquire(timeout=0.4)
    with within(0), pytest.raises(BackendUnavailable):
        await lock.arelease()


def test_g10_many_callers_at_once_return_in_time(cut_off: Callable[[], None]) -> None:
    cut_off()

    async def main() -> list[object]:
        calls = [
            asyncio.to_thread(Lock(f"it:{number}").acquire, timeout=0.2) for number in range(16)
        ]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with within(0.2 * 16 / 6):
        answers = asyncio.run(main())
    assert {type(answer) for answer in answers} == {BackendUnavailable}


def test_g10_an_unanswered_attempt_is_cancelled_in_the_background(
    own_redis: RedisServer, dlocks: Dlocks
) -> None:
    with configured({"default": alias(own_redis.url, TTL=LONG)}):
        with Lock("warm"):
            pass
        own_redis.pause()
        with within(0), pytest.raises(BackendUnavailable):
            Lock("it").acquire(blocking=False)
        own_redis.resume()
        assert Lock("it").acquire(timeout=30)


@pytest.mark.parametrize("patience", [0.4, -1], ids=["patient", "for ever"])
def test_g10_many_waiters_of_one_process_return_in_time(
    cut_off: Callable[[], None], patience: float
) -> None:
    connect()
    cut_off()
    errors: list[Exception] = []
    ended: list[float] = []

    def acquire() -> None:
        try:
            Lock("it").acquire(timeout=patience)
        except BackendUnavailable as error:
            errors.append(error)
        ended.append(clock.now())

    started = clock.now()
    threads = [threading.Thread(target=acquire) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 20
    longest = OUTAGE_PATIENCE if patience == -1 else patience
    assert max(ended) - started < longest + TIMEOUT + SLACK
