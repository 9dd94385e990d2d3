"""The etcd backend keeps the contract, and for coroutines that part of it which is about waits."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.testing import BackendContract
from django_dlock.testing.contract_waiting import WaitingContract
from tests.support.awaited import Awaited
from tests.support.etcd import EtcdServer


class AwaitedEtcdBackend(Awaited, EtcdBackend):
    pass


@pytest.fixture
def backend(etcd_server: EtcdServer) -> Iterator[EtcdBackend]:
    yield from _made(EtcdBackend, etcd_server)


def _made(made: type[EtcdBackend], server: EtcdServer) -> Iterator[EtcdBackend]:
    prefix = f"test-{secrets.token_hex(4)}"
    # Each test has time on a busy machine.
    options = AliasOptions(
        "etcd", "etcd", location=server.url, key_prefix=prefix, command_timeout=5.0
    )
    backend = made(options)
    yield backend
    backend.close()


class TestEtcd(BackendContract):
    pass


class TestAwaitedEtcd(WaitingContract):
    @pytest.fixture
    def backend(self, etcd_server: EtcdServer) -> Iterator[EtcdBackend]:
        yield from _made(AwaitedEtcdBackend, etcd_server)
