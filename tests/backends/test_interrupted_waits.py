"""A waiter that is interrupted anywhere keeps no other one from being woken, at every store."""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import django_dlock
from django_dlock import clock, locks
from django_dlock.backends.base import BaseLockBackend
from django_dlock.lease import Contention, Lease, LeaseRequest
from tests.support.aliases import LONG, configured
from tests.support.at_nth import AtNth

PATIENCE = 20.0
OURS = str(Path(django_dlock.__file__).parent)
STORES = {
    "redis": ("redis.RedisBackend", "redis_server"),
    "etcd": ("etcd.EtcdBackend", "etcd_server"),
    "zookeeper": ("zookeeper.ZooKeeperBackend", "zookeeper_server"),
    "postgres": ("database.DatabaseBackend", "postgres_alias"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[BaseLockBackend]:
    backend, fixture = STORES[request.param]
    server = request.getfixturevalue(fixture)
    entry: dict[str, Any] = {
        "BACKEND": f"django_dlock.backends.{backend}",
        "KEY_PREFIX": f"test-{secrets.token_hex(4)}",
        "TTL": LONG,
    }
    if fixture.endswith("_alias"):
        entry["OPTIONS"] = {"database": server}
    else:
        entry["LOCATION"] = getattr(server, "location", None) or server.url
    with configured({"default": entry}):
        it = locks["default"]
        yield it
        it.close()


class AtNthOfOurs(AtNth):
    """In the package's own code: an interrupt inside kazoo can leave its locks locked."""

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_filename.startswith(OURS):
            super().profile(frame, event, arg)


def request(name: str, *, waits: bool = True) -> LeaseRequest:
    return LeaseRequest(name, secrets.token_hex(8), 4 * PATIENCE, waits=waits)


class Names:
    """What the test asks of the store."""

    def __init__(self, store: BaseLockBackend) -> None:
        self.store = store

    def ask(self, request: LeaseRequest) -> Lease | Contention:
        return self.store.acquire(request, deadline=self.store.call_deadline())

    def met(self, request: LeaseRequest) -> Contention:
        answer = self.ask(request)
        assert isinstance(answer, Contention)
        return answer

    def wait(self, request: LeaseRequest, met: Contention, seconds: float) -> Lease | None:
        until = clock.now() + seconds
        return self.store.wait(request, met, until=until, interrupted=lambda: False)

    def waiting(self, request: LeaseRequest) -> Callable[[], bool]:
        """Let a thread wait for the lease; returns what waits for it, and says whether it came."""
        met, results = self.met(request), list[bool]()
        thread = threading.Thread(target=lambda: results.append(self._woken(request, met)))
        thread.start()

        def result() -> bool:
            thread.join()
            return results == [True]

        return result

    def _woken(self, request: LeaseRequest, met: Lease | Contention) -> bool:
        """Whether it gets the lease before it would ask again by itself."""
        give_up_at = clock.now() + PATIENCE
        while isinstance(met, Contention):
            if self.wait(request, met, give_up_at - clock.now()) is not None:
                break
            met = self.ask(request)
        return clock.now() < give_up_at


@pytest.mark.django_db(transaction=True)
def test_g7_an_interrupted_wait_keeps_no_other_waiter_asleep(store: BaseLockBackend) -> None:
    names = Names(store)
    for number in itertools.count():
        holder, first, second = (request(f"n{number}") for _ in range(3))
        assert isinstance(names.ask(holder), Lease)
        met, nth = names.met(first), AtNthOfOurs(number)
        try:
            sys.setprofile(nth.profile)
            names.wait(first, met, 0.02)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        store.cancel_acquire(first, deadline=store.call_deadline())
        waiting = names.waiting(second)
        store.release(holder.name, holder.owner, min_hold=0.0, deadline=store.call_deadline())
        assert waiting(), number
        store.release(second.name, second.owner, min_hold=0.0, deadline=store.call_deadline())
        if number and nth.left > 0:
            break
    assert number > 10
