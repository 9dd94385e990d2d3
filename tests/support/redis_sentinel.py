"""A Redis primary with a replica and a Sentinel that watches them; and Sentinels that disagree."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from testproject.servers import RedisServer
from tests.support.databases import until
from tests.support.proxy import Proxy
from tests.support.redis_calls import client

if TYPE_CHECKING:
    from typing_extensions import Self

LOCATION = "redis://mymaster/0"
HOST = "127.0.0.1"


class RedisSentinel:
    """Three servers on 127.0.0.1; a context manager.

    Args:
        patience: Seconds without an answer after which the Sentinel promotes the replica.
        proxied: Whether everybody reaches the primary through ``front``.

    Attributes:
        primary: The server that has the locks until a fail-over.
        replica: The server that has them afterwards.
        front: A proxy of the primary; used only if ``proxied``.
    """

    LOCATION = LOCATION

    def __init__(self, *, patience: float, proxied: bool = False) -> None:
        self._patience, self._proxied = patience, proxied
        self.primary = RedisServer(args=["--repl-diskless-sync-delay", "0"])
        self.replica: RedisServer
        self.sentinel: RedisServer
        self.front: Proxy

    @property
    def options(self) -> dict[str, Any]:
        """Of an alias at ``LOCATION``."""
        return {"sentinels": [(HOST, self.sentinel.port)]}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.primary)
            self.front = stack.enter_context(Proxy(HOST, self.primary.port))
            port = self.front.port if self._proxied else self.primary.port
            args = ["--replicaof", HOST, str(port)]
            self.replica = stack.enter_context(RedisServer(args=args))
            asking = stack.enter_context(client(self.primary))
            until(lambda: asking.info("replication").get("slave0", {}).get("state") == "online")
            lines = [
                f"sentinel monitor mymaster {HOST} {port} 1",
                f"sentinel down-after-milliseconds mymaster {1000 * self._patience:.0f}",
                "sentinel failover-timeout mymaster 5000",
            ]
            self.sentinel = stack.enter_context(RedisServer(sentinel="\n".join(lines) + "\n"))
            watching = stack.enter_context(client(self.sentinel))
            until(lambda: watching.sentinel_master("mymaster")["num-slaves"] == 1)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def master_port(self) -> int:
        """The port of the master that the Sentinel names."""
        with client(self.sentinel) as asking:
            return int(asking.sentinel_get_master_addr_by_name("mymaster")[1])


class DividedSentinels:
    """Two Redis and a Sentinel of each, which do not know of each other; a context manager.

    So the Sentinels are what they are during a fail-over or a partition, for as long as a test
    needs: one still names the old master, which answers, and the other one names the new one,
    under a higher config epoch.

    Attributes:
        old, new: The two masters.
        old_sentinel, new_sentinel: Of each.
    """

    OLD_EPOCH, NEW_EPOCH = 5, 6

    def __init__(self) -> None:
        self.old, self.new = (
            RedisServer(args=["--repl-diskless-sync-delay", "0"]) for _ in range(2)
        )
        self.old_sentinel: RedisServer
        self.new_sentinel: RedisServer

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.old)
            stack.enter_context(self.new)
            self.old_sentinel, self.new_sentinel = (
                stack.enter_context(RedisServer(sentinel=_naming(master, epoch)))
                for master, epoch in ((self.old, self.OLD_EPOCH), (self.new, self.NEW_EPOCH))
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _naming(master: RedisServer, epoch: int) -> str:
    return (
        f"sentinel monitor mymaster {HOST} {master.port} 1\n"
        # Nothing fails here, however long the machine stalls.
        "sentinel down-after-milliseconds mymaster 600000\n"
        f"sentinel config-epoch mymaster {epoch}\n"
    )
