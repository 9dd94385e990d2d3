"""Servers and workers for one broker and one pool; all of them end with the stage."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from testproject.servers import RedisServer
from tests.support import postgres
from tests.support.proxy import Proxy
from tests.support.workers import DATABASE, Site, Worker

from .brokers import Broker
from .kinds import SHORT_TTL
from .locks import DatabaseLocks, LockStore
from .web import WebServer


@dataclass(frozen=True, slots=True)
class Pool:
    """How many workers a pool has, and how many bodies each of them runs at a time."""

    name: str
    workers: int
    slots: int

    @property
    def all_slots(self) -> int:
        return self.workers * self.slots


POOLS = {
    pool.name: pool for pool in (Pool("prefork", 2, 30), Pool("threads", 2, 40), Pool("solo", 4, 1))
}
SMALL_POOLS = {"prefork": Pool("prefork", 2, 12)}


LONGEST_DELAY = 10.0
"""The longest delay in seconds of a requeued guarded task: a quarter of the visibility timeout."""


class Stage:
    """A context manager.

    Args:
        broker: Started and stopped with the stage.
        directory: For logs, journals and, without PostgreSQL, the database.
        postgres_needed: Raise if there is no PostgreSQL, instead of using SQLite.
        backend: Where the locks are kept; ``DATABASE`` needs PostgreSQL, and Django set up.

    Attributes:
        locks: The store of the locks only; faults may disturb it.
        database: A proxy in front of PostgreSQL; ``None`` on SQLite.
        workers: Those that shall be running.

    Raises:
        ServerNotFound, PostgresNotFound: Something is not installed.
    """

    def __init__(
        self,
        broker: Broker,
        pool: Pool,
        directory: Path,
        *,
        postgres_needed: bool = False,
        backend: str = "redis",
    ) -> None:
        self.broker, self.pool, self.directory, self.backend = broker, pool, directory, backend
        self.postgres_needed = postgres_needed or backend == DATABASE
        self.queue = pool.name
        self.database: Proxy | None = None
        self.workers: list[Worker] = []
        self.keys = itertools.count(1)
        self._web_server: WebServer | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            self._set_up(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        results = stack.enter_context(RedisServer())
        stack.enter_context(self.broker)
        url = self._find_postgres(stack)
        self.locks: LockStore
        if self.backend == DATABASE and url:
            self.locks = DatabaseLocks(url)
        else:
            self.locks = stack.enter_context(RedisServer())
        self.site = Site(
            results,
            self.directory,
            postgres=url,
            locks=self.locks.url,
            broker=self.broker.url,
            settings={
                "DLOCKS": {"default": self._alias()},
                "CELERY_BROKER_URL": self.broker.proxied,
                # After the kill of a child, Celery does not acknowledge its message for ten
                # seconds, until it declares the child dead; meanwhile there must be other messages
                # to process.
                "CELERY_WORKER_PREFETCH_MULTIPLIER": 8,
                # After a lost connection. Celery does so by calls whose replies can get lost if
                # threads share the connection.
                "CELERY_WORKER_ENABLE_PREFETCH_COUNT_REDUCTION": False,
            },
            # RabbitMQ has no such timeout, but the guarded tasks still respect it.
            transport={"visibility_timeout": 4 * LONGEST_DELAY},
            tasks="tests.faults.suite.workload",
        )
        stack.enter_context(self.site)
        if url and self.database is not None:
            host = f"{urlsplit(url).username}@127.0.0.1:{self.database.port}"
            self.site.env["TASKS_POSTGRES"] = urlsplit(url)._replace(netloc=host).geturl()
        for _ in range(self.pool.workers):
            self.start_worker()

    def _alias(self) -> dict[str, Any]:
        """The workers' settings in ``DLOCKS``; they allow the shortest TTL to be renewed."""
        shared = {"TTL": SHORT_TTL, "OPTIONS": {"command_timeout": 0.5}}
        if self.backend == DATABASE:
            return {"BACKEND": "django_dlock.backends.database.DatabaseBackend", **shared}
        redis = "django_dlock.backends.redis.RedisBackend"
        return {"BACKEND": redis, "LOCATION": self.locks.url, **shared}

    def _find_postgres(self, stack: contextlib.ExitStack) -> str | None:
        try:
            url = stack.enter_context(postgres.database())
        except postgres.PostgresNotFound:
            if self.postgres_needed:
                raise
            return None
        parts = urlsplit(url)
        self.database = stack.enter_context(
            Proxy(parts.hostname or "127.0.0.1", parts.port or 5432, speaks="postgres")
        )
        # The marker in the statement that a body is about to lose.
        self.database.always("close", of="answer lost")
        self.database.always("refuse", of="not sent")
        return url

    @contextlib.contextmanager
    def database_read_only(self) -> Iterator[None]:
        """As a primary that has become a standby: all sessions end, and none may write."""
        self._execute("ALTER DATABASE {} SET default_transaction_read_only = on")
        try:
            self._execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            yield
        finally:
            self._execute("ALTER DATABASE {} RESET default_transaction_read_only")

    def _execute(self, statement: str) -> None:
        import psycopg

        assert self.site.postgres is not None
        name = urlsplit(self.site.postgres).path.lstrip("/")
        # This session may write, whatever it sets for others.
        options = "-c default_transaction_read_only=off"
        with psycopg.connect(self.site.postgres, autocommit=True, options=options) as connection:
            connection.execute(statement.format(name))

    def web_server(self) -> WebServer:
        """The bodies as views; started by the first call."""
        if self._web_server is None:
            self._web_server = self._stack.enter_context(WebServer(self.site.env))
        return self._web_server

    def start_worker(self) -> Worker:
        """Start one more worker."""
        worker = self.site.worker(self.pool.name, self.pool.slots)
        self.workers.append(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """Kill a worker with all its children (SIGKILL)."""
        self.broker.kill(worker)
        self.workers.remove(worker)

    def replace_ended_workers(self) -> list[str]:
        """Replace workers that ended by themselves, as a supervisor does; return their logs."""
        ended = [worker for worker in self.workers if worker.process.poll() is not None]
        for worker in ended:
            self.workers.remove(worker)
            worker.stop()
            self.start_worker()
        return [str(worker.log) for worker in ended]

    def redeliver(self) -> None:
        """Deliver unacknowledged messages again now."""
        self.broker.redeliver(self.site)
