"""One Redis, a Redis behind a Sentinel, a Redis Cluster, and Redlock on three nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil
from redis import Redis
from redis.exceptions import RedisError

from django_dlock import clock
from testproject.servers import RedisServer
from tests.support.aliases import Dlocks
from tests.support.faketime import SteppedClock, library, redis_server
from tests.support.nodes import Nodes
from tests.support.proxy import Proxy
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_sentinel import RedisSentinel

from .bed import Bed, Fault, Faults, network, process

PREFIX = "dlock"


def _clock(bed: Bed) -> SteppedClock | None:
    """A clock that can be stepped; ``None`` where libfaketime cannot be used."""
    preload = library()
    binary = preload and redis_server(preload)
    if not (preload and binary):
        return None
    clock = SteppedClock(preload, bed.directory)
    clock.env["DLOCK_REDIS_SERVER"] = binary
    return clock


def _steps(clock: SteppedClock | None, excuse: float | None) -> Faults:
    """Steps of one server's clock; a leap ahead ends its leases early."""
    if clock is None:
        return {}

    def step(offsets: list[str]) -> Callable[[float], str]:
        def begin(aim: float) -> str:
            offset = offsets[min(len(offsets) - 1, int(aim * len(offsets)))]
            clock.step(offset)
            return offset

        return begin

    back = Fault(step(["-5", "-60", "-3600"]), lambda: clock.step("+0"), 1, excuse)
    ahead = Fault(step(["+1", "+5", "+60"]), lambda: clock.step("+0"), 1, excuse, leap=60.0)
    # Each ends with a step in the other direction.
    return {"clock set back": back, "clock set ahead": ahead}


def _version(server: RedisServer) -> str:
    with contextlib.closing(Redis.from_url(server.url)) as client:
        return f"Redis {client.info('server')['redis_version']}"


class RedisBed(Bed):
    """One server behind a proxy. It saves no data, so it is empty when it starts again."""

    store = "redis"

    _clock: SteppedClock | None = None

    def start(self) -> None:
        self._clock = _clock(self)
        env = self._clock and self._clock.env
        self._server = self.stack.enter_context(RedisServer(env=env))
        self._proxy = self.stack.enter_context(Proxy("127.0.0.1", self._server.port))

    @property
    def dlocks(self) -> Dlocks:
        return {"default": self.entry("redis.RedisBackend", self._proxy.url)}

    @property
    def faults(self) -> Faults:
        return {
            **network([self._proxy]),
            **process([self._server], killed="restarted empty", excuse=0.0),
            "flushed": Fault(self._flush, excuse=0.0, lasts=False),
            **_steps(self._clock, 0.0),
        }

    def _flush(self, aim: float) -> str:
        with contextlib.closing(Redis.from_url(self._server.url, socket_timeout=5)) as client:
            client.flushall()
        return "FLUSHALL"

    @property
    def versions(self) -> str:
        return _version(self._server)


class RedlockBed(Bed):
    """Three nodes behind proxies. Those that start again are empty, and kept out for a TTL."""

    store = "redlock"

    @property
    def settles(self) -> float:  # type: ignore[override]
        # A node that was started or flushed is kept out.
        return self.ttl

    def start(self) -> None:
        self._clock = _clock(self)
        self._nodes = self.stack.enter_context(Nodes(3, self._clock and self._clock.env))
        self._nodes.prefix = PREFIX
        self._nodes.join()

    @property
    def dlocks(self) -> Dlocks:
        entry = self.entry("redlock.RedlockBackend", self._nodes.urls, max_ttl=self.ttl)
        return {"default": entry}

    @property
    def faults(self) -> Faults:
        # One node of three: whatever happens to it is no excuse. But a lease may be lost by it,
        # because one that was contended for may rest on two nodes only.
        return {
            **network([node.proxy for node in self._nodes.all]),
            **process([node.server for node in self._nodes.all], killed="restarted empty"),
            "flushed": Fault(self._flush, lasts=False),
            "two refused": Fault(self._refuse_two, self._readmit),
            "all cut": Fault(self._cut_all, lasts=False, harmless=True),
            # The lease ends early on this node, and may rest on it and one other.
            **_steps(self._clock, 0.0),
        }

    def _flush(self, aim: float) -> str:
        number = int(aim * 3)
        self._nodes[number].client.flushall()
        return f"FLUSHALL on node {number}"

    def _refuse_two(self, aim: float) -> str:
        left = int(aim * 3)
        for number in {0, 1, 2} - {left}:
            self._nodes[number].proxy.refuse()
        return f"all but node {left}"

    def _readmit(self) -> None:
        for node in self._nodes.all:
            node.proxy.refuse()
            node.proxy.accept()

    def _cut_all(self, aim: float) -> str:
        for node in self._nodes.all:
            node.proxy.cut()
        return "all nodes"

    @property
    def versions(self) -> str:
        return _version(self._nodes[0].server)


DEMOTED = 40.0
"""Seconds after a fail-over within which Sentinel makes the old primary a replica, also while it
has another one to do."""


class SentinelBed(Bed):
    """A primary, a replica and a Sentinel; ``replicas`` is 0, so a fail-over may lose leases.

    Everybody reaches the first primary through a proxy.
    """

    store = "sentinel"
    settles = 20.0

    def start(self) -> None:
        self._pair = self.stack.enter_context(RedisSentinel(patience=1.0, proxied=True))
        # Otherwise the Sentinel would know it as two servers once it is a replica.
        with contextlib.closing(Redis.from_url(self._pair.primary.url)) as client:
            client.config_set("replica-announce-port", self._pair.front.port)

    @property
    def dlocks(self) -> Dlocks:
        options = self._pair.options
        return {"default": self.entry("redis.RedisBackend", self._pair.LOCATION, **options)}

    @property
    def _sentinel(self) -> RedisServer:
        return self._pair.sentinel

    def primary(self) -> RedisServer:
        """The one that the Sentinel names."""
        port, first = self._pair.master_port, self._pair.primary
        return first if port in (first.port, self._pair.front.port) else self._pair.replica

    @property
    def faults(self) -> Faults:
        met: list[RedisServer] = []

        def pause(aim: float) -> str:
            met.append(self.primary())
            met[0].pause()
            return f"port {met[0].port}"

        def resume() -> None:
            while met:
                met.pop().resume()

        def kill(aim: float) -> str:
            met.append(self.primary())
            met[0].kill()
            return f"port {met[0].port}"

        def restart() -> None:
            while met:
                met.pop().restart()

        return {
            "primary paused": Fault(pause, resume, excuse=DEMOTED),
            "primary restarted empty": Fault(kill, restart, excuse=DEMOTED),
            "connections killed": Fault(self._cut, lasts=False),
            "planned fail-over": Fault(self.fail_over, excuse=DEMOTED, lasts=False, weight=4),
            "first primary cut off from all but a client": Fault(
                self._cut_off, self._pair.front.accept, excuse=DEMOTED
            ),
            **process([self._sentinel], name="Sentinel "),
        }

    def _cut(self, aim: float) -> str:
        with contextlib.closing(Redis.from_url(self.primary().url, socket_timeout=5)) as client:
            for kind in ("normal", "pubsub"):
                client.client_kill_filter(_type=kind, skipme=True)
        return "those of clients"

    def _cut_off(self, aim: float) -> str:
        """That client goes on there, and the Sentinel promotes the replica."""
        client = psutil.Process(self.clients()[0])
        ports = {one.laddr.port for one in client.net_connections("tcp4")}
        self._pair.front.refuse(but=ports)
        return f"client 0 keeps {len(ports & set(self._pair.front.links))} connections"

    def fail_over(self, aim: float) -> str:
        """``SENTINEL FAILOVER`` on healthy servers."""
        with contextlib.closing(Redis.from_url(self._sentinel.url, socket_timeout=5)) as client:
            try:
                client.execute_command("SENTINEL", "FAILOVER", "mymaster")
            except RedisError as error:
                # Another one is under way, or there is no healthy replica.
                return str(error)
        return "SENTINEL FAILOVER"

    @property
    def versions(self) -> str:
        return _version(self._pair.primary)


class ClusterBed(Bed):
    """Three primaries with a replica each; a fail-over of a dead one may lose leases."""

    store = "cluster"
    settles = 8.0

    def start(self) -> None:
        self._cluster = self.stack.enter_context(RedisCluster())

    @property
    def dlocks(self) -> Dlocks:
        addresses = [list(one) for one in self._cluster.addresses]
        url = self._cluster.nodes[0].url
        return {"default": self.entry("redis.RedisBackend", url, cluster_nodes=addresses)}

    def _primaries(self) -> list[RedisServer]:
        return [one for one in self._cluster.nodes if self._role(one) == "master"]

    def _role(self, node: RedisServer) -> str:
        with contextlib.suppress(RedisError, OSError):
            return str(self._cluster.info(node)["role"])
        return ""

    def owner(self) -> RedisServer:
        """The primary that has the keys now."""
        for node in self._primaries():
            for line in self._cluster.raw(node, "CLUSTER NODES").decode().splitlines():
                _, address, flags, *rest = line.split()
                spans = [span.split("-") for span in rest[5:] if not span.startswith("[")]
                has = any(int(span[0]) <= self._cluster.slot <= int(span[-1]) for span in spans)
                if has and "master" in flags and "fail" not in flags:
                    port = int(address.partition("@")[0].rpartition(":")[2])
                    return next(one for one in self._cluster.nodes if one.port == port)
        raise RuntimeError("nobody has the slot")

    @property
    def faults(self) -> Faults:
        met: list[RedisServer] = []

        def pause(aim: float) -> str:
            met.append(self.owner())
            met[0].pause()
            return f"port {met[0].port}"

        def resume() -> None:
            while met:
                met.pop().resume()

        def kill(aim: float) -> str:
            met.append(self.owner())
            met[0].kill()
            return f"port {met[0].port}"

        def restart() -> None:
            while met:
                met.pop().restart()

        return {
            "primary paused": Fault(pause, resume, excuse=5.0),
            "primary restarted empty": Fault(kill, restart, excuse=5.0),
            "connections killed": Fault(self._cut, lasts=False),
            # The old primary waits for the replica to have everything.
            "planned fail-over": Fault(self._fail_over, lasts=False, weight=4),
            "slot moved": Fault(self._move, lasts=False, weight=4, harmless=True),
        }

    def _cut(self, aim: float) -> str:
        for kind in ("normal", "pubsub"):
            self._cluster.ask(self.owner(), "CLIENT", "KILL", "TYPE", kind)
        return "those of clients"

    def _fail_over(self, aim: float) -> str:
        owner = self.owner()
        for node in self._cluster.nodes:
            with contextlib.suppress(RedisError, OSError):
                facts = self._cluster.info(node)
                if facts["role"] == "slave" and facts["master_port"] == owner.port:
                    self._cluster.ask(node, "CLUSTER", "FAILOVER")
                    return f"port {owner.port} to {node.port}"
        return "no replica"

    def _move(self, aim: float) -> str:
        source = self.owner()
        others = [one for one in self._primaries() if one is not source]
        target = others[int(aim * len(others))]
        # A slot that is left between two nodes would refuse scripts for ever.
        give_up_at = clock.now() + self.settles
        while True:
            try:
                self._hand_over(source, target)
                return f"port {source.port} to {target.port}"
            except RedisError:  # noqa: PERF203 - it may take a while
                if clock.now() >= give_up_at:
                    raise
                time.sleep(0.2)

    def _hand_over(self, source: RedisServer, target: RedisServer) -> None:
        """May be repeated."""
        ask, slot = self._cluster.ask, self._cluster.slot
        if self.owner() is source:
            ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._cluster.id_of(source))
            ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._cluster.id_of(target))
            while keys := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 20):
                for key in keys:
                    ask(source, "MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        for node in (target, source, *self._primaries()):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", self._cluster.id_of(target))

    @property
    def versions(self) -> str:
        return _version(self._cluster.nodes[0])
