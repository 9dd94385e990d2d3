"""A broker: where messages are, and the ways to lose, return and count them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil
import redis

from testproject.processes import OwnProcess
from testproject.rabbit import RabbitServer, find_rabbitmq_server
from testproject.servers import RedisServer, ServerNotFound
from tests.support.proxy import Proxy
from tests.support.workers import Site, Worker, eventually

__all__ = ["BROKERS", "Broker", "RabbitBroker", "RedisBroker"]


TRIES = 200
"""Stops, each of some looks, to find a worker between two messages."""

LOOKS = 20
QUEUES = ("celery", "prefork", "threads", "solo")


class Broker(Protocol):
    """A running broker; a context manager.

    Attributes:
        name: For the table.
        server: May be stopped for a while.
        url: Straight to it, for the driver.
        proxied: Through a proxy, for the workers.
    """

    name: str

    @property
    def server(self) -> OwnProcess: ...
    @property
    def url(self) -> str: ...
    @property
    def proxied(self) -> str: ...
    @property
    def version(self) -> str: ...
    def __enter__(self) -> Broker: ...
    def __exit__(self, *exc: object) -> None: ...

    def cut(self, workers: Sequence[Worker]) -> None:
        """Close the connections of these workers, which run."""

    def pause(self, worker: Worker) -> None:
        """Stop a worker with all its children (SIGSTOP), between two messages."""

    def kill(self, worker: Worker) -> None:
        """Kill a worker with all its children (SIGKILL), and see the broker notice."""

    def go_away(self, workers: Sequence[Worker]) -> None:
        """From now on these workers, which run, find no broker."""

    def come_back(self) -> None:
        """They find it again."""

    def refuse(self, workers: Sequence[Worker]) -> None:
        """As ``go_away``, but for the workers only: the driver can still publish."""

    def accept(self) -> None:
        """They find it again."""

    def calibrate(self) -> None:
        """All is quiet now: messages that are missing are lost, and not on their way."""

    def missing(self) -> int:
        """How many messages left the queue since, and were not written down for a worker."""

    def redeliver(self, site: Site) -> None:
        """Deliver again now what is not acknowledged."""

    def waiting(self, queue: str) -> int:
        """How many messages are in the queue, or delivered and not acknowledged."""


class RedisBroker:
    """Redis: what is not acknowledged comes back when the visibility timeout is over."""

    name = "redis"

    def __init__(self) -> None:
        self.server = RedisServer()
        self._known_lost = 0

    def __enter__(self) -> RedisBroker:
        self.server.start()
        self.proxy = Proxy("127.0.0.1", self.server.port, speaks="amqp")
        self._client = redis.Redis.from_url(self.server.url)
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()
        self.proxy.refuse()
        self.server.stop()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def proxied(self) -> str:
        return self.proxy.url

    @property
    def version(self) -> str:
        return f"Redis {self._client.info('server')['redis_version']}"

    def cut(self, workers: Sequence[Worker]) -> None:
        ports = self._stop_between_messages(workers)
        for port in ports:
            with contextlib.suppress(redis.ResponseError):
                self._client.client_kill(f"127.0.0.1:{port}")
        for worker in workers:
            worker.resume()

    def go_away(self, workers: Sequence[Worker]) -> None:
        # A restarted one would have forgotten all messages.
        self._stop_between_messages(workers)
        self.proxy.refuse()
        for worker in workers:
            worker.resume()

    def come_back(self) -> None:
        self.proxy.accept()

    refuse, accept = go_away, come_back

    def pause(self, worker: Worker) -> None:
        self._stop_between_messages([worker])

    def kill(self, worker: Worker) -> None:
        ports = self._stop_between_messages([worker])
        worker.kill()
        # A server that does not know yet would give it another message.
        eventually(lambda: ports.isdisjoint(self._ports()), why="the server sees the death")

    def _stop_between_messages(self, workers: Sequence[Worker]) -> set[int]:
        """Stop them when no message is on its way from the queue; their ports at the server.

        Redis takes a message from the queue and gives it to a worker, who writes down a moment
        later that it is unacknowledged; a death or a cut in between loses it, of whatever task.
        """
        for _ in range(TRIES):
            for worker in workers:
                worker.pause()
            ports = self._ports_of(workers)
            if self._nothing_on_its_way():
                for client in self._client.client_list():
                    port = int(client["addr"].rpartition(":")[2])
                    if port in ports and client["cmd"] == "brpop":
                        self._client.client_kill(client["addr"])
                if self._nothing_on_its_way():
                    break
            for worker in workers:
                worker.resume()
            time.sleep(0.02)
        return ports

    def _nothing_on_its_way(self) -> bool:
        """Whether, at some moment, every message was in a queue or written down.

        Then none is on its way to a worker that is stopped. Others go on, so it takes some looks.
        """
        return any(self._on_their_way() == self._known_lost for _ in range(LOOKS))

    def _on_their_way(self) -> int:
        """How many messages were taken out of queues and not written down as unacknowledged."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.info("commandstats")
            for queue in QUEUES:
                pipe.llen(queue)
            stats, *left = pipe.execute()
        calls = {name: int(stat["calls"]) for name, stat in stats.items()}
        put = calls.get("cmdstat_lpush", 0) + calls.get("cmdstat_rpush", 0)
        return put - sum(left) - calls.get("cmdstat_hset", 0)

    def calibrate(self) -> None:
        self._known_lost = self._on_their_way()

    def missing(self) -> int:
        return self._on_their_way() - self._known_lost

    def _ports_of(self, workers: Sequence[Worker]) -> set[int]:
        links = self.proxy.links
        pids = {
            each.pid
            for worker in workers
            for process in [psutil.Process(worker.process.pid)]
            for each in [process, *process.children(recursive=True)]
        }
        return {
            links[connection.laddr.port]
            for connection in psutil.net_connections("tcp4")
            # A port may also be that of a connection to another server.
            if connection.pid in pids
            and connection.raddr
            and connection.raddr.port == self.proxy.port
            and connection.laddr.port in links
        }

    def _ports(self) -> set[int]:
        return {int(client["addr"].rpartition(":")[2]) for client in self._client.client_list()}

    def redeliver(self, site: Site) -> None:
        site.redeliver()

    def waiting(self, queue: str) -> int:
        return int(self._client.llen(queue)) + int(self._client.hlen("unacked"))


class RabbitBroker:
    """RabbitMQ: what is not acknowledged comes back when its connection ends."""

    name = "rabbitmq"

    def __init__(self) -> None:
        self.server = RabbitServer()

    def __enter__(self) -> RabbitBroker:
        self.server.start()
        self.proxy = Proxy("127.0.0.1", self.server.port, speaks="amqp")
        return self

    def __exit__(self, *exc: object) -> None:
        self.proxy.refuse()
        self.server.stop()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def proxied(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.proxy.port}//"

    @property
    def version(self) -> str:
        return f"RabbitMQ {self._control('version').strip()}"

    def cut(self, workers: Sequence[Worker]) -> None:
        self.proxy.cut()

    def go_away(self, workers: Sequence[Worker]) -> None:
        # Durable queues and persistent messages, as Celery's are, outlive it; killed, it would
        # forget what it has not confirmed, and nobody who publishes asks for that but the guard.
        self.server.shut_down()

    def come_back(self) -> None:
        self.server.restart()

    def refuse(self, workers: Sequence[Worker]) -> None:
        self.proxy.refuse()

    def accept(self) -> None:
        self.proxy.accept()

    def pause(self, worker: Worker) -> None:
        worker.pause()

    def calibrate(self) -> None:
        """Nothing is lost on its way."""

    def missing(self) -> int:
        return 0

    def kill(self, worker: Worker) -> None:
        worker.kill()

    def redeliver(self, site: Site) -> None:
        # From the side of the broker, for a worker may be stopped.
        self.proxy.cut()

    def waiting(self, queue: str) -> int:
        rows = self._control("list_queues", "-q", "--no-table-headers", "name", "messages")
        counts = dict(row.split("\t") for row in rows.splitlines() if "\t" in row)
        return int(counts.get(queue, 0))

    def _control(self, *arguments: str) -> str:
        server = find_rabbitmq_server()
        if server is None:
            raise ServerNotFound("no RabbitMQ to ask")
        program = shutil.which("rabbitmqctl", path=str(Path(server).parent)) or "rabbitmqctl"
        return subprocess.run(
            [program, "-n", self.server.name, *arguments],
            env=self.server._env(),
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout


BROKERS: dict[str, type[RedisBroker | RabbitBroker]] = {
    "redis": RedisBroker,
    "rabbitmq": RabbitBroker,
}
