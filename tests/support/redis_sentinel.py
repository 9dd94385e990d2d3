"""A Redis primary with a replica and a Sentinel that watches them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from testproject.servers import RedisServer
from tests.support.databases import until
from tests.support.redis_calls import client

__all__ = ["RedisSentinel"]

if TYPE_CHECKING:
    from typing_extensions import Self


class RedisSentinel:
    """Three servers on 127.0.0.1; a context manager.

    Args:
        patience: Seconds without an answer after which the Sentinel promotes the replica.

    Attributes:
        primary: The server that has the locks until a fail-over.
        replica: The server that has them afterwards.
    """

    LOCATION = "redis://mymaster/0"

    def __init__(self, *, patience: float) -> None:
        self._patience = patience
        self.primary = RedisServer(args=["--repl-diskless-sync-delay", "0"])
        self.replica: RedisServer
        self._sentinel: RedisServer

    @property
    def options(self) -> dict[str, Any]:
        """Of an alias at ``LOCATION``."""
        return {"sentinels": [("127.0.0.1", self._sentinel.port)]}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.primary)
            args = ["--replicaof", "127.0.0.1", str(self.primary.port)]
            self.replica = stack.enter_context(RedisServer(args=args))
            asking = stack.enter_context(client(self.primary))
            until(lambda: asking.info("replication").get("slave0", {}).get("state") == "online")
            lines = [
                f"sentinel monitor mymaster 127.0.0.1 {self.primary.port} 1",
                f"sentinel down-after-milliseconds mymaster {1000 * self._patience:.0f}",
                "sentinel failover-timeout mymaster 5000",
            ]
            self._sentinel = stack.enter_context(RedisServer(sentinel="\n".join(lines) + "\n"))
            watching = stack.enter_context(client(self._sentinel))
            until(lambda: watching.sentinel_master("mymaster")["num-slaves"] == 1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
