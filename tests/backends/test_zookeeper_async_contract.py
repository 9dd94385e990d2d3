"""Coroutines wait for a lock on ZooKeeper as the contract says."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.zookeeper import ZooKeeperBackend
from django_dlock.testing.contract_waiting import WaitingContract
from tests.support.awaited import Awaited
from tests.support.zookeeper import ZooKeeperServer


class AwaitedZooKeeperBackend(Awaited, ZooKeeperBackend):
    pass


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


class TestAwaitedZooKeeper(WaitingContract):
    # A busy machine takes its time for each step of a client in several threads.
    SHORT = 0.8
