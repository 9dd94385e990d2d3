"""One process has one place at the backend, however many of its callers want the name."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_dlock import Lock, locks, queueing
from testproject.servers import RedisServer
from tests.faults.aliases import alias, configured
from tests.faults.holder import Holder

CROWD = 1000


@pytest.fixture
def dlocks(own_redis: RedisServer) -> Iterator[dict[str, Any]]:
    entries = {"default": alias(own_redis.url, TTL=30.0, OPTIONS={"command_timeout": 5.0})}
    with configured(entries):
        yield entries


def standing(name: str = "it") -> int:
    return len(queueing._lines.get((locks["default"], name), ()))


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def waiting(name: str = "it") -> int:
    info = locks["default"].get(name)
    assert info is not None
    return info.waiting


def test_a_thousand_threads_and_a_thousand_tasks_are_one_waiter(
    dlocks: dict[str, Any], own_redis: RedisServer
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
    with redis.Redis(port=own_redis.port) as admin:
        for member in crowd:
            member.start()
        until(lambda: standing() == 2 * CROWD)
        assert waiting() == 1
        # Some for locks, one for letters of threads, a few for the loop, one for this test.
        assert len(admin.client_list()) <= 8
        before = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
        time.sleep(1)
        assert waiting() == 1
        # Not one for each of them: what is left is the first's, the watchdog's and ours.
        assert admin.info("commandstats")["cmdstat_evalsha"]["calls"] - before < 10
        before = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
        holder.release()
        for member in crowd:
            member.join(120)
        after = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert sorted(got) == list(range(2 * CROWD))
    # An ask and a release each, and whatever the machine makes of it.
    assert after - before < 2 * CROWD * 3
    assert queueing._lines == {}


def test_a_process_of_many_threads_takes_no_turn_of_a_process_of_one(
    dlocks: dict[str, Any],
) -> None:
    script = (
        "import time\n"
        "def run(threads):\n"
        "    counts, end = [0] * threads, time.monotonic() + 2\n"
        "    def work(number):\n"
        "        while time.monotonic() < end:\n"
        # Long enough for the other process to come back: only who waits can have a turn.
        "            with Lock('it', wait=None): counts[number] += 1; time.sleep(0.005)\n"
        "    crowd = [threading.Thread(target=work, args=[n]) for n in range(threads)]\n"
        "    [t.start() for t in crowd]; [t.join() for t in crowd]\n"
        "    return counts\n"
        "with Lock('warm'): pass"
    )
    with Holder(dlocks) as one, Holder(dlocks) as many:
        for process in (one, many):
            process.do(script)
        one.begin("run(1)")
        many.begin("run(20)")
        alone, together = one.answer()[0], many.answer()
    # It was one turn in twenty.
    assert alone >= sum(together) / 2
    # And inside of the process nobody starves either.
    assert min(together) >= max(together) / 2


def test_g8_a_child_forked_while_threads_stand_in_line_asks_at_once(
    dlocks: dict[str, Any],
) -> None:
    lock = Lock("it")
    lock.acquire()
    with Holder(dlocks) as parent:
        parent.do(
            "from django_dlock import queueing\n"
            "def wait():\n"
            "    with Lock('it', wait=None): pass\n"
            "crowd = [threading.Thread(target=wait) for _ in range(5)]\n"
            "for thread in crowd: thread.start()\n"
            "import time\n"
            "while len(queueing._lines.get((locks['default'], 'it'), ())) < 5: time.sleep(0.01)"
        )
        until(lambda: waiting() == 1)
        mine = "[queueing._lines == {}, (l := Lock('it')).acquire(timeout=20), l.release()]"
        parent.begin(f"in_fork({mine!r})")
        # The parent's place, and the child's own.
        until(lambda: waiting() == 2)
        lock.release()
        assert parent.answer() == [True, True, None]
        parent.do("for thread in crowd: thread.join()")
        assert parent.do("queueing._lines == {}")


def test_the_line_goes_on_behind_a_first_one_that_was_interrupted(
    dlocks: dict[str, Any],
) -> None:
    lock = Lock("it")
    lock.acquire()
    with Holder(dlocks) as process:
        process.do(
            "from django_dlock import queueing\n"
            "import time\n"
            "def wait(): \n"
            "    with Lock('it', wait=None): say('mine')\n"
            "def first():\n"
            "    say('waits')\n"
            "    Lock('it', wait=None).acquire()\n"
            "def stand(count):\n"
            "    while len(queueing._lines.get((locks['default'], 'it'), ())) < count:\n"
            "        time.sleep(0.01)\n"
            "def behind():\n"
            "    stand(1)\n"
            "    for number in range(3): threading.Thread(target=wait).start()\n"
            "    stand(4)\n"
            "    say('all')\n"
            "threading.Thread(target=behind).start()"
        )
        process.begin("first()")
        process.wait_until_said("all")
        process.interrupt()
        with pytest.raises(Exception, match="KeyboardInterrupt"):
            process.answer()
        lock.release()
        process.do("while queueing._lines: time.sleep(0.01)")
        assert process.said.count(["mine"]) == 3
