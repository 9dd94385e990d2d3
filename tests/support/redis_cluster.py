"""A Redis Cluster of three primaries with a replica each."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import redis
from redis.crc import key_slot
from typing_extensions import Self

from django_dlock.backends.redis.keys import Keys
from testproject.servers import RedisServer, free_port
from tests.support.databases import until

SLOTS = [(0, 5460), (5461, 10922), (10923, 16383)]
Certificates: TypeAlias = tuple[Path, Path, Path]
BUS = 10_000
"""A node's cluster bus uses a port this much higher than its own."""


def _node(tls: Certificates | None, more: Sequence[str]) -> RedisServer:
    port = free_port()
    while not _is_free(port + BUS):
        port = free_port()
    args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "3000"]
    # A replica takes over at once, even if it has not heard from its primary for long.
    args += ["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"]
    if tls is not None:
        args += ["--tls-cluster", "yes", "--tls-replication", "yes"]
    return RedisServer(port=port, args=[*args, *more], tls=tls)


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError, OverflowError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


@final
class RedisCluster:
    """Six nodes on 127.0.0.1; a context manager.

    Args:
        tls: Certificate, key and CA file; then clients and nodes use TLS.
        args: Further arguments of each ``redis-server``.

    Attributes:
        nodes: Three primaries, then a replica of each.
    """

    def __init__(self, *, tls: Certificates | None = None, args: Sequence[str] = ()) -> None:
        self._tls, self._args = tls, args
        self.nodes: list[RedisServer] = []
        self._clients: dict[int, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                # Started at once, so that the next one gets another port.
                self.nodes.append(node := stack.enter_context(_node(self._tls, self._args)))
                secured = {"ssl_ca_certs": str(self._tls[2])} if self._tls else {}
                self._clients[node.port] = client = redis.Redis.from_url(node.url, **secured)
                stack.callback(client.close)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def ask(self, node: RedisServer, *words: str | int) -> Any:
        return self._clients[node.port].execute_command(*words)

    def id_of(self, node: RedisServer) -> str:
        return str(self._text(node, "CLUSTER", "MYID"))

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", node.port) for node in self.nodes]

    @property
    def slot(self) -> int:
        """The hash slot of the keys of an alias with the usual prefix."""
        return int(key_slot(Keys("dlock").index.encode()))

    @property
    def owner(self) -> RedisServer:
        """The primary that has these keys, before any fail-over."""
        return self.nodes[next(i for i, (a, b) in enumerate(SLOTS) if a <= self.slot <= b)]

    @property
    def heir(self) -> RedisServer:
        """Its replica."""
        return self.nodes[self.nodes.index(self.owner) + 3]

    @property
    def stranger(self) -> RedisServer:
        """A primary that does not have these keys."""
        return self.nodes[self.nodes.index(self.owner) - 1]

    def info(self, node: RedisServer) -> dict[str, Any]:
        facts: dict[str, Any] = self._clients[node.port].info("replication")
        return facts

    def _text(self, node: RedisServer, *words: str | int) -> str:
        answer = self.ask(node, *words)
        return answer.decode() if isinstance(answer, bytes) else str(answer)

    def _join(self) -> None:
        first = self.nodes[0]
        for node, (begin, end) in zip(self.nodes, SLOTS, strict=False):
            self.ask(node, "CLUSTER", "ADDSLOTSRANGE", begin, end)
        for epoch, node in enumerate(self.nodes[:3], 1):
            self.ask(node, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in self.nodes[1:]:
            self.ask(node, "CLUSTER", "MEET", "127.0.0.1", first.port)
        ids = [self.id_of(node) for node in self.nodes]
        for node in self.nodes:
            until(lambda node=node: all(one in self._known(node) for one in ids))
        for primary, replica in zip(ids[:3], self.nodes[3:], strict=True):
            self.ask(replica, "CLUSTER", "REPLICATE", primary)
        for node in self.nodes[:3]:
            until(lambda node=node: self.info(node).get("slave0", {}).get("state") == "online")
        for node in self.nodes:
            until(lambda node=node: b"cluster_state:ok" in self.raw(node, "CLUSTER INFO"))
            # Each must know the others' replicas, which have no vote, but take over.
            until(lambda node=node: self._known(node).count("slave") == 3)

    def _known(self, node: RedisServer) -> str:
        return self.raw(node, "CLUSTER NODES").decode()

    def raw(self, node: RedisServer, command: str) -> bytes:
        """The answer as the node sent it; redis-py parses some."""
        pool = self._clients[node.port].connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command(*command.split())
            return bytes(connection.read_response())
        finally:
            pool.release(connection)
