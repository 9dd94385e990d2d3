"""Coroutines on one Redis: their connections, loops that come and go, forks, crowds."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis

from django_dlock import Lock, clock, locks
from django_dlock.backends import redis_mailbox
from django_dlock.backends.redis_parameters import MAX_CONNECTIONS
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease
from testproject.servers import RedisServer
from tests.faults.aliases import alias, configured
from tests.proxy import Proxy

from .tools import backend_for, client, grant, request

OURS = ("dlock-watchdog", "dlock-events", "dlock-undo")
"""Threads that serve coroutines, too."""

PATIENT: dict[str, Any] = {"TTL": 180, "WAIT": 60, "OPTIONS": {"command_timeout": 60.0}}
"""Of aliases, where no time is measured: a busy machine takes long for a thousand of anything."""


@pytest.fixture
def dlocks(own_redis: RedisServer) -> Iterator[None]:
    with configured({"default": alias(own_redis.url, **PATIENT)}):
        yield


def connected(server: RedisServer) -> int:
    """How many clients the server has, but for the one that asks."""
    with client(server) as asking:
        return len(asking.client_list()) - 1


def gone(server: RedisServer, but: int = 0) -> bool:
    """Whether all clients leave the server soon."""
    end = clock.now() + 30
    while connected(server) > but and clock.now() < end:
        pass
    return connected(server) == but


class Threads:
    """Counts the threads that start."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def __enter__(self) -> Threads:
        self._start = start = threading.Thread.start

        def count(thread: threading.Thread) -> None:
            self.started.append(thread.name)
            start(thread)

        threading.Thread.start = count  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        threading.Thread.start = self._start  # type: ignore[method-assign]


# -- without a thread --------------------------------------------------------------------


async def test_no_call_of_a_coroutine_starts_a_thread(dlocks: None) -> None:
    holder = Lock("it", bound=False)
    # The listing that will see the waiter is for operators, and theirs is a thread.
    locks["default"].get("it")
    with Threads() as threads:
        await holder.aacquire()
        assert await holder.alocked()
        await holder.arenew()
        waiter = asyncio.create_task(Lock("it").aacquire())
        await until_waiting("it", 1)
        await holder.arelease()
        assert await waiter
    assert set(threads.started) <= {*OURS, "dlock-get"}


async def until_waiting(name: str, count: int, using: str = "default") -> None:
    """Until so many wait for the name at the server.

    Raises:
        AssertionError: They do not come; a waiter that has failed never does.
    """
    end = clock.now() + 60
    while clock.now() < end:
        info = await locks[using].acall("get", name)
        if info is not None and info.waiting >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name!r} has no {count} waiters: {info}")


async def test_an_awaited_cycle_is_two_commands_on_one_connection(own_redis: RedisServer) -> None:
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
    own_redis: RedisServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by itself.
    monkeypatch.setattr(redis_mailbox, "LONGEST_BLOCK", 3600.0)
    # The longest with which a letter counts.
    entry = {"TTL": 30, "WAIT": 60, "OPTIONS": {"command_timeout": 1.0}}
    direct = alias(own_redis.url, **PATIENT)

    async def hand_over(least: int) -> list[str]:
        await holder.aacquire()
        passed, waiter = len(proxy.commands), Lock("it")
        waiting = asyncio.create_task(waiter.aacquire())
        await asyncio.to_thread(
            proxy.wait_until, lambda proxy: len(proxy.commands) >= passed + least
        )
        await until_waiting("it", 1, using="direct")
        await holder.arelease()
        assert await waiting
        seen = [c for c in proxy.commands[passed:] if c in ("EVAL", "EVALSHA", "SUBSCRIBE")]
        await waiter.arelease()
        return seen

    with configured({"default": alias(proxy.url, **entry), "direct": direct}):
        holder = Lock("it", using="direct", bound=False)
        # The first one subscribes, and asks again once.
        first = await hand_over(least=3)
        assert first[:3] == ["EVALSHA", "SUBSCRIBE", "EVALSHA"]
        # A letter that comes after a second is asked about; no machine is that busy each time.
        assert ["EVALSHA"] in [await hand_over(least=1) for _ in range(5)]


class OwnConnection(redis.Connection):
    """A project's, of which nothing is known."""


def greet(connection: redis.Connection) -> None:
    """A project's handshake, for connections of threads."""
    connection.on_connect()


@pytest.mark.parametrize(
    ("kwargs", "database"),
    [({"connection_class": OwnConnection}, 1), ({"redis_connect_func": greet}, 2)],
)
async def test_what_has_no_twin_for_coroutines_is_called_on_threads(
    own_redis: RedisServer, kwargs: dict[str, Any], database: int
) -> None:
    cache = {
        "BACKEND": "django_redis.cache.RedisCache",
        # A database of its own: django-redis keeps pools per URL, whoever asked for it first.
        "LOCATION": f"{own_redis.url[:-1]}{database}",
        "OPTIONS": {"CONNECTION_POOL_KWARGS": kwargs},
    }
    entry = alias("", CACHE="default", **PATIENT)
    del entry["LOCATION"]
    with configured({"default": entry}, CACHES={"default": cache}), Threads() as threads:
        async with Lock("it"):
            assert await Lock("it", bound=False).alocked()
    assert {"dlock-acquire", "dlock-locked", "dlock-release"} <= set(threads.started)


# -- crowds --------------------------------------------------------------------------------


async def test_a_thousand_waiters_of_one_name_need_few_connections(
    own_redis: RedisServer, dlocks: None
) -> None:
    order: list[int] = []

    async def work(number: int) -> None:
        async with Lock("it", wait=60):
            order.append(number)

    holder = Lock("it", bound=False)
    await holder.aacquire()
    with Threads() as threads:
        tasks = [asyncio.create_task(work(number)) for number in range(1000)]
        await asyncio.sleep(0.2)
        assert connected(own_redis) <= MAX_CONNECTIONS + 1
        await holder.arelease()
        await asyncio.gather(*tasks)
    assert sorted(order) == list(range(1000))
    assert connected(own_redis) <= MAX_CONNECTIONS + 3
    assert set(threads.started) <= set(OURS)


async def test_a_thousand_waiters_of_a_thousand_names_need_few_connections(
    own_redis: RedisServer, dlocks: None
) -> None:
    holders = [Lock(f"it:{number}", bound=False) for number in range(1000)]
    with Threads() as threads:
        assert all(await asyncio.gather(*(holder.aacquire() for holder in holders)))
        waiters = [Lock(holder.name, wait=60, bound=False) for holder in holders]
        tasks = [asyncio.create_task(waiter.aacquire()) for waiter in waiters]
        await until_waiting("it:999", 1)
        assert connected(own_redis) <= MAX_CONNECTIONS + 3
        await asyncio.gather(*(holder.arelease() for holder in holders))
        assert all(await asyncio.gather(*tasks))
        assert connected(own_redis) <= MAX_CONNECTIONS + 3
        await asyncio.gather(*(waiter.arelease() for waiter in waiters))
    assert set(threads.started) <= {*OURS, "dlock-get", "dlock-connect"}


async def test_those_beyond_the_bound_come_in_their_turn_and_give_up_in_time(
    own_redis: RedisServer,
) -> None:
    backend = backend_for(own_redis.url, command_timeout=60.0, options={"max_connections": 2})

    def acquire(name: str, patience: float) -> Coroutine[Any, Any, Any]:
        return backend.acall("acquire", request(name), deadline=clock.now() + patience)

    await acquire("warm", 60)
    own_redis.pause()
    try:
        stuck = [asyncio.create_task(acquire(f"stuck:{n}", 60)) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(BackendUnavailable):
            await acquire("late", 0.1)
        gives_up = asyncio.create_task(acquire("gives up", 60))
        queued = [asyncio.create_task(acquire(f"queued:{n}", 60)) for n in range(5)]
        await asyncio.sleep(0.05)
        gives_up.cancel()
    finally:
        own_redis.resume()
    assert all(isinstance(answer, Lease) for answer in await asyncio.gather(*stuck, *queued))
    assert connected(own_redis) == 2
    # No place was lost with those that gave up.
    assert all(await asyncio.gather(*(acquire(f"then:{n}", 60) for n in range(8))))
    backend.close()


async def test_who_lets_go_of_a_lease_goes_before_who_wants_one(own_redis: RedisServer) -> None:
    backend = backend_for(own_redis.url, command_timeout=60.0, options={"max_connections": 2})
    first, second = [request(name) for name in ("a", "b")]
    for attempt in (first, second):
        assert isinstance(await backend.acall("acquire", attempt, deadline=clock.now() + 60), Lease)
    done: list[str] = []

    async def call(what: str, *args: Any, **kwargs: Any) -> None:
        await backend.acall(what, *args, deadline=clock.now() + 60, **kwargs)
        done.append(what)

    own_redis.pause()
    calls = [asyncio.create_task(call("locked", "a")) for _ in range(2)]
    calls += [asyncio.create_task(call("acquire", request(f"{n}"))) for n in range(20)]
    await asyncio.sleep(0.05)
    calls.append(asyncio.create_task(call("release", "a", first.owner, min_hold=0.0)))
    calls.append(asyncio.create_task(call("undo", second)))
    await asyncio.sleep(0.05)
    own_redis.resume()
    await asyncio.gather(*calls)
    # The first may well be over while the other one's place still connects.
    assert {"release", "undo"} <= set([what for what in done if what != "locked"][:3])
    backend.close()


async def test_g5_a_cancelled_call_leaves_its_late_reply_to_nobody(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, command_timeout=60.0)
    # Loads the scripts.
    grant(backend, request("warm"))
    await backend.acall("locked", "other", deadline=backend.call_deadline())
    proxy.delay = 0.5
    seen = len(proxy.commands)
    call = asyncio.create_task(backend.acall("acquire", request(), deadline=clock.now() + 60))
    await asyncio.to_thread(proxy.wait_until, lambda proxy: len(proxy.commands) > seen)
    call.cancel()
    await asyncio.wait({call})
    proxy.delay = 0.0
    # Its reply would be taken for a lease.
    assert not await backend.acall("locked", "other", deadline=backend.call_deadline())
    met = await backend.acall("acquire", request(), deadline=backend.call_deadline())
    assert isinstance(met, Contention)
    backend.close()


# -- loops that come and go ----------------------------------------------------------------

PROGRAM = """
import asyncio, gc, logging, os, threading
# Of slow steps; what is destroyed or never retrieved is an error.
logging.getLogger("asyncio").setLevel(logging.ERROR)
from django.conf import settings
settings.configure(DLOCKS={"default": {
    "BACKEND": "django_dlock.backends.redis.RedisBackend", "LOCATION": os.environ["REDIS_URL"],
    "WAIT": 60, "OPTIONS": {"command_timeout": 10.0},
}})
from django_dlock import Lock, locks, watchdog

async def cycle(name="it"):
    async with Lock(name):
        await asyncio.sleep(0)

async def contended(name="it"):
    await asyncio.gather(*(cycle(name) for _ in range(5)))

def end():
    gc.collect()
    threads = {thread.name for thread in threading.enumerate()} - {"MainThread"}
    assert threads <= {"dlock-watchdog", "dlock-events", "dlock-undo"}, threads
"""


@pytest.fixture
def run(own_redis: RedisServer) -> Callable[..., None]:
    """Runs a program that must end well and say nothing, whatever is collected."""

    def run(source: str, **env: str) -> None:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-X", "dev", "-c", PROGRAM + textwrap.dedent(source)],
            env={**os.environ, "REDIS_URL": own_redis.url, **env},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout

    return run


LOOPS = ["asyncio", "uvloop"]


def chosen(loop: str) -> str:
    """The line that lets ``asyncio.run`` use it."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
        return "import uvloop, warnings; run = uvloop.run"
    return "run = asyncio.run"


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_that_follow_each_other_leave_nothing_behind(
    run: Callable[..., None], own_redis: RedisServer, loop: str
) -> None:
    run(f"""
        {chosen(loop)}
        import redis
        for number in range(50):
            run(contended() if number % 5 == 0 else cycle())
        end()
        with redis.Redis.from_url(os.environ["REDIS_URL"]) as asking:
            # The asking one and, of threads, the watchdog's at the most.
            assert len(asking.client_list()) <= 2, asking.client_list()
        """)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_may_end_while_coroutines_wait(run: Callable[..., None], loop: str) -> None:
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
def test_many_loops_of_many_threads_share_a_name(run: Callable[..., None], loop: str) -> None:
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


def test_a_loop_closed_without_a_word_is_forgotten(own_redis: RedisServer, dlocks: None) -> None:
    async def hold() -> Lock:
        lock = Lock("it")
        await lock.aacquire()
        return lock

    def loops() -> None:
        for _ in range(3):
            loop = asyncio.new_event_loop()
            lock = loop.run_until_complete(hold())
            loop.close()
            lock.release()
        asyncio.run(cycle())
        gc.collect()

    # Python itself complains of the sockets then, and so it should.
    with pytest.warns(ResourceWarning):
        loops()
    # What threads have: the release's connection.
    assert gone(own_redis, but=1)


async def cycle() -> None:
    async with Lock("it"):
        pass


# Python's own, of the sockets.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_call_left_by_its_closed_loop_passes_its_place_to_nobody(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, command_timeout=60.0, options={"max_connections": 2})

    def ask() -> Coroutine[Any, Any, Any]:
        return backend.acall("locked", "it", deadline=clock.now() + 60)

    async def main() -> list[asyncio.Task[Any]]:
        # Two connections, and the script.
        await asyncio.gather(ask(), ask())
        proxy.black_hole()
        coroutines.extend(ask() for _ in range(3))
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        await asyncio.to_thread(proxy.wait_until, lambda proxy: proxy.swallowed >= 2)
        return tasks

    coroutines: list[Coroutine[Any, Any, Any]] = []
    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(main())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    # As the collector does; the third one waits for the place of the first.
    for coroutine in coroutines:
        coroutine.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    del tasks, task, coroutine
    coroutines.clear()
    gc.collect()


def test_a_block_left_by_its_closed_loop_gives_its_lease_back(
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
    # As the collector does, but that would be said on standard error.
    coroutine.close()
    assert Lock("it").acquire()
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# -- forks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_g8_a_child_of_a_running_loop_leaves_its_sockets_alone(
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
            # On the same connections, whose readers are still watched.
            await lock.arenew()
            await holder.arelease()
            assert await waiting
            await waiter.arelease()
            await lock.arelease()

        run(main())
        end()
        """)


def test_g8_a_child_that_goes_on_with_its_parents_loop_has_a_connection_of_its_own(
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
