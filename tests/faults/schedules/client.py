"""A process that locks: ``python -m tests.faults.schedules.client CONFIGURATION``.

Its threads and coroutines acquire one of a few names, hold it, and release it, over and over, and
write all of it into the history. It ends when the gate ``STOP`` is open. ``what`` in its
configuration makes it run a management command instead.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from django_dlock import clock

from ..suite.journal import Journal

STOP = "stop"
"""The gate that ends all clients."""
LONGEST_HOLD = 1.5
"""The longest time for which a client holds, as a multiple of the TTL; the default."""

POLL = 0.01
"""Seconds between two looks at the lock's state."""
TELL_EVERY = 0.1
"""Seconds between two lines about a lock that is held."""
STALLED = 0.1
"""Seconds by which a thread must be late for that to be told."""
WAITS = (0.0, 0.0, 0.3, 1.5)
"""The choices of a caller's patience, in seconds."""


class Client:
    """All threads and coroutines of this process.

    Args:
        configuration: ``history``, ``name``, ``names``, ``seed``, ``ttl``, ``threads``,
            ``coroutines``; ``warm``, how many threads lock at the same time before all others;
            ``long``, the share of holds that are long, and ``longest``, see ``LONGEST_HOLD``.
    """

    def __init__(self, configuration: dict[str, Any]) -> None:
        self._journal = Journal(Path(configuration["history"]))
        self._configuration = configuration
        self._numbers = itertools.count()
        self._ended = threading.Event()

    def run(self) -> None:
        """Until the gate is open."""
        count, me = self._configuration, self._configuration["name"]
        self._warm_up(count.get("warm", 0))
        threads = [
            threading.Thread(target=self._work, args=(f"{me}.t{number}",))
            for number in range(count["threads"])
        ]
        loop = threading.Thread(target=lambda: asyncio.run(self._coroutines(f"{me}.c")))
        for each in (*threads, loop):
            each.start()
        self._tell("ready", name=me)
        before = clock.now()
        while not self._journal.is_open(STOP):
            time.sleep(2 * POLL)
            now = clock.now()
            if now - before > STALLED:
                self._tell("stall", at=before, until=now)
            before = now
        self._ended.set()
        for each in (*threads, loop):
            each.join(30)
        self._tell("left", name=me)

    @staticmethod
    def _warm_up(count: int) -> None:
        """Let the process make as many connections as so many threads need at once."""
        from django_dlock import Lock

        def lock(number: int) -> None:
            for _ in range(20):
                with Lock(f"warm-{number}", wait=10.0):
                    pass

        threads = [threading.Thread(target=lock, args=(number,)) for number in range(count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    async def _coroutines(self, me: str) -> None:
        count: int = self._configuration["coroutines"]
        await asyncio.gather(*(self._awork(f"{me}{number}") for number in range(count)))

    # -- one thread, one coroutine ---------------------------------------------------------

    def _work(self, who: str) -> None:
        from django_dlock import Lock

        for name, patience, seconds, pause in self._plans(who):
            lock = Lock(name)
            one = self._call("acquire", who, name, patience)
            outcome = self._outcome(lambda lock=lock, p=patience: lock.acquire(timeout=p))
            if self._done(one, outcome, lock):
                until, last, told = clock.now() + seconds, clock.now(), 0.0
                while clock.now() < until and not self._ended.is_set():
                    now = clock.now()
                    if not lock.held:
                        break
                    last, told = now, self._held(one, now, told)
                    time.sleep(POLL)
                self._tell("ended", id=one, last=last, how=lock.lost_reason or "released")
                again = self._call("release", who, name, 0.0, grant=one)
                self._done(again, self._outcome(lock.release, "released"), lock)
            time.sleep(pause)

    async def _awork(self, who: str) -> None:
        from django_dlock import Lock

        for name, patience, seconds, pause in self._plans(who):
            lock = Lock(name)
            one = self._call("acquire", who, name, patience)
            outcome = await self._awaited(lock.aacquire(timeout=patience))
            if self._done(one, outcome, lock):
                until, last, told = clock.now() + seconds, clock.now(), 0.0
                while clock.now() < until and not self._ended.is_set():
                    now = clock.now()
                    if not lock.held:
                        break
                    last, told = now, self._held(one, now, told)
                    await asyncio.sleep(POLL)
                self._tell("ended", id=one, last=last, how=lock.lost_reason or "released")
                again = self._call("release", who, name, 0.0, grant=one)
                self._done(again, await self._awaited(lock.arelease(), "released"), lock)
            await asyncio.sleep(pause)

    def _plans(self, who: str) -> Any:
        """Name, patience, seconds to hold, and seconds to pause afterwards."""
        ttl, longest = self._configuration["ttl"], self._configuration["longest"]
        chance = random.Random(f"{self._configuration['seed']}: {who}")
        while not self._ended.is_set():
            name = chance.choice(self._configuration["names"])
            is_long = chance.random() < self._configuration["long"]
            seconds = chance.uniform(ttl / 2, longest * ttl) if is_long else chance.random()
            yield name, chance.choice(WAITS), seconds, chance.uniform(0.0, 0.3)

    # -- what is told ------------------------------------------------------------------------

    def _tell(self, event: str, *, at: float | None = None, **facts: Any) -> None:
        now = clock.now() if at is None else at
        self._journal.write(event, at=now, pid=os.getpid(), **facts)

    def _call(self, op: str, who: str, name: str, patience: float, **facts: Any) -> str:
        one = f"{who}-{os.getpid()}-{next(self._numbers)}"
        self._tell("call", id=one, who=who, op=op, name=name, patience=patience, **facts)
        return one

    def _done(self, one: str, outcome: str, lock: Any) -> bool:
        """Tell how a call ended; returns whether it got the lock."""
        token, at = lock.token if outcome == "granted" else None, clock.now()
        if outcome == "granted" and not lock.held:
            # It was lost at once.
            outcome = "lost"
        self._tell("done", at=at, id=one, outcome=outcome, token=token)
        return outcome == "granted"

    def _held(self, one: str, now: float, told: float) -> float:
        if now - told < TELL_EVERY:
            return told
        self._tell("held", at=now, id=one)
        return now

    @staticmethod
    def _outcome(call: Any, good: str = "granted") -> str:
        try:
            return good if call() is not False else "contended"
        except Exception as error:
            return _told(error)

    @staticmethod
    async def _awaited(call: Any, good: str = "granted") -> str:
        try:
            return good if await call is not False else "contended"
        except Exception as error:
            return _told(error)


def _told(error: Exception) -> str:
    from django_dlock import BackendUnavailable, LeaseLost

    if isinstance(error, LeaseLost):
        return "lost"
    if isinstance(error, BackendUnavailable):
        return "unavailable"
    return f"{type(error).__name__}: {error}"[:300]


def main(configuration: dict[str, Any]) -> None:
    import django
    from django.conf import settings
    from django.core.management import call_command

    settings.configure(
        SECRET_KEY="schedules",
        DLOCKS=configuration["dlocks"],
        DATABASES=configuration["databases"],
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_dlock"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
    )
    django.setup()
    logging.disable(logging.CRITICAL)
    if "command" in configuration:
        call_command(*configuration["command"])
        return
    Client(configuration).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
