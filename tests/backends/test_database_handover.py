"""A release on PostgreSQL wakes only the waiter to which it hands the lease over."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock import Lock, clock, locks, process
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.lease import Contention, Lease, LeaseRequest
from tests.support import databases, postgres
from tests.support.aliases import configured
from tests.support.database_bed import store_of
from tests.support.pgbouncer import PgBouncer

PATIENCE = 20.0


def backend_for(alias: str, **options: Any) -> DatabaseBackend:
    return DatabaseBackend(
        AliasOptions(
            alias="database",
            backend="database",
            key_prefix=f"test-{secrets.token_hex(4)}",
            command_timeout=5.0,
            options={"database": alias, **options},
        )
    )


@pytest.fixture
def backend(postgres_alias: str, django_db_blocker: DjangoDbBlocker) -> Iterator[DatabaseBackend]:
    it = backend_for(postgres_alias)
    with django_db_blocker.unblock():
        yield it
    it.close()


def request(**kwargs: Any) -> LeaseRequest:
    return LeaseRequest("name", secrets.token_hex(8), 30.0, **kwargs)


def waiter() -> LeaseRequest:
    return request(waits=True, renewed=True)


def grant(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease:
    answer = backend.acquire(attempt, deadline=backend.call_deadline())
    assert isinstance(answer, Lease)
    return answer


def refuse(backend: DatabaseBackend, attempt: LeaseRequest) -> Contention:
    answer = backend.acquire(attempt, deadline=backend.call_deadline())
    assert isinstance(answer, Contention)
    return answer


def until(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def listening(backend: DatabaseBackend) -> None:
    wakeup = store_of(backend).wakeup
    assert wakeup is not None
    wakeup.keep_listening()
    until(lambda: wakeup.subscribed)


def test_g4_a_release_hands_the_lease_to_a_waiting_thread(backend: DatabaseBackend) -> None:
    listening(backend)
    lease, attempt = grant(backend, request()), waiter()
    met = refuse(backend, attempt)
    release = threading.Timer(
        0.05,
        backend.release,
        (lease.name, lease.owner),
        {"min_hold": 0.0, "deadline": clock.now() + PATIENCE},
    )
    release.start()
    # A waiter that asked again would get ``None``.
    given = backend.wait(attempt, met, until=clock.now() + PATIENCE, interrupted=lambda: False)
    release.join()
    assert given is not None
    assert (given.owner, given.ttl) == (attempt.owner, 30.0)
    assert given.token > lease.token
    assert grant(backend, attempt).token == given.token


def test_g4_a_release_hands_the_lease_to_a_waiting_coroutine(
    backend: DatabaseBackend,
) -> None:
    listening(backend)
    lease, attempt = grant(backend, request()), waiter()
    met = refuse(backend, attempt)

    async def wait() -> Lease | None:
        waiting = asyncio.create_task(
            backend.async_wait(
                attempt, met, until=clock.now() + PATIENCE, interrupted=lambda: False
            )
        )
        await asyncio.sleep(0)
        await backend.acall(
            backend.release,
            lease.name,
            lease.owner,
            min_hold=0.0,
            deadline=clock.now() + PATIENCE,
        )
        return await waiting

    given = asyncio.run(wait())
    assert given is not None
    assert given.owner == attempt.owner


def test_g4_a_lease_that_is_parked_wakes_the_retry_that_waits_for_it(
    backend: DatabaseBackend,
) -> None:
    # The retry may begin before the run that it repeats has passed its lease on.
    listening(backend)
    lease = grant(backend, request())
    parked = request(kind="parked", replaces=lease.owner)
    retry = request(waits=True, renewed=True, replaces=parked.owner)
    met = refuse(backend, retry)
    grant(backend, parked)
    give_up_at = clock.now() + 6.0
    assert backend.wait(retry, met, until=give_up_at, interrupted=lambda: False) is None
    assert clock.now() < give_up_at, "nothing woke the waiter"
    assert grant(backend, retry).token > lease.token


def test_g4_waiters_poll_if_a_pooler_drops_notifications(
    postgres_alias: str,
    postgres_url: str,
    pooler: PgBouncer,
    django_db_blocker: DjangoDbBlocker,
) -> None:
    settings = postgres.settings_for(pooler.url_for(postgres_url))
    with databases.added("pooled", settings), django_db_blocker.unblock():
        backend = backend_for("pooled")
        lease, attempt = grant(backend, request()), waiter()
        met = refuse(backend, attempt)
        wakeup = store_of(backend).wakeup
        assert wakeup is not None
        until(lambda: not wakeup.works)
        backend.release(lease.name, lease.owner, min_hold=0.0, deadline=backend.call_deadline())
        assert backend.wait(attempt, met, until=clock.now() + 600, interrupted=bool) is None
        assert grant(backend, attempt).token > lease.token
        backend.close()


def test_g4_the_lock_of_a_process_killed_on_another_machine_is_freed_by_proof_of_death(
    postgres_alias: str, django_db_blocker: DjangoDbBlocker
) -> None:
    entry = {
        "BACKEND": "django_dlock.backends.database.DatabaseBackend",
        "TTL": 3600,
        "OPTIONS": {"database": postgres_alias, "proof": True, "command_timeout": 5.0},
    }
    with configured({"default": entry}), django_db_blocker.unblock():
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                # On this machine, its death would be noticed without the database.
                socket.gethostname = lambda: "another machine"
                process.reset()
                assert Lock("name", bound=False).acquire()
                listening(locks["default"])
                os.write(write, b".")
                signal.pause()
            finally:
                os._exit(1)
        assert os.read(read, 1)
        waiting = threading.Thread(target=take, daemon=True)
        waiting.start()
        until(lambda: locks["default"].get("name").waiting)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        locks["default"].close()


def take() -> None:
    with Lock("name", wait=3600):
        pass
