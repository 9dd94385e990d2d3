"""Runs the site, its workers and a few orders, until Ctrl-C."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import sys
from collections.abc import Callable
from functools import partial

from django_dlock import clock
from testproject.servers import free_port

from .interrupt import pause
from .report import LOCKED, RECORD
from .stage import Stage

PORT = 8000
USER = "admin"
PACE = 1.0
"""Seconds between two orders."""
HELD_FOR = 25.0
"""Seconds that every fifth order takes, so that there is a lock to see."""

QUEUE, KILLED, STOPPED = "stock:count", "import:feed", "export"
DEADLOCK = ("transfer:a", "transfer:b")
KILL_EVERY = 20.0
"""Seconds until the next process takes over the lock of the killed one and is killed, too."""
STOP_EVERY = 60.0
"""Seconds between two processes that are stopped."""
STOPPED_TTL = 90.0
"""TTL of a stopped process's lock: a process counts as silent only after 15 s, so two overlap."""


def serve() -> int:
    """Print the address of the admin, and run until Ctrl-C; returns the exit code."""
    os.environ["DLOCK_STATISTICS"] = "1"
    with contextlib.suppress(KeyboardInterrupt), Stage() as stage:
        password = _create_user()
        port = _port()
        # The normal settings of the site, not those of the demonstration with its slow bodies.
        site = ("-m", "django", "runserver", "--settings", "testproject.settings")
        stage.start(*site, "--noreload", "--insecure", f"127.0.0.1:{port}", name="site")
        stage.start_worker([LOCKED, RECORD], "worker", children=8)
        stage.start("-m", "testproject.demo.holder", "queue", QUEUE, name="queue")
        stage.start("-m", "testproject.demo.holder", "deadlock", *DEADLOCK, name="deadlock")
        if not _answers(stage, port):
            print(f"The site did not start.\n{stage.logs()}", file=sys.stderr)
            return 1
        print(f"Admin      http://127.0.0.1:{port}/admin/")
        print(f"Login      {USER}")
        print(f"Password   {password}")
        print(f"Redis      {os.environ['REDIS_URL']}")
        print()
        print("An order comes every few seconds. Within half a minute, Held locks also shows:")
        print(f"  {QUEUE:12}  held, and others wait for it")
        print(f"  {KILLED:12}  held by a process that is dead: it was killed (SIGKILL).")
        print(f"  {'':12}  Every {KILL_EVERY:g} s another takes it over and is killed, too")
        print(f"  {STOPPED + ':1':12}  held by a process that is silent: it was stopped (SIGSTOP)")
        print(f"  {DEADLOCK[0]:12}  and {DEADLOCK[1]}: the holder of each waits for the other")
        print("The page of a lock says why nothing moves; Who blocks whom shows all chains.")
        print("Lock events has the take-overs, the lost locks and the long waits.")
        print("Lock statistics has pictures of all this, which move within a minute or two.")
        print("Ctrl-C ends everything.", flush=True)
        _trickle(stage)
        print(f"A process ended by itself.\n{stage.logs()}", file=sys.stderr)
        return 1
    print("\nStopped.")
    return 0


def _trickle(stage: Stage) -> None:
    """Publish orders as long as all processes run, each of them twice."""
    from .tasks import TASKS

    harm = _Harm(stage)
    for number in itertools.count(1):
        column = (LOCKED, RECORD)[number % 2]
        work = HELD_FOR if number % 5 == 1 else 0.2
        for _ in range(2):
            TASKS[column].apply_async((number, work, 0.0), queue=column)
        harm.tick()
        if stage.dead():
            return
        pause(PACE)


class _Harm:
    """Processes that are killed or stopped while they hold a lock."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._numbers = itertools.count(1)
        self._due = [(clock.now(), self._start_one_to_kill), (clock.now(), self._start_one_to_stop)]

    def tick(self) -> None:
        """Do the due actions."""
        now = clock.now()
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            item[1]()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._due.append((clock.now() + seconds, what))

    def _start_one_to_kill(self) -> None:
        self._start(KILLED, 600.0, self._stage.kill)
        self._later(KILL_EVERY, self._start_one_to_kill)

    def _start_one_to_stop(self) -> None:
        self._start(f"{STOPPED}:{next(self._numbers)}", STOPPED_TTL, self._stop)
        self._later(STOP_EVERY, self._start_one_to_stop)

    def _start(self, name: str, ttl: float, then: Callable[[int], None]) -> None:
        log = f"{name.replace(':', '-')}-{clock.now():.0f}"
        hold = ("-m", "testproject.demo.holder", "hold", name, f"{ttl:g}")
        pid = self._stage.start(*hold, name=log)
        self._when_held(log, partial(then, pid))

    def _when_held(self, log: str, then: Callable[[], None]) -> None:
        if "held" in self._stage.log(log).read_text():
            then()
        else:
            self._later(0.0, partial(self._when_held, log, then))

    def _stop(self, pid: int) -> None:
        self._stage.freeze(pid)
        # When it continues, it finds that its lock is lost.
        self._later(STOPPED_TTL + 1, partial(self._stage.wake, pid))
        self._later(STOPPED_TTL + 11, partial(self._stage.end, pid))


def _create_user() -> str:
    from django.contrib.auth import get_user_model

    password = secrets.token_urlsafe(9)
    get_user_model()._default_manager.create_superuser(username=USER, password=password)
    return password


def _port() -> int:
    """The usual port, or another one if that is taken."""
    with socket.socket() as probe:
        # As the site does; otherwise a port is taken for a minute after the last visitor.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return free_port()
    return PORT


def _answers(stage: Stage, port: int) -> bool:
    """Wait for the site; returns whether it runs."""
    while not stage.dead():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        pause(0.1)
    return False
