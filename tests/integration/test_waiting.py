"""For the backend every waiter is separate, whatever happens to others in its process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_dlock import Lock, locks
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured
from tests.support.holder import Holder

CROWD = 100

CROWD_OF_THREADS = (
    "def wait():\n"
    "    with Lock('it', wait=None): say('mine')\n"
    "def crowd(count):\n"
    "    threads = [threading.Thread(target=wait) for _ in range(count)]\n"
    "    for thread in threads: thread.start()\n"
    "    return threads"
)


@pytest.fixture
def dlocks(own_redis: RedisServer) -> Iterator[dict[str, Any]]:
    entries = {"default": alias(own_redis.url, TTL=30.0, OPTIONS={"command_timeout": 5.0})}
    with configured(entries):
        yield entries


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def waiting(name: str = "it") -> int:
    info = locks["default"].get(name)
    assert info is not None
    return info.waiting


def test_threads_and_tasks_of_one_process_are_all_queued_and_all_get_the_lock(
    dlocks: dict[str, Any],
) -> None:
    holder = Lock("it", bound=False)
    holder.acquire()
    got: list[int] = []

    def thread(number: int) -> None:
        with Lock("it", wait=None):
            got.append(number)

    async def task(number: int) -> None:
        async with Lock("it", wait=None):
            got.append(number)

    async def tasks() -> None:
        await asyncio.gather(*map(task, range(CROWD, 2 * CROWD)))

    crowd = [threading.Thread(target=thread, args=[number]) for number in range(CROWD)]
    crowd.append(threading.Thread(target=asyncio.run, args=[tasks()]))
    for member in crowd:
        member.start()
    until(lambda: waiting() == 2 * CROWD)
    holder.release()
    for member in crowd:
        member.join(120)
    assert sorted(got) == list(range(2 * CROWD))


def test_g8_a_child_forked_while_threads_wait_can_wait_itself(dlocks: dict[str, Any]) -> None:
    lock = Lock("it")
    lock.acquire()
    with Holder(dlocks) as parent:
        parent.do(CROWD_OF_THREADS)
        parent.do("threads = crowd(5)")
        until(lambda: waiting() == 5)
        mine = "[(l := Lock('it')).acquire(timeout=20), l.release()]"
        parent.begin(f"in_fork({mine!r})")
        until(lambda: waiting() == 6)
        lock.release()
        assert parent.answer() == [True, None]
        parent.do("for thread in threads: thread.join()")


def test_g7_an_interrupted_waiter_leaves_the_queue_and_the_others_continue(
    dlocks: dict[str, Any],
) -> None:
    lock = Lock("it")
    lock.acquire()
    with Holder(dlocks) as process:
        process.do(CROWD_OF_THREADS)
        process.begin("Lock('it', wait=None).acquire()")
        until(lambda: waiting() == 1)
        process.interrupt()
        with pytest.raises(Exception, match="KeyboardInterrupt"):
            process.answer()
        process.do("threads = crowd(3)")
        until(lambda: waiting() == 3)
        lock.release()
        process.do("for thread in threads: thread.join()")
        assert process.said.count(["mine"]) == 3


@pytest.mark.parametrize("renew", [True, False])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_waiter_is_woken_when_an_operator_breaks_the_lock(
    dlocks: dict[str, Any], renew: bool, awaited: bool
) -> None:
    # Without the wake-up it would ask again at the end of the lock's TTL.
    holder, lock = Lock("it", bound=False, ttl=600), Lock("it", bound=False, renew=renew, wait=None)
    holder.acquire()

    def wait() -> None:
        if awaited:
            asyncio.run(lock.aacquire())
        else:
            lock.acquire()

    waiter = threading.Thread(target=wait)
    waiter.start()
    until(lambda: waiting() == 1)
    assert locks["default"].break_("it", owner=holder.owner or "")
    waiter.join(60)
    assert lock.held
    lock.release()
