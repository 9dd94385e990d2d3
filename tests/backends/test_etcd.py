"""The etcd backend keeps the contract, for threads and for coroutines."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.testing import BackendContract
from tests.support.awaited import METHODS, LoopThread
from tests.support.etcd import EtcdServer


class AwaitedEtcdBackend(EtcdBackend):
    """Its methods await those of a backend on one event loop, whoever calls them."""

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._awaited = EtcdBackend(options)
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()

    def _await(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._starting:
            thread = self._thread = self._thread or LoopThread()
        if method == "wait":
            return thread.run(self._awaited.async_wait(*args, **kwargs))
        return thread.run(self._awaited.acall(method, *args, **kwargs))

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
    _awaits = functools.partialmethod(AwaitedEtcdBackend._await, _method)
    setattr(AwaitedEtcdBackend, _method, _awaits)


@pytest.fixture
def backend(etcd_server: EtcdServer) -> Iterator[EtcdBackend]:
    yield from _made(EtcdBackend, etcd_server)


def _made(made: type[EtcdBackend], server: EtcdServer) -> Iterator[EtcdBackend]:
    prefix = f"test-{secrets.token_hex(4)}"
    # Each test has time on a busy machine.
    options = AliasOptions("etcd", "etcd", location=server.url, key_prefix=prefix)
    backend = made(options)
    yield backend
    backend.close()


class TestEtcd(BackendContract):
    pass


class TestAwaitedEtcd(BackendContract):
    @pytest.fixture
    def backend(self, etcd_server: EtcdServer) -> Iterator[EtcdBackend]:
        yield from _made(AwaitedEtcdBackend, etcd_server)
