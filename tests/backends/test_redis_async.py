"""Coroutines on one Redis: cost at the server, changing event loops, forks, many waiters."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from django_dlock import Lock, clock, locks
from django_dlock.backends.redis.config import RedisOptions
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured
from tests.support.proxy import Proxy
from tests.support.redis_calls import backend_for, client, grant, request

PATIENT: dict[str, Any] = {"TTL": 180, "WAIT": 60, "OPTIONS": {"command_timeout": 60.0}}
"""Settings of aliases where time is not measured: a thousand calls take long on a busy machine."""


@pytest.fixture
def dlocks(own_redis: RedisServer) -> Iterator[None]:
    with configured({"default": alias(own_redis.url, **PATIENT)}):
        yield


def connected(server: RedisServer) -> int:
    """The number of clients of the server, not counting the one that asks."""
    with client(server) as asking:
        return len(asking.client_list()) - 1


# -- cost -----------------------------------------------------------------------------


async def until_waiting(name: str, count: int, using: str = "default") -> None:
    """Wait until the server has ``count`` waiters for the name.

    Raises:
        AssertionError: They do not arrive; a waiter that has failed never does.
    """
    backend, end = locks[using], clock.now() + 60
    while clock.now() < end:
        info = await backend.acall(backend.get, name)
        if info is not None and info.waiting >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name!r} has no {count} waiters: {info}")


async def test_awaited_acquire_and_release_are_two_commands_on_one_connection(
    own_redis: RedisServer,
) -> None:
    with (
        Proxy("127.0.0.1", own_redis.port) as proxy,
        configured({"default": alias(proxy.url, **PATIENT)}),
    ):
        async with Lock("warm"):
            pass
        passed = len(proxy.commands)
        for _ in range(3):
            async with Lock("it"):
                pass
        assert proxy.commands[passed:] == ["EVALSHA"] * 6
        assert proxy.connections == 1


async def test_a_handed_over_lock_costs_its_waiter_one_command(
    own_redis: RedisServer, proxy: Proxy
) -> None:
    # Long enough that no request is repeated because its answer came late.
    entry = {"TTL": 60, "WAIT": 60, "OPTIONS": {"command_timeout": 20.0}}
    direct = alias(own_redis.url, **PATIENT)

    def asked(commands: list[str]) -> list[str]:
        return [c for c in commands if c in ("EVAL", "EVALSHA", "SUBSCRIBE")]

    async def hand_over(least: int) -> list[str]:
        await holder.aacquire()
        passed, waiter = len(proxy.commands), Lock("it")
        waiting = asyncio.create_task(waiter.aacquire())
        await asyncio.to_thread(
            proxy.wait_until, lambda proxy: len(asked(proxy.commands[passed:])) >= least
        )
        await until_waiting("it", 1, using="direct")
        await holder.arelease()
        assert await waiting
        seen = asked(proxy.commands[passed:])
        await waiter.arelease()
        return seen

    with configured({"default": alias(proxy.url, **entry), "direct": direct}):
        holder = Lock("it", using="direct", bound=False)
        # The first waiter subscribes, and then asks once more.
        first = await hand_over(least=3)
        assert first[:3] == ["EVALSHA", "SUBSCRIBE", "EVALSHA"]
        # A waiter that gets a message after more than a second asks again. No machine is that
        # slow every time.
        assert ["EVALSHA"] in [await hand_over(least=1) for _ in range(5)]


# -- many waiters --------------------------------------------------------------------------------


async def test_a_thousand_waiters_of_one_name_need_few_connections(
    own_redis: RedisServer, dlocks: None
) -> None:
    order: list[int] = []

    async def work(number: int) -> None:
        async with Lock("it", wait=60):
            order.append(number)

    holder = Lock("it", bound=False)
    await holder.aacquire()
    tasks = [asyncio.create_task(work(number)) for number in range(1000)]
    await asyncio.sleep(0.2)
    assert connected(own_redis) <= RedisOptions().max_connections + 1
    await holder.arelease()
    await asyncio.gather(*tasks)
    assert sorted(order) == list(range(1000))
    assert connected(own_redis) <= RedisOptions().max_connections + 1


async def test_a_thousand_waiters_of_a_thousand_names_need_few_connections(
    own_redis: RedisServer, dlocks: None
) -> None:
    holders = [Lock(f"it:{number}", bound=False) for number in range(1000)]
    assert all(await asyncio.gather(*(holder.aacquire() for holder in holders)))
    waiters = [Lock(holder.name, wait=60, bound=False) for holder in holders]
    tasks = [asyncio.create_task(waiter.aacquire()) for waiter in waiters]
    await until_waiting("it:999", 1)
    assert connected(own_redis) <= RedisOptions().max_connections + 1
    await asyncio.gather(*(holder.arelease() for holder in holders))
    assert all(await asyncio.gather(*tasks))
    assert connected(own_redis) <= RedisOptions().max_connections + 1
    await asyncio.gather(*(waiter.arelease() for waiter in waiters))


async def test_callers_beyond_the_limit_are_served_in_order_and_give_up_in_time(
    own_redis: RedisServer,
) -> None:
    backend = backend_for(own_redis.url, command_timeout=60.0, options={"max_connections": 3})

    def acquire(name: str, patience: float) -> Coroutine[Any, Any, Any]:
        return backend.acall(backend.acquire, request(name), deadline=clock.now() + patience)

    await acquire("warm", 60)
    own_redis.pause()
    try:
        stuck = [asyncio.create_task(acquire(f"stuck:{n}", 60)) for n in range(2)]
        await asyncio.sleep(0.2)
        with pytest.raises(BackendUnavailable):
            await acquire("late", 0.1)
        gives_up = asyncio.create_task(acquire("gives up", 60))
        queued = [asyncio.create_task(acquire(f"queued:{n}", 60)) for n in range(5)]
        await asyncio.sleep(0.05)
        gives_up.cancel()
    finally:
        own_redis.resume()
    assert all(isinstance(answer, Lease) for answer in await asyncio.gather(*stuck, *queued))
    assert connected(own_redis) <= 3
    # The waiters that gave up have left no slot occupied.
    assert all(await asyncio.gather(*(acquire(f"then:{n}", 60) for n in range(8))))
    backend.close()


async def test_g5_the_late_reply_of_a_cancelled_call_answers_no_other_call(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, command_timeout=60.0)
    # Load the scripts.
    grant(backend, request("warm"))
    await backend.acall(backend.locked, "other", deadline=backend.call_deadline())
    proxy.delay = 0.5
    seen = len(proxy.commands)
    call = asyncio.create_task(backend.acall(backend.acquire, request(), deadline=clock.now() + 60))
    await asyncio.to_thread(proxy.wait_until, lambda proxy: len(proxy.commands) > seen)
    call.cancel()
    await asyncio.wait({call})
    proxy.delay = 0.0
    # If this reply went to the next command, it would count as a lease.
    assert not await backend.acall(backend.locked, "other", deadline=backend.call_deadline())
    met = await backend.acall(backend.acquire, request(), deadline=backend.call_deadline())
    assert isinstance(met, Contention)
    backend.close()


# -- several event loops ----------------------------------------------------------------

PROGRAM = """
import asyncio, gc, logging, os, threading
# Hide warnings about slow steps; objects destroyed or never awaited are errors.
logging.getLogger("asyncio").setLevel(logging.ERROR)
from django.conf import settings
settings.configure(DLOCKS={"default": {
    "BACKEND": "django_dlock.backends.redis.RedisBackend", "LOCATION": os.environ["REDIS_URL"],
    "WAIT": 60, "OPTIONS": {"command_timeout": 10.0},
}})
from django_dlock import Lock, locks
from django_dlock.core import watchdog

async def cycle(name="it"):
    async with Lock(name):
        await asyncio.sleep(0)

async def contended(name="it"):
    await asyncio.gather(*(cycle(name) for _ in range(5)))

def end():
    gc.collect()
    threads = [thread.name for thread in threading.enumerate()][1:]
    assert len(threads) < 20 and all(name.startswith("dlock-") for name in threads), threads
"""


@pytest.fixture
def run(own_redis: RedisServer) -> Callable[..., None]:
    """Runs a program that must succeed without output, even when objects are garbage-collected."""

    def run(source: str, **env: str) -> None:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-X", "dev", "-c", PROGRAM + textwrap.dedent(source)],
            env={**os.environ, "REDIS_URL": own_redis.url, **env},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout

    return run


LOOPS = ["asyncio", "uvloop"]


def chosen(loop: str) -> str:
    """The source line that makes ``run`` use this loop."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
        return "import uvloop, warnings; run = uvloop.run"
    return "run = asyncio.run"


@pytest.mark.parametrize("loop", LOOPS)
def test_successive_event_loops_leave_nothing_behind(
    run: Callable[..., None], own_redis: RedisServer, loop: str
) -> None:
    run(f"""
        {chosen(loop)}
        import redis
        for number in range(50):
            run(contended() if number % 5 == 0 else cycle())
        end()
        with redis.Redis.from_url(os.environ["REDIS_URL"]) as asking:
            # One for each coroutine of the busiest moment, the listener's, and the test's own.
            assert len(asking.client_list()) <= 7, asking.client_list()
        """)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_event_loop_may_end_while_coroutines_wait(run: Callable[..., None], loop: str) -> None:
    run(f"""
        {chosen(loop)}
        holder = Lock("it", bound=False)
        holder.acquire()

        async def main():
            tasks = [asyncio.create_task(cycle()) for _ in range(20)]
            await asyncio.gather(*(cycle(f"own:{{n}}") for n in range(20)))
            await asyncio.sleep(0.1)
            return tasks

        for _ in range(5):
            assert all(task.cancelled() for task in run(main()))
        holder.release()
        run(cycle())
        end()
        """)


@pytest.mark.parametrize("loop", LOOPS)
def test_event_loops_of_several_threads_share_a_name(run: Callable[..., None], loop: str) -> None:
    run(f"""
        {chosen(loop)}
        count = 0

        async def work():
            global count
            for _ in range(20):
                async with Lock("it", wait=50):
                    seen = count
                    await asyncio.sleep(0)
                    count = seen + 1

        async def main():
            await asyncio.gather(work(), work(), work())

        threads = [threading.Thread(target=lambda: run(main())) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert count == 360, count
        end()
        """)


def test_async_to_sync_leaves_nothing_behind(run: Callable[..., None]) -> None:
    run("""
        from asgiref.sync import async_to_sync
        for _ in range(20):
            async_to_sync(cycle)()
        end()
        """)


def test_a_block_whose_loop_was_closed_releases_its_lease(
    own_redis: RedisServer, dlocks: None
) -> None:
    entered: list[bool] = []

    async def block() -> None:
        async with Lock("it"):
            entered.append(True)
            await asyncio.Event().wait()

    coroutine = block()
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    while not entered:
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    # As the garbage collector does, but without its message on standard error.
    coroutine.close()
    assert Lock("it").acquire()
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# -- forks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_g8_a_child_forked_in_a_running_loop_does_not_use_its_sockets(
    run: Callable[..., None], loop: str
) -> None:
    run(f"""
        {chosen(loop)}
        backend = locks["default"]

        async def main():
            lock = Lock("it")
            waiter = Lock("other", bound=False)
            holder = Lock("other", bound=False)
            await lock.aacquire()
            await holder.aacquire()
            waiting = asyncio.create_task(waiter.aacquire(timeout=50))
            await asyncio.sleep(0.1)
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    status = 1
                    try:
                        assert (lock.state, lock.lost_reason) == ("lost", "fork")
                        child = threading.Thread(target=lambda: run(cycle("childs")))
                        child.start()
                        child.join()
                        gc.collect()
                        assert not Lock("it").acquire(blocking=False)
                        status = 0
                    finally:
                        os._exit(status)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            # On the same connections: the loop must still watch them for replies.
            await lock.arenew()
            await holder.arelease()
            assert await waiting
            await waiter.arelease()
            await lock.arelease()

        run(main())
        end()
        """)


def test_g8_a_child_that_uses_its_parents_loop_opens_its_own_connection(
    run: Callable[..., None],
) -> None:
    run("""
        import redis
        asking = redis.Redis.from_url(os.environ["REDIS_URL"])
        loop = asyncio.new_event_loop()
        loop.run_until_complete(cycle())
        before = len(asking.client_list())
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                loop.run_until_complete(cycle("childs"))
                with redis.Redis.from_url(os.environ["REDIS_URL"]) as asking:
                    status = 0 if len(asking.client_list()) == before + 2 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        loop.run_until_complete(cycle())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        asking.close()
        end()
        """)
