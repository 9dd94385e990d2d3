"""A fork waits while another thread connects to a store, or to the database of fail-over."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper

from django_dlock import BackendUnavailable, Lock, process
from django_dlock.backends.failover.own_connection import on_own_connection
from testproject.processes import HOST, free_port
from tests.support.aliases import configured
from tests.support.tls_lock import PATIENCE, TlsLock, noted_forks


def _nowhere(scheme: str) -> str:
    return f"{scheme}://{HOST}:{free_port()}"


# Nothing listens there: each refuses, once its address is resolved.
STORES: dict[str, Callable[[], Any]] = {
    "redis": lambda: ("redis.RedisBackend", _nowhere("redis")),
    "redlock": lambda: ("redlock.RedlockBackend", [_nowhere("redis") for _ in range(3)]),
    "etcd": lambda: ("etcd.EtcdBackend", _nowhere("http")),
}


@pytest.mark.parametrize("store", STORES)
def test_g8_a_fork_waits_while_another_thread_connects(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, location = STORES[store]()
    entry = {"BACKEND": f"django_dlock.backends.{path}", "LOCATION": location}
    resolve = socket.getaddrinfo

    def resolve_slowly(*args: Any, **kwargs: Any) -> Any:
        if not lock.taken.is_set():
            lock.hold()
        return resolve(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    with noted_forks() as waits, configured({"default": entry}), ThreadPoolExecutor(1) as pool:
        lock = TlsLock(may_end=waits)
        call = pool.submit(Lock("it").acquire, timeout=0)
        assert lock.taken.wait(PATIENCE)
        assert lock.is_free_in_child()
        assert isinstance(call.exception(PATIENCE), BackendUnavailable)


@pytest.mark.django_db(transaction=True)
def test_g8_a_fork_waits_while_a_thread_of_failover_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect_slowly(self: BaseDatabaseWrapper) -> None:
        lock.hold()
        connect(self)

    connect, answered = BaseDatabaseWrapper.connect, threading.Event()
    ended = queue.SimpleQueue[str]()

    def wait_for_a_fork() -> None:
        ended.put(threading.current_thread().name)
        # The caller of a statement that is done does not wait for this.
        assert answered.wait(PATIENCE)

    monkeypatch.setattr(BaseDatabaseWrapper, "connect", connect_slowly)
    monkeypatch.setattr(process, "thread_ends", wait_for_a_fork)
    with noted_forks() as waits, ThreadPoolExecutor(1) as pool:
        lock = TlsLock(may_end=waits)
        call = pool.submit(on_own_connection, lambda: None, "default", PATIENCE)
        assert lock.taken.wait(PATIENCE)
        assert lock.is_free_in_child()
        assert call.exception(PATIENCE / 2) is None
        assert ended.get(timeout=PATIENCE) == "dlock-failover"
        answered.set()
