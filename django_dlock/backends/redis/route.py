"""Which server the connections of an alias lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from redis import ConnectionPool

Address: TypeAlias = tuple[str, int]


class Service:
    """A service that Sentinels watch, in the shape in which redis-py's connections ask for it.

    Args:
        name: Of the service.
        sentinels: Leads to each of them.

    Attributes:
        find: Returns the address of the master.
    """

    find: Callable[[], Address]

    def __init__(self, name: str, sentinels: Sequence[Route]) -> None:
        self.name, self.sentinels = name, sentinels

    def discover_master(self, service_name: str) -> Address:
        return self.find()


class Route:
    """Makes redis-py's connections for an alias, without connecting them, and says where they lead.

    With a single server or Sentinels, that is always the same. The keys of an alias are in one slot
    of a cluster, so one node has them all, and the others answer with its address (``MOVED``).

    Args:
        pool: A pool that is only asked for its class of connections.
        kwargs: Arguments of that class.
        nodes: ``(host, port)`` of further nodes of the cluster.

    Attributes:
        service: What the Sentinels watch; ``None`` without them.
        master: The server that they name. No answer of another server counts.
    """

    def __init__(
        self, pool: ConnectionPool, kwargs: dict[str, Any], nodes: Sequence[Address]
    ) -> None:
        found = getattr(pool, "sentinel_manager", None)
        self.service = found if isinstance(found, Service) else None
        self.master: Address | None = None
        # This reference keeps the pool alive; a Sentinel's connection has only a weak one.
        self._pool, self._kwargs = pool, kwargs
        self._named: list[dict[str, Any]] = [{}, *({"host": h, "port": p} for h, p in nodes)]
        self._turn = 0
        self._followed: dict[str, Any] | None = None

    def __call__(self) -> Any:
        server = self._followed or self._named[self._turn % len(self._named)]
        return self._pool.connection_class(**{**self._kwargs, **server})

    def __len__(self) -> int:
        """How many servers to try before none of them can be reached."""
        return len(self._named) + (self._followed is not None)

    def follow(self, host: str, port: int) -> None:
        """Lead to this node from now on: another one has answered that it has the keys."""
        # Not if a Unix socket is named, or a service of Sentinels.
        if host and "host" in self._kwargs:
            self._followed = {"host": host, "port": port}

    def avoid(self) -> None:
        """The last server does not answer, or cannot: try the next one."""
        # Two threads may do this at once, and so skip a server; its turn comes again.
        if self._followed is not None:
            self._followed = None
        else:
            self._turn += 1
