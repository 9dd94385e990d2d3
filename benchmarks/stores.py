"""The servers of stores other than Redis and PostgreSQL; they start when a row needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from testproject.processes import OwnProcess, ServerNotFound
from testproject.servers import RedisServer
from tests.support.etcd import EtcdServer
from tests.support.zookeeper import ZooKeeperServer

from .counting import CountingProxy
from .model import Unavailable
from .peers import ETCD, FAILOVER, REDLOCK, ZOOKEEPER

if TYPE_CHECKING:
    from typing_extensions import Self

NODES = 3
"""Servers of Redlock."""


class Stores:
    """A context manager. A server that has been started runs until the end.

    So rows that need one come last: an idle etcd or ZooKeeper takes processor time, too.

    Attributes:
        proxies: Count what passes; the route ``COUNTED`` leads through them.
        versions: Of the servers that have been started, by name.
    """

    proxies: tuple[CountingProxy, ...] = ()

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self._running: dict[str, list[OwnProcess]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # They choose their ports now, because all processes read the same settings.
        self._nodes = [RedisServer() for _ in range(NODES)]
        self._zookeeper = ZooKeeperServer()
        # With etcd's own defaults, instead of those that make elections fast in tests.
        self._etcd = EtcdServer(timing=(100, 1000))
        for server in (*self._nodes, self._zookeeper, self._etcd):
            self._stack.callback(server.stop)
        urls = [*self._urls.values()]
        self.proxies = tuple(self._stack.enter_context(CountingProxy(url)) for url in urls)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self, store: str) -> None:
        """Start the servers of a store, unless they run.

        Raises:
            Unavailable: They are not installed.
        """
        if store in self._running or store == FAILOVER:
            return
        servers = {REDLOCK: self._nodes, ZOOKEEPER: [self._zookeeper], ETCD: [self._etcd]}[store]
        try:
            for server in servers:
                server.start()
        except ServerNotFound as error:
            raise Unavailable(str(error)) from error
        self._running[store] = [*servers]
        if store == REDLOCK:
            self._join()
        elif store == ZOOKEEPER:
            told = self._zookeeper.ask("srvr").partition(": ")[2]
            self.versions["ZooKeeper"] = told.partition("-")[0]
        else:
            self.versions["etcd"] = self._etcd.call("maintenance/status")["version"]

    def pids(self) -> Iterator[int]:
        """The running servers."""
        for servers in self._running.values():
            yield from (server.pid for server in servers)

    def route(self, *, counted: bool) -> Mapping[str, Any]:
        """Where each store is, directly or through the proxies."""
        urls = [proxy.url for proxy in self.proxies] if counted else [*self._urls.values()]
        *nodes, zookeeper, etcd = urls
        return {REDLOCK: nodes, ZOOKEEPER: urlsplit(zookeeper).netloc, ETCD: etcd}

    @property
    def _urls(self) -> dict[str, str]:
        return {
            **{f"node {number}": node.url for number, node in enumerate(self._nodes)},
            ZOOKEEPER: f"zookeeper://{self._zookeeper.location}",
            ETCD: self._etcd.url,
        }

    def _join(self) -> None:
        """Let the nodes vote at once, as nodes do that have been up for longer than a lease."""
        from redis import Redis

        from django_dlock.backends.redis.keys import Keys

        for node in self._nodes:
            with Redis.from_url(node.url) as client:
                about = client.info("server")
                self.versions["Redis"], run_id = about["redis_version"], about["run_id"]
                client.set(f"{Keys('dlock').base}node", f"{run_id} joined")
