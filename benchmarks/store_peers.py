"""The floors and peers of Redlock, ZooKeeper, etcd and fail-over; see ``peers``.

The floors use the same client and the same server as our backend: redis-py, kazoo, and urllib3's
connection to etcd's JSON gateway.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from .peers import (
    ETCD,
    LEASE,
    REDLOCK,
    UNLOCK,
    ZOOKEEPER,
    Handle,
    Kind,
    Route,
    need,
    no_handle,
)

BARE_NODES, BARE_ZOOKEEPER, BARE_ETCD = "bare on 3 nodes", "bare kazoo", "bare etcd"
WATCHED_NODE, WATCHED_KEY = "watched node", "watched key"
POTTERY_NODES, REDLOCK_PY = "pottery Redlock, 3 nodes", "redlock-py"
KAZOO, ETCD_LOCK, ETCD3GW = "kazoo Lock", "etcd's lock service", "etcd3gw"


# -- Redlock --------------------------------------------------------------------------------


def nodes(route: Route) -> list[Any]:
    """A client for each node."""
    from redis import Redis

    return [Redis.from_url(url) for url in route.where(REDLOCK)]


def _bare_nodes(route: Route) -> Callable[[str], None]:
    clients = nodes(route)
    unlock, *_ = [client.script_load(UNLOCK) for client in clients]
    connections = [client.connection_pool.get_connection() for client in clients]
    owner, lease = secrets.token_hex(16), LEASE * 1000

    def ask(*command: Any) -> None:
        # To all of them first, because no lock could be faster with this client.
        for connection in connections:
            connection.send_command(*command)
        for connection in connections:
            connection.read_response()

    def cycle(name: str) -> None:
        ask("SET", name, owner, "NX", "PX", lease)
        ask("EVALSHA", unlock, 1, name, owner)

    return cycle


def _pottery(route: Route) -> Callable[[str], Handle]:
    need("pottery", "pottery")
    from pottery import Redlock

    masters = set(nodes(route))
    return lambda name: Redlock(key=name, masters=masters, auto_release_time=LEASE)


class _RedlockPy:
    def __init__(self, manager: Any, name: str) -> None:
        self._manager, self._name = manager, name
        self._lock: Any = None

    def acquire(self) -> None:
        self._lock = self._manager.lock(self._name, LEASE * 1000)

    def release(self) -> None:
        self._manager.unlock(self._lock)


def _redlock_py(route: Route) -> Callable[[str], Handle]:
    need("redlock", "redlock-py")
    from redlock import Redlock  # type: ignore[import-untyped]

    manager = Redlock(nodes(route))
    return lambda name: _RedlockPy(manager, name)


# -- ZooKeeper ------------------------------------------------------------------------------


def _kazoo(route: Route) -> Any:
    need("kazoo", "kazoo")
    from kazoo.client import KazooClient

    client = KazooClient(hosts=route.where(ZOOKEEPER), timeout=LEASE)
    client.start()
    client.ensure_path("/bare")
    return client


def _node(name: str) -> str:
    return f"/bare/{quote(name, safe='')}"


def _bare_zookeeper(route: Route) -> Callable[[str], None]:
    client = _kazoo(route)

    def cycle(name: str) -> None:
        client.create(_node(name), b"", ephemeral=True)
        client.delete(_node(name))

    return cycle


class _WatchedNode:
    """A lock that is a node: its waiters watch the node, and create it once it is gone."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._path = client, _node(name)

    def acquire(self) -> None:
        from kazoo.exceptions import NodeExistsError

        while True:
            gone = threading.Event()
            with contextlib.suppress(NodeExistsError):
                self._client.create(self._path, b"", ephemeral=True)
                return
            if self._client.exists(self._path, watch=lambda _, gone=gone: gone.set()):
                gone.wait()

    def release(self) -> None:
        self._client.delete(self._path)


def _watched_node(route: Route) -> Callable[[str], Handle]:
    client = _kazoo(route)
    return lambda name: _WatchedNode(client, name)


def _kazoo_lock(route: Route) -> Callable[[str], Handle]:
    client = _kazoo(route)
    made = functools.cache(client.ensure_path)

    def make(name: str) -> Handle:
        # Created once; each handle still asks the server whether it exists.
        made(path := f"/kazoo/{quote(name, safe='')}")
        return client.Lock(path)

    return make


# -- etcd -----------------------------------------------------------------------------------


class _Gateway:
    """One connection to the JSON gateway, as our backend makes it."""

    def __init__(self, url: str) -> None:
        need("urllib3", "urllib3")
        from urllib3.connection import HTTPConnection

        parts = urlsplit(url)
        self._connection = HTTPConnection(parts.hostname or "", parts.port)

    def __call__(self, path: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask(path, body).data)
        return answer

    def ask(self, path: str, body: Any) -> Any:
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        self._connection.request(
            "POST", f"/v3/{path}", body=content, headers=headers, preload_content=False
        )
        return self._connection.getresponse()


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _put_if_missing(key: str, value: str, **lease: str) -> dict[str, Any]:
    missing = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
    put = {"request_put": {"key": key, "value": value, **lease}}
    return {"compare": [missing], "success": [put]}


def _bare_etcd(route: Route) -> Callable[[str], None]:
    call, owner = _Gateway(route.where(ETCD)), _encoded(secrets.token_hex(16))

    def cycle(name: str) -> None:
        lease = call("lease/grant", TTL=str(LEASE))["ID"]
        call("kv/txn", **_put_if_missing(_encoded(f"bare/{name}"), owner, lease=lease))
        call("lease/revoke", ID=lease)

    return cycle


_seen: dict[str, int] = {}
"""The number in a key that this process has last read or written."""


class _WatchedKey:
    """For two processes that alternate: each waits until the other has written the key."""

    def __init__(self, url: str, name: str) -> None:
        self._call, self._key = _Gateway(url), _encoded(f"watched/{name}")
        self._watch = _Gateway(url)
        self._lines = iter(self._watch.ask("watch", {"create_request": {"key": self._key}}))
        # The first answer says that the watch has been created.
        next(self._lines)

    def acquire(self) -> None:
        # At first there is no key, and the name is free.
        zero = _put_if_missing(self._key, _encoded("0"))
        if self._key not in _seen and self._call("kv/txn", **zero).get("succeeded"):
            return
        for line in self._lines:
            for event in json.loads(line)["result"].get("events", ()):
                number = int(base64.b64decode(event["kv"]["value"]))
                # A process also sees what it has written itself.
                if number > _seen.get(self._key, 0):
                    _seen[self._key] = number
                    return

    def release(self) -> None:
        _seen[self._key] = number = _seen.get(self._key, 0) + 1
        self._call("kv/put", key=self._key, value=_encoded(str(number)))


def _watched_key(route: Route) -> Callable[[str], Handle]:
    url = route.where(ETCD)
    return functools.cache(lambda name: _WatchedKey(url, name))


class _LockService:
    """The lock that etcd itself offers: a call that waits, under a lease."""

    def __init__(self, call: _Gateway, name: str) -> None:
        self._call, self._name = call, _encoded(f"service/{name}")

    def acquire(self) -> None:
        self._lease = self._call("lease/grant", TTL=str(LEASE))["ID"]
        self._key = self._call("lock/lock", name=self._name, lease=self._lease)["key"]

    def release(self) -> None:
        self._call("lock/unlock", key=self._key)
        self._call("lease/revoke", ID=self._lease)


def _lock_service(route: Route) -> Callable[[str], Handle]:
    call = _Gateway(route.where(ETCD))
    return lambda name: _LockService(call, name)


def _etcd3gw(route: Route) -> Callable[[str], Handle]:
    need("etcd3gw", "etcd3gw")
    import etcd3gw  # type: ignore[import-untyped]

    parts = urlsplit(route.where(ETCD))
    connected = etcd3gw.client(host=parts.hostname, port=parts.port, api_path="/v3/")
    return lambda name: connected.lock(name, ttl=LEASE)


STORE_KINDS: Sequence[Kind] = (
    Kind(
        BARE_NODES,
        "floor",
        "redis-py: SET NX PX to 3 servers, then their answers; then EVALSHA of a "
        "compare-and-delete; one owner for all",
        no_handle,
        cycle=_bare_nodes,
    ),
    Kind(
        POTTERY_NODES,
        "peer",
        "3 masters, auto_release_time=30; not renewed; its waiters poll",
        _pottery,
        polls=0.2,
    ),
    Kind(REDLOCK_PY, "peer", "3 servers, ttl=30000; not renewed, waits for nobody", _redlock_py),
    Kind(
        BARE_ZOOKEEPER,
        "floor",
        "kazoo: create an ephemeral node, delete it",
        no_handle,
        cycle=_bare_zookeeper,
    ),
    Kind(
        WATCHED_NODE,
        "floor",
        "kazoo: delete the node; who waits watches it, and creates it; no queue",
        _watched_node,
    ),
    Kind(KAZOO, "peer", "client.Lock, as its documentation shows it", _kazoo_lock),
    Kind(
        BARE_ETCD,
        "floor",
        "urllib3, JSON gateway: grant a lease, put the key if there is none, revoke the lease; "
        "one owner for all",
        no_handle,
        cycle=_bare_etcd,
    ),
    Kind(
        WATCHED_KEY,
        "floor",
        "urllib3, JSON gateway: put the key; who waits reads an open watch; no lease",
        _watched_key,
    ),
    Kind(
        ETCD_LOCK,
        "peer",
        "urllib3, JSON gateway: lease/grant, lock/lock, lock/unlock, lease/revoke; not renewed",
        _lock_service,
    ),
    Kind(ETCD3GW, "peer", "client.lock(ttl=30), which waits for nobody; not renewed", _etcd3gw),
)
