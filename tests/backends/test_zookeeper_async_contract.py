"""The ZooKeeper backend keeps the contract for coroutines, too."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.zookeeper import ZooKeeperBackend
from django_dlock.testing import BackendContract
from tests.support.awaited import METHODS, LoopThread
from tests.support.zookeeper import ZooKeeperServer


class AwaitedZooKeeperBackend(ZooKeeperBackend):
    """Its methods await those of a backend on one event loop, whoever calls them."""

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._awaited = ZooKeeperBackend(options)
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()

    def _await(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._starting:
            thread = self._thread = self._thread or LoopThread()
        if method == "wait":
            return thread.run(self._awaited.async_wait(*args, **kwargs))
        return thread.run(self._awaited.acall(method, *args, **kwargs))

    def deregister(self, process: str, *, deadline: float) -> None:
        self._awaited.deregister(process, deadline=deadline)

    def after_fork(self) -> None:
        self._awaited.after_fork()
        super().after_fork()
        self._thread, self._starting = None, threading.Lock()

    def close(self) -> None:
        self._awaited.close()
        super().close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()


for _method in METHODS:
    _awaits = functools.partialmethod(AwaitedZooKeeperBackend._await, _method)
    setattr(AwaitedZooKeeperBackend, _method, _awaits)


@pytest.fixture
def backend(zookeeper_server: ZooKeeperServer) -> Iterator[ZooKeeperBackend]:
    backend = AwaitedZooKeeperBackend(
        AliasOptions(
            alias="zookeeper",
            backend="",
            location=zookeeper_server.location,
            ttl=100.0,
            command_timeout=5.0,
            key_prefix=f"test-{secrets.token_hex(4)}",
        )
    )
    yield backend
    backend.deregister("", deadline=backend.call_deadline())
    backend.close()


class TestAwaitedZooKeeper(BackendContract):
    # A busy machine takes its time for each step of a client in several threads.
    SHORT = 0.8
