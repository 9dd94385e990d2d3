"""Independent Redis servers, each behind a proxy, as the nodes of a quorum."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, final

import redis

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.redis.keys import Keys
from django_dlock.backends.redlock import RedlockBackend
from testproject.servers import RedisServer
from tests.support.proxy import Proxy

Fault = Literal["refuse", "black hole", "pause", "kill"]


@final
class Node:
    """One server and the proxy in front of it.

    Args:
        env: Additions to the server's environment.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.server = RedisServer(env=env).start()
        self.proxy = Proxy("127.0.0.1", self.server.port)
        self.is_damaged = self._is_paused = False
        # It bypasses the proxy.
        self.client: Any = redis.Redis.from_url(self.server.url)

    def join(self, prefix: str) -> None:
        """Let it vote at once, as if it had been up for a long time."""
        run_id = self.client.info("server")["run_id"]
        self.client.set(f"{Keys(prefix).base}node", f"{run_id} joined")

    def owner_of(self, prefix: str, name: str) -> str:
        """Who has the name on this node; empty if nobody."""
        owner, kind = self.client.hmget(Keys(prefix).locks + name, "owner", "kind")
        return "" if owner is None or kind in {b"released", b"broken"} else owner.decode()

    def restart(self) -> None:
        """Kill the server and start it again, without its data."""
        self.server.restart()
        self.is_damaged = True

    def fail(self, how: Fault) -> None:
        self.is_damaged = True
        if how == "black hole":
            self.proxy.black_hole()
        elif how == "pause":
            self.server.pause()
            self._is_paused = True
        elif how == "kill":
            self.server.kill()
        else:
            self.proxy.refuse()

    def slow_down(self, seconds: float) -> None:
        """Delay each of its replies."""
        self.is_damaged = True
        self.proxy.delay = seconds

    def heal(self) -> None:
        """Make it reachable again, with its data unless it was killed."""
        if not self.is_damaged:
            return
        if self._is_paused:
            self.server.resume()
        self.server.start()
        self.proxy.refuse()
        self.proxy.accept()
        self.proxy.black_holed, self.proxy.delay = False, 0.0
        self.is_damaged = self._is_paused = False

    def stop(self) -> None:
        if self._is_paused:
            self.server.resume()
        self.client.close()
        self.proxy.refuse()
        self.server.stop()


@final
class Nodes:
    """A context manager; the nodes have joined under a prefix of their own.

    Args:
        env: Additions to the environment of the first one.

    Attributes:
        prefix: The ``KEY_PREFIX``.
    """

    def __init__(self, count: int, env: Mapping[str, str] | None = None) -> None:
        self.prefix = f"test-{secrets.token_hex(4)}"
        self.all: list[Node] = []
        self._count, self._env = count, env
        self._backends: list[RedlockBackend] = []

    def __enter__(self) -> Nodes:
        try:
            for number in range(self._count):
                self.all.append(Node(None if number else self._env))
            self.join()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.close()
        while self.all:
            self.all.pop().stop()

    def close(self) -> None:
        """Close the backends."""
        while self._backends:
            self._backends.pop().close()

    def begin_anew(self) -> None:
        """Under a new prefix, so that one test knows nothing of another."""
        self.close()
        self.heal()
        self.prefix = f"test-{secrets.token_hex(4)}"
        self.join()

    def heal(self) -> None:
        for node in self.all:
            node.heal()

    def fail(self, numbers: Iterable[int], how: Fault = "refuse") -> None:
        for number in numbers:
            self.all[number].fail(how)

    def owners_of(self, name: str) -> list[str]:
        """Who has the name on each node."""
        return [node.owner_of(self.prefix, name) for node in self.all]

    def join(self) -> None:
        for node in self.all:
            node.join(self.prefix)

    def __getitem__(self, number: int) -> Node:
        return self.all[number]

    @property
    def urls(self) -> list[str]:
        return [node.proxy.url for node in self.all]

    def options(self, urls: Sequence[str] = (), **changed: Any) -> AliasOptions:
        values: dict[str, Any] = {
            "location": tuple(urls or self.urls),
            "key_prefix": self.prefix,
            "command_timeout": 20.0,
            "options": {"max_ttl": 3600.0},
            **changed,
        }
        return AliasOptions(alias="redlock", backend="redlock", **values)

    def backend(self, urls: Sequence[str] = (), **changed: Any) -> RedlockBackend:
        """A backend on the nodes; closed with them."""
        backend = RedlockBackend(self.options(urls, **changed))
        self._backends.append(backend)
        return backend
