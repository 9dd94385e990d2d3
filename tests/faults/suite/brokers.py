"""A broker: where the messages are, and how to lose, return and count them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import psutil
import redis

from testproject.processes import OwnProcess
from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer
from tests.support.proxy import Proxy
from tests.support.workers import Site, Worker, eventually

from .kinds import NOISE

TRIES = 200
"""Stops, each with several checks, until a worker is stopped between two messages."""

LOOKS = 20
QUEUES = ("celery", "prefork", "threads", "solo", NOISE)


class Broker(Protocol):
    """A running broker; a context manager.

    Attributes:
        name: For the table.
        server: Can be stopped for a while.
        url: Its direct address, for the driver.
        proxied: Its address through a proxy, for the workers.
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
        """Close the connections of these running workers."""

    def pause(self, worker: Worker) -> None:
        """Stop a worker with all its children (SIGSTOP) between two messages."""

    def kill(self, worker: Worker) -> None:
        """Kill a worker with all its children (SIGKILL); wait until the broker notices."""

    def go_away(self, workers: Sequence[Worker]) -> None:
        """From now on these running workers cannot reach the broker."""

    def come_back(self) -> None:
        """Let them reach it again."""

    def refuse(self, workers: Sequence[Worker]) -> None:
        """As ``go_away``, but only for the workers: the driver can still publish."""

    def accept(self) -> None:
        """Let them reach it again."""

    def stand_off(self, seconds: float) -> None:
        """From now on each reply to a worker takes so long; 0 ends that."""

    def calibrate(self) -> None:
        """Call this when all is quiet: from now on, missing messages are lost ones."""

    def missing(self) -> int:
        """How many messages have left the queue since then without being noted for a worker."""

    def redeliver(self, site: Site) -> None:
        """Deliver unacknowledged messages again now."""

    def waiting(self, queue: str) -> int:
        """How many messages are in the queue, or delivered and not yet acknowledged."""


class RedisBroker:
    """Redis: unacknowledged messages come back after the visibility timeout."""

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
        # A restarted Redis would have lost all messages.
        self._stop_between_messages(workers)
        self.proxy.refuse()
        for worker in workers:
            worker.resume()

    def come_back(self) -> None:
        self.proxy.accept()

    refuse, accept = go_away, come_back

    def stand_off(self, seconds: float) -> None:
        self.proxy.delay = seconds

    def pause(self, worker: Worker) -> None:
        self._stop_between_messages([worker])

    def kill(self, worker: Worker) -> None:
        ports = self._stop_between_messages([worker])
        worker.kill()
        # A server that has not noticed the death would send the worker another message.
        eventually(lambda: ports.isdisjoint(self._ports()), why="the server sees the death")

    def _stop_between_messages(self, workers: Sequence[Worker]) -> set[int]:
        """Stop them when no message is between queue and worker; return their ports at the server.

        Redis removes a message from the queue and sends it to a worker. A moment later the worker
        notes it as unacknowledged. A death or a cut in between loses the message, whatever its
        task.
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
        """Whether, at one moment, every message was in a queue or noted as unacknowledged.

        Then no message is on its way to a stopped worker. Other workers continue, so this may take
        several checks.
        """
        return any(self._on_their_way() == self._known_lost for _ in range(LOOKS))

    def _on_their_way(self) -> int:
        """How many messages were taken out of queues and not yet noted as unacknowledged."""
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
            # A port may also belong to a connection to another server.
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
    """RabbitMQ: unacknowledged messages come back when their connection ends."""

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
        return f"RabbitMQ {self.server.control('version').strip()}"

    def cut(self, workers: Sequence[Worker]) -> None:
        self.proxy.cut()

    def go_away(self, workers: Sequence[Worker]) -> None:
        # Celery's durable queues and persistent messages survive this. After a kill, RabbitMQ would
        # lose messages that it has not confirmed, and only the guarded tasks wait for
        # confirmations.
        self.server.shut_down()

    def come_back(self) -> None:
        self.server.restart()

    def refuse(self, workers: Sequence[Worker]) -> None:
        self.proxy.refuse()

    def accept(self) -> None:
        self.proxy.accept()

    def stand_off(self, seconds: float) -> None:
        self.proxy.delay = seconds

    def pause(self, worker: Worker) -> None:
        worker.pause()

    def calibrate(self) -> None:
        """Do nothing: RabbitMQ loses no message on its way."""

    def missing(self) -> int:
        return 0

    def kill(self, worker: Worker) -> None:
        worker.kill()

    def redeliver(self, site: Site) -> None:
        # The broker does it, because a worker may be stopped.
        self.proxy.cut()

    def waiting(self, queue: str) -> int:
        rows = self.server.control("list_queues", "-q", "--no-table-headers", "name", "messages")
        counts = dict(row.split("\t") for row in rows.splitlines() if "\t" in row)
        return int(counts.get(queue, 0))


BROKERS: dict[str, type[RedisBroker | RabbitBroker]] = {
    "redis": RedisBroker,
    "rabbitmq": RabbitBroker,
}
