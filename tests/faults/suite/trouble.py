"""Causes the chosen faults while tasks are running."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import redis

from django_dlock.exceptions import BackendUnavailable
from testproject.processes import OwnProcess
from tests.support.workers import Worker

from .draws import Draw
from .kinds import GUARDED
from .stream import Stream
from .web import client_leaves

EMPTIED = ("lock Redis restarted", "lock Redis flushed")
"""Faults after which a holder has lost its lock without noticing it."""

BROKEN = "lock broken"
"""The same, for one key."""

DISTANCE = 0.02
"""Seconds that each reply of a distant broker takes."""

GRACE = 8.0
"""Seconds for a worker to shut down."""

T = TypeVar("T")


class NoTarget(Exception):
    """There is no target for the fault."""


class Trouble:
    """The faults of one run.

    Some last for a while. Separate threads end them, because the driver itself may be blocked by
    what it has stopped.
    """

    def __init__(self, run: Stream) -> None:
        self.run, self.stage = run, run.stage
        self._mouth = threading.Lock()
        self._refused = threading.Lock()
        self._not_writing = threading.Lock()
        self._without_broker = threading.Lock()
        self._away: list[Worker] = []
        self._timers: list[threading.Timer] = []
        self._faults: dict[str, Callable[[Draw], str]] = {
            "kill a child": self._kill_child,
            "terminate a task": self._terminate,
            "kill a worker": self._kill_worker,
            "stop a worker": self._stop_worker,
            "shut a worker down": self._shut_down,
            "break a lock": self._break_lock,
            "restart the lock Redis": self._restart_locks,
            "flush the lock Redis": self._flush_locks,
            "stop the lock Redis": self._stop_locks,
            "cut the broker": self._cut_broker,
            "stop the broker": self._stop_broker,
            "refuse the broker": self._refuse_broker,
            "keep the broker at a distance": self._stand_off,
            "publish pending follow-ups": self._publish_pending,
            "cut the database": self._cut_database,
            "refuse the database": self._refuse_database,
            "make the database read-only": self._make_database_read_only,
            "a client goes away": self._client_goes_away,
            "deliver again": self._deliver_again,
            "publish again": self._publish_again,
        }

    def make(self, draw: Draw) -> str:
        """Make a fault; return a description of what it met."""
        try:
            return self._faults[draw.what](draw)
        except NoTarget as error:
            return f"nothing to do: {error}"

    def end(self) -> None:
        """Wait until the lasting faults have ended."""
        for timer in self._timers:
            timer.join()

    # -- processes ---------------------------------------------------------------------

    def _kill_child(self, draw: Draw) -> str:
        body = self._body(draw)
        self.run.fault("child killed", [body["pid"]])
        try:
            os.kill(body["pid"], signal.SIGKILL)
        except ProcessLookupError:
            raise NoTarget("it has just ended") from None
        self.run.killed([body["pid"]])
        return f"process {body['pid']} in key {body['key']}"

    def _terminate(self, draw: Draw) -> str:
        body = self._body(draw)
        name = "SIGTERM" if draw.lasts > 2 else "SIGKILL"
        self.run.fault("terminated", [body["pid"]])
        self.stage.site.app.control.revoke(body["delivery"], terminate=True, signal=name)
        return f"{name}, key {body['key']}"

    def _kill_worker(self, draw: Draw) -> str:
        worker = self._worker(draw)
        pids = self.run.pids(worker.process.pid)
        self.run.fault("worker killed", pids)
        self.stage.kill(worker)
        self.run.killed(pids)
        self.stage.redeliver()
        self.stage.start_worker()
        return f"process {worker.process.pid} and its children"

    def _stop_worker(self, draw: Draw) -> str:
        worker = self._worker(draw)
        self.run.fault("worker stopped", self.run.pids(worker.process.pid))
        worker.pause()
        self._away.append(worker)

        def resume() -> None:
            worker.resume()
            self._away.remove(worker)

        self._later(draw.lasts, resume)
        # As the broker treats a client that does not answer any more.
        self._later(draw.lasts / 2, self.stage.redeliver)
        return f"process {worker.process.pid} and its children, for {draw.lasts:.1f} s"

    def _shut_down(self, draw: Draw) -> str:
        worker = self._worker(draw)
        how = signal.SIGTERM if draw.lasts > 2 else signal.SIGQUIT
        self.run.fault("worker shut down", self.run.pids(worker.process.pid))
        self.stage.workers.remove(worker)
        worker.process.send_signal(how)

        def gone() -> None:
            deadline = time.monotonic() + GRACE
            while worker.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            worker.kill()

        self._later(0.0, gone)
        self.stage.start_worker()
        return f"{how.name} to process {worker.process.pid}"

    # -- locks -------------------------------------------------------------------------

    def _break_lock(self, draw: Draw) -> str:
        body = self._body(draw)
        key = str(body["key"])
        self.run.journal.write("fault", what=BROKEN, pids=[body["pid"]], key=body["key"])
        try:
            lease = self.stage.site.locks.get(key)
            if lease is None or not self.stage.site.locks.break_(key, owner=lease.owner):
                raise NoTarget("it has just ended")
        except BackendUnavailable:
            raise NoTarget("the locks' Redis does not answer") from None
        return f"of key {key}"

    def _restart_locks(self, draw: Draw) -> str:
        self.run.fault(EMPTIED[0])
        with self._mouth:
            self.stage.locks.restart()
        return "empty"

    def _flush_locks(self, draw: Draw) -> str:
        self.run.fault(EMPTIED[1])
        try:
            with redis.Redis.from_url(self.stage.locks.url, socket_timeout=1) as client:
                client.flushall()
        except redis.RedisError as error:
            raise NoTarget(f"it does not answer: {error}") from None
        return "empty"

    def _stop_locks(self, draw: Draw) -> str:
        self.run.fault("lock Redis stopped")
        self._pause(self.stage.locks, draw.lasts)
        return f"for {draw.lasts:.1f} s"

    # -- broker and database -----------------------------------------------------------

    def _cut_broker(self, draw: Draw) -> str:
        self.run.fault("broker connections cut")
        self.stage.broker.cut(self._running())
        return ""

    def _stop_broker(self, draw: Draw) -> str:
        if self._without_broker.locked():
            raise NoTarget("it is refused")
        self.run.fault("broker stopped")
        self._pause(self.stage.broker.server, draw.lasts)
        return f"for {draw.lasts:.1f} s"

    def _refuse_broker(self, draw: Draw) -> str:
        if not self._without_broker.acquire(blocking=False):
            raise NoTarget("it is refused already")
        self.run.fault("broker refused")
        self.stage.broker.refuse(self._running())

        def come_back() -> None:
            self.stage.broker.accept()
            self._without_broker.release()

        self._later(draw.lasts, come_back)
        return f"for {draw.lasts:.1f} s"

    def _stand_off(self, draw: Draw) -> str:
        """Replies come late, and a body that waits for one loses its lock."""
        self.stage.broker.stand_off(DISTANCE)
        self._later(draw.lasts, lambda: self.stage.broker.stand_off(0.0))
        return f"for {draw.lasts:.1f} s; lock broken {self._break_lock(draw)}"

    def _publish_pending(self, draw: Draw) -> str:
        # In a separate process, like Beat's task; it may find no broker, or no database.
        self._later(0.0, self.run.publish_pending)
        return "as Beat does"

    def _cut_database(self, draw: Draw) -> str:
        assert self.stage.database is not None
        self.run.fault("database connections cut")
        self.stage.database.cut()
        return ""

    def _refuse_database(self, draw: Draw) -> str:
        database = self.stage.database
        assert database is not None
        if not self._refused.acquire(blocking=False):
            raise NoTarget("it is refused already")
        self.run.fault("database refused")
        database.refuse()

        def accept() -> None:
            database.accept()
            self._refused.release()

        self._later(draw.lasts / 2, accept)
        return f"for {draw.lasts / 2:.1f} s"

    def _make_database_read_only(self, draw: Draw) -> str:
        if not self._not_writing.acquire(blocking=False):
            raise NoTarget("it is already")
        self.run.fault("database read-only")
        read_only = contextlib.ExitStack()
        read_only.enter_context(self.stage.database_read_only())

        def write_again() -> None:
            read_only.close()
            self._not_writing.release()

        self._later(draw.lasts / 2, write_again)
        return f"for {draw.lasts / 2:.1f} s"

    def _client_goes_away(self, draw: Draw) -> str:
        key = self.run.new_key()
        self.run.journal.write("sent", kind=GUARDED, key=key, delivery=f"client {key}")
        self._later(0.0, partial(client_leaves, self.run, key))
        return f"key {key}"

    def _deliver_again(self, draw: Draw) -> str:
        self.run.fault("redelivery")
        self.stage.redeliver()
        return "all that is not acknowledged"

    def _publish_again(self, draw: Draw) -> str:
        body = self._body(draw)
        again = self.run.publish_copy(body["delivery"])
        return f"key {body['key']} as {again}"

    # -- targets --------------------------------------------------------------------------

    def _body(self, draw: Draw) -> dict[str, Any]:
        """A running body of a worker that is not stopped."""
        stopped = {pid for worker in self._away for pid in self.run.pids(worker.process.pid)}
        bodies = [
            body
            for body in self.run.watch.running()
            if body["kind"] == GUARDED and body["pid"] not in stopped
        ]
        return pick(sorted(bodies, key=lambda body: (body["key"], body["run"])), draw, "no body")

    def _running(self) -> list[Worker]:
        return [worker for worker in self.stage.workers if worker not in self._away]

    def _worker(self, draw: Draw) -> Worker:
        """A running worker that is not the only one."""
        running = self._running()
        return pick(running if len(running) > 1 else [], draw, "no worker to spare")

    # -- duration ----------------------------------------------------------------------

    def _pause(self, server: OwnProcess, seconds: float) -> None:
        with self._mouth:
            server.pause()

        def resume() -> None:
            with self._mouth:
                server.resume()

        self._later(seconds, resume)

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        self._timers = [other for other in self._timers if other.is_alive()] + [timer]
        timer.start()


def pick(candidates: Sequence[T], draw: Draw, why_none: str) -> T:
    """The candidate that the draw chooses.

    Raises:
        NoTarget: There is no candidate.
    """
    if not candidates:
        raise NoTarget(why_none)
    return candidates[int(draw.aim * len(candidates))]
