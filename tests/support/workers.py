"""Real Celery workers, their broker and their database, for tests."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from celery import Celery
from celery.result import AsyncResult

from django_dlock.backends.base import AliasOptions, BaseLockBackend
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.redis import RedisBackend
from django_dlock.lease import LeaseInfo
from testproject.servers import RedisServer
from tests.support.databases import added
from tests.support.postgres import settings_for

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0

DATABASE = "database"
"""Means that the locks are kept in the workers' database."""
NOWHERE = "redis://127.0.0.1:1/0"

OVER = "over"
"""The file in a test's place that says that the test has ended."""

orders, sites = itertools.count(1), itertools.count(1)
"""Numbers that no other test uses."""

T = TypeVar("T")


def result(found: AsyncResult, patience: float = PATIENCE) -> object:
    """What a task returned; waits for it, at most ``patience`` seconds.

    Raises:
        Exception: What it raised, or that it took too long.
    """
    return found.get(timeout=patience)


def eventually(ask: Callable[[], T], patience: float = PATIENCE, why: str = "") -> T:
    """Wait until ``ask`` returns something true, and return that.

    Raises:
        AssertionError: It was not within ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not within {patience:g} s: {why or ask}"
        time.sleep(0.02)
    return answer


def sqlite(file: Path) -> dict[str, Any]:
    """The settings in ``DATABASES`` for a file."""
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": file}


class Site:
    """A Redis, a migrated database, and the workers on them; a context manager.

    Args:
        redis: For everything that is not configured otherwise: locks, messages and results.
        directory: For database, logs and the tests' own files.
        postgres: URL of a database to use instead of a SQLite file.
        locks: URL of another Redis for the locks, or ``DATABASE``.
        broker: URL of another broker, as ``amqp://…``.
        transport: ``broker_transport_options`` of workers and of the client.
        results: URL of another result backend.
        settings: Additional Django settings of the workers, as JSON.
        tasks: Module of the workers' app.
    """

    def __init__(
        self,
        redis: RedisServer | None,
        directory: Path,
        *,
        postgres: str | None = None,
        locks: str | None = None,
        broker: str | None = None,
        transport: Mapping[str, Any] | None = None,
        results: str | None = None,
        settings: Mapping[str, Any] | None = None,
        tasks: str = "tests.support.tasks_app",
    ) -> None:
        url, transport = NOWHERE if redis is None else redis.url, dict(transport or {})
        broker, results, locks = broker or url, results or url, locks or url
        self.redis, self.directory, self.postgres, self.tasks = redis, directory, postgres, tasks
        self.env = {
            **os.environ,
            "REDIS_URL": url,
            "DLOCK_DB": str(directory / "db.sqlite3"),
            "DJANGO_SETTINGS_MODULE": "tests.support.tasks_settings",
            "TASKS_POSTGRES": postgres or "",
            "TASKS_LOCKS": locks,
            "TASKS_SETTINGS": json.dumps(
                {
                    "CELERY_BROKER_URL": broker,
                    "CELERY_BROKER_TRANSPORT_OPTIONS": transport,
                    "CELERY_RESULT_BACKEND": results,
                    **(settings or {}),
                }
            ),
            "PYTHONPATH": str(ROOT),
            "CELERY_SKIP_CHECKS": "1",
        }
        self.app = Celery("client", broker=broker, backend=results, set_as_current=False)
        self.app.conf.broker_transport_options = transport
        self.workers: list[Worker] = []
        self._stack = contextlib.ExitStack()
        self.locks: BaseLockBackend
        if locks == DATABASE:
            entry = settings_for(postgres) if postgres else sqlite(directory / "db.sqlite3")
            alias = self._stack.enter_context(added(f"site-{next(sites)}", entry))
            options = AliasOptions(alias="workers", backend="", options={"database": alias})
            self.locks = DatabaseBackend(options)
        else:
            self.locks = RedisBackend(AliasOptions(alias="workers", backend="", location=locks))

    def __enter__(self) -> Site:
        self.directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "django", "migrate", "--verbosity=0", "--skip-checks"],
            cwd=ROOT,
            env=self.env,
            check=True,
            timeout=120,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        # A result garbage-collected later would look for its server, in Celery 5.5 for minutes.
        gc.collect()
        for worker in self.workers:
            worker.stop()
        # A result garbage-collected later would call Redis, which has ended by then.
        self.app.backend.remove_pending_result = lambda result: result
        self.app.close()
        self.locks.close()
        self._stack.close()

    def worker(self, pool: str = "prefork", concurrency: int = 2, *options: str) -> Worker:
        """Start a worker for the common queue and one named after its pool."""
        worker = Worker(self, pool, concurrency, *options)
        self.workers.append(worker)
        return worker

    def place(self) -> Place:
        """A new directory through which a test and its bodies communicate."""
        path = self.directory / f"place-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        return Place(path)

    def send(self, task: str, *args: Any, task_id: str | None = None, **options: Any) -> Any:
        """Publish one message."""
        return self.app.send_task(f"{self.tasks}.{task}", args, task_id=task_id, **options)

    def redeliver(self) -> None:
        """Make a Redis broker do now what it does after the visibility timeout.

        With kombu's own code, which workers of older versions run only every few minutes.
        """
        visibility = {"visibility_timeout": 0}
        with self.app.connection_for_read(transport_options=visibility) as connection:
            connection.default_channel.qos.restore_visible(num=10_000)

    def query(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Committed rows; ``?`` stands for a parameter."""
        if self.postgres:
            import psycopg

            with psycopg.connect(self.postgres) as connection:
                return connection.execute(sql.replace("?", "%s"), parameters).fetchall()
        connection_ = sqlite3.connect(self.directory / "db.sqlite3", timeout=20)
        try:
            return connection_.execute(sql, parameters).fetchall()
        finally:
            connection_.close()

    def effects(self, order: int) -> int:
        """How many effects of an order are committed."""
        return self.query("SELECT count(*) FROM shop_effect WHERE order_number = ?", order)[0][0]

    def record(self, order: int) -> tuple[str, int, int]:
        """State, attempt and deaths of an order's record."""
        return self.query(
            "SELECT state, attempt, deaths FROM django_dlock_idempotencyrecord WHERE key = ?",
            str(order),
        )[0]

    def lease(self, order: int) -> LeaseInfo | None:
        """The lease of an order's lock."""
        return self.locks.get(f"order:{order}")

    def break_lock(self, order: int) -> None:
        """Take an order's lock from its holder, as an operator does."""
        lease = self.lease(order)
        assert lease is not None
        assert self.locks.break_(lease.name, owner=lease.owner)


class Place:
    """The files of one test; see ``tests/support/tasks_app.py``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def open(self, gate: str) -> None:
        """Let the bodies that wait for ``gate`` continue."""
        (self.path / gate).touch()

    def lines(self, what: str) -> list[str]:
        """The lines noted so far."""
        try:
            return (self.path / what).read_text().splitlines()
        except FileNotFoundError:
            return []

    def wait(self, what: str, count: int = 1) -> list[str]:
        """The lines, once there are ``count``."""
        eventually(lambda: len(self.lines(what)) >= count, why=f"{count} of {what}")
        return self.lines(what)


class Worker:
    """One ``celery worker``, in a separate session."""

    def __init__(self, site: Site, pool: str, concurrency: int, *options: str) -> None:
        self.log = site.directory / f"worker-{uuid.uuid4().hex[:8]}.log"
        command = [sys.executable, "-m", "celery", "-A", site.tasks, "worker"]
        command += ["-P", pool, "-c", str(concurrency), "-l", "INFO", "-n", f"{self.log.stem}@%h"]
        command += ["-Q", f"celery,{pool}", "--without-gossip", "--without-mingle"]
        command += ["--without-heartbeat", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=site.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # If the tests are killed without clean-up, the pipe ends, and this kills the session.
        self._sitter = subprocess.Popen(
            ["sh", "-c", 'read -r line || kill -9 "-$0"', str(self.process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            eventually(
                lambda: " ready." in self.output or self.process.poll() is not None,
                patience=2 * PATIENCE,
                why=f"a worker is ready; see {self.log}",
            )
            assert self.process.poll() is None, self.output
        except AssertionError:
            self.kill()
            raise

    @property
    def output(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def stop(self, patience: float = 5) -> None:
        """Shut it down normally; kill it if that takes longer than ``patience`` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=patience)
            except subprocess.TimeoutExpired:
                self.kill()
        self._dismiss()

    def kill(self) -> None:
        """Kill it with all its children, like a crash."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._dismiss()

    def pause(self) -> None:
        """Stop worker and children (SIGSTOP)."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def _dismiss(self) -> None:
        if self._sitter.poll() is None:
            self._sitter.communicate(b"\n")
