"""What all rows need: our own servers and a configured Django, for all processes of a run."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testproject import postgres
from testproject.servers import RedisServer, ServerNotFound

from . import parsers, processor
from .beds import BEDS, DISTANT, DelayProxy, spinning
from .counting import Counted, CountingProxy
from .model import Unavailable
from .peers import COUNTED, DIRECT, LEASES, ROUTES
from .processes import Worker, Workers
from .stores import Stores

if TYPE_CHECKING:
    from typing_extensions import Self


class Bench:
    """The servers and processes of one run; a context manager.

    Child processes find them through the environment: ``django.setup()`` is all they need.

    Attributes:
        quick: The rows should do a tenth of the work.
        cycles: After so many, ``db.bloat`` measures the table; 0 for its default.
        redis: Without persistence and used by nothing else; empty at the start of every row.
        redis_proxy, postgres_proxy: Count what passes; the route ``COUNTED`` leads through them. If
            ``postgres_url`` is empty, there is no PostgreSQL.
        stores: The servers of other stores.
        workers: Processes for holders and waiters.
        directory: For files; removed at the end.
    """

    directory: Path
    redis: RedisServer
    redis_proxy: CountingProxy
    postgres_proxy: CountingProxy | None = None

    def __init__(self, *, quick: bool = False, postgres: bool = True, cycles: int = 0) -> None:
        self.quick, self.cycles = quick, cycles
        self.workers, self.stores = Workers(), Stores()
        self.postgres_url = ""
        self._postgres_pid = 0
        self._wants_postgres = postgres
        self._clients: dict[str, Worker] = {}
        self._delays: dict[str, DelayProxy] = {}
        self._idle: dict[tuple[int, ...], float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        parsers.use(parsers.PYTHON)
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.redis = stack.enter_context(RedisServer())
            no_postgres = self._start_postgres(stack) if self._wants_postgres else "not chosen"
            stack.enter_context(self.stores)
            routes = self._start_proxies(stack)
            stack.callback(self.workers.close)
            stack.callback(self._close_clients)
            stack.callback(_forget_leases)
            self._stack = stack.pop_all()
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "BENCH_DIRECTORY": str(self.directory),
            "BENCH_NO_POSTGRES": no_postgres,
            ROUTES: json.dumps(routes),
        }
        import django

        django.setup()
        from django.core.management import call_command

        # Needed for lock events, too: a lost lease, or a long wait, writes a row.
        call_command("migrate", verbosity=0)
        if self.postgres_url:
            call_command("migrate", database=DIRECT.database, verbosity=0)
            self._postgres_pid = self._find_postgres()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def size(self, full: int, least: int = 1) -> int:
        """A number of something; a tenth of it in a quick run."""
        return max(least, full // 10) if self.quick else full

    def clear(self) -> None:
        """Empty the Redis and the table of leases; scripts stay loaded."""
        from redis import Redis

        with Redis.from_url(self.redis.url) as client:
            client.flushall()
        if self.postgres_url:
            self.sql(f"TRUNCATE {LEASES}")

    def sql(self, statement: str) -> list[Any]:
        """Execute it in PostgreSQL; return the first row, if there is one."""
        from django.db import connections

        with connections[DIRECT.database].cursor() as cursor:
            cursor.execute(statement)
            return [] if cursor.description is None else list(cursor.fetchone() or ())

    # -- environments of rows -------------------------------------------------------

    @contextmanager
    def bed(self, name: str) -> Iterator[None]:
        """Create the environment around the servers; see ``beds``."""
        bed = BEDS[name]
        if bed.round_trip:
            self._delays[name].calibrate(bed.round_trip)
        with ExitStack() as stack:
            if bed.spinning:
                stack.enter_context(spinning())
            yield

    def client(self, parser: str) -> Worker:
        """A process that uses this parser; the same one throughout the run.

        Raises:
            Unavailable: It is not installed.
        """
        if parser == parsers.HIREDIS and parsers.hiredis_version() is None:
            raise Unavailable("hiredis is not installed")
        if parser not in self._clients:
            self._clients[parser] = Worker(fresh=True, parser=parser)
        return self._clients[parser]

    # -- measurements --------------------------------------------------------------

    @property
    def proxies(self) -> list[CountingProxy]:
        """All that count."""
        own = [proxy for proxy in (self.redis_proxy, self.postgres_proxy) if proxy]
        return [*own, *self.stores.proxies]

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        """Counts what passes any of the proxies during the block; complete at its end."""
        proxies = self.proxies
        counted, before = Counted(), [proxy.total for proxy in proxies]
        yield counted
        for proxy, then in zip(proxies, before, strict=True):
            counted.round_trips += proxy.total.round_trips - then.round_trips
            counted.commands += proxy.total.commands - then.commands

    def server_spent(self) -> float:
        """Seconds of processor time that the servers have used so far."""
        spent = sum(map(processor.used, (self.redis.pid, *self.stores.pids())))
        if self._postgres_pid:
            for pid in (self._postgres_pid, *processor.children(self._postgres_pid)):
                # A session may have ended meanwhile.
                with suppress(OSError):
                    spent += processor.used(pid)
        return spent

    @property
    def server_idle(self) -> float:
        """Seconds of processor time that idle servers use per second."""
        # More servers may run than before.
        pids = tuple(self.stores.pids())
        if pids not in self._idle:
            before, seconds = self.server_spent(), 2.0
            time.sleep(seconds)
            self._idle[pids] = (self.server_spent() - before) / seconds
        return self._idle[pids]

    # -- internals ------------------------------------------------------------------------

    def _start_postgres(self, stack: ExitStack) -> str:
        """Why there is no PostgreSQL; empty if there is one."""
        if postgres.URL in os.environ:
            return f"the server in {postgres.URL} may run on another machine"
        try:
            self.postgres_url = stack.enter_context(postgres.database())
        except ServerNotFound as error:
            return str(error)
        return ""

    def _find_postgres(self) -> int:
        """The process whose children are the sessions."""
        (directory,) = self.sql("SHOW data_directory")
        return int((Path(directory) / "postmaster.pid").read_text().split()[0])

    def _start_proxies(self, stack: ExitStack) -> dict[str, dict[str, Any]]:
        """The URLs of the servers by each route."""
        urls = [self.redis.url, *([self.postgres_url] if self.postgres_url else [])]
        counting = [stack.enter_context(CountingProxy(url)) for url in urls]
        self.redis_proxy = counting[0]
        self.postgres_proxy = counting[1] if self.postgres_url else None
        routes = {DIRECT.name: urls, COUNTED.name: [proxy.url for proxy in counting]}
        for bed in DISTANT:
            self._delays[bed.name] = stack.enter_context(DelayProxy(*urls))
            routes[bed.route.name] = list(self._delays[bed.name].urls)
        found: dict[str, dict[str, Any]] = {
            name: {"redis": urls[0], "postgres": urls[1] if self.postgres_url else ""}
            for name, urls in routes.items()
        }
        for route in (DIRECT, COUNTED):
            found[route.name] |= self.stores.route(counted=route == COUNTED)
        return found

    def _close_clients(self) -> None:
        for worker in self._clients.values():
            worker.__exit__()


def _forget_leases() -> None:
    """Release everything while the servers still run, so that nothing is left for the exit."""
    from django_dlock.core.watchdog import shutdown
    from django_dlock.handler import locks

    shutdown()
    locks.reset()
