"""How coroutines use a blocking backend: its threads, its kinds of calls, and polling."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_dlock import Lock, clock, locks
from django_dlock.backends import calls, pauses
from django_dlock.backends.base import AliasOptions, BaseLockBackend
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease, LeaseRequest, Outcome
from tests.support.aliases import configured
from tests.support.at_nth import AtNth


class Blocking(LocalBackend):
    """Awaited on threads, like a store without an asynchronous client; its acquires may hang."""

    acall = BaseLockBackend.acall
    async_wait = BaseLockBackend.async_wait

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.begun: list[str] = []
        self.acquired: list[str] = []

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        self.begun.append(request.name)
        if self.hangs.is_set():
            self.goes_on.wait(10)
        self.acquired.append(request.name)
        return super().acquire(request, deadline=deadline)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocking]:
    monkeypatch.setattr(calls, "IDLE", 0.05)
    made = Blocking(AliasOptions(alias="blocking", backend="", command_timeout=30.0))
    others = set(call_threads())
    yield made
    made.goes_on.set()
    for thread in set(call_threads()) - others:
        thread.join(10)


def request(name: str = "it", **kwargs: Any) -> LeaseRequest:
    return LeaseRequest(name, secrets.token_hex(8), 30.0, **kwargs)


def acquire(backend: Blocking, name: str = "it", patience: float = 10.0) -> asyncio.Task[Any]:
    deadline = clock.now() + patience
    return asyncio.create_task(backend.acall(backend.acquire, request(name), deadline=deadline))


def call_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dlock-call"]


async def until(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.001)


async def test_g6_a_release_never_waits_behind_acquires(backend: Blocking) -> None:
    lease = await acquire(backend, "held")
    backend.hangs.set()
    hanging = [acquire(backend, f"n{number}") for number in range(50)]
    # Without that of the lease, as many as there are threads.
    await until(lambda: len(backend.begun) == 1 + calls.THREADS)
    released: Outcome = await backend.acall(
        backend.release, lease.name, lease.owner, min_hold=0.0, deadline=clock.now() + 30
    )
    assert released == "released"
    assert not any(task.done() for task in hanging)
    backend.goes_on.set()
    await asyncio.gather(*hanging)


async def test_g10_a_call_that_hangs_or_finds_no_thread_ends_by_its_deadline(
    backend: Blocking,
) -> None:
    backend.hangs.set()
    began = clock.now()
    tasks = [acquire(backend, f"n{number}", patience=0.2) for number in range(calls.THREADS + 1)]
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, BackendUnavailable)
    assert 0.2 <= clock.now() - began < 10
    # The last call had not begun, and nobody waits for it any more.
    backend.hangs.clear()
    backend.goes_on.set()
    await acquire(backend, "another")
    await until(lambda: len(backend.acquired) == calls.THREADS + 1)
    assert f"n{calls.THREADS}" not in backend.acquired


async def test_g7_a_call_cancelled_before_its_start_is_not_made(
    backend: Blocking,
) -> None:
    backend.hangs.set()
    hanging = [acquire(backend, f"n{number}") for number in range(calls.THREADS)]
    cancelled = acquire(backend, "cancelled")
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert cancelled.cancelled()
    backend.goes_on.set()
    await asyncio.gather(*hanging)
    await acquire(backend, "another")
    assert "cancelled" not in backend.acquired


async def test_errors_of_a_call_are_raised_where_it_is_awaited(
    backend: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise BackendUnavailable("down", "it", "blocking")

    monkeypatch.setattr(backend, "renew", fails)
    with pytest.raises(BackendUnavailable, match="down"):
        await backend.acall(backend.renew, [], process="p", deadline=clock.now() + 10)


class Sensitive:
    """An object that the garbage collector must not find."""


async def test_an_error_of_a_call_leaves_no_reference_cycle(
    backend: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[Sensitive]] = []

    def fails(*args: Any, **kwargs: Any) -> None:
        local = Sensitive()
        kept.append(weakref.ref(local))
        raise BackendUnavailable("down", "it", "blocking")

    monkeypatch.setattr(backend, "renew", fails)
    gc.disable()
    try:
        with contextlib.suppress(BackendUnavailable):
            await backend.acall(backend.renew, [], process="p", deadline=clock.now() + 10)
        pending = backend.start_renew([], process="p", deadline=clock.now() + 10)
        assert pending.wait(10)
        with contextlib.suppress(BackendUnavailable):
            pending.result()
        del pending
        await until(lambda: [ref() for ref in kept] == [None, None])
    finally:
        gc.enable()


def test_200_coroutines_that_wait_for_one_name_need_no_threads() -> None:
    # Threads of other tests' backends end after a while.
    before = set(call_threads())
    # Idle threads may be about to end while others are started in their place.
    few = 4 * calls.THREADS

    async def main() -> None:
        holder = Lock("it", bound=False)
        assert await holder.aacquire()
        waiting = [asyncio.create_task(take_turn()) for _ in range(200)]
        # Each of them asks repeatedly.
        asked = len(backend.acquired) + 2000
        await until(lambda: len(backend.acquired) >= asked)
        assert len(set(call_threads()) - before) <= few
        await holder.arelease()
        await asyncio.gather(*waiting)
        assert len(set(call_threads()) - before) <= few

    async def take_turn() -> None:
        async with Lock("it", wait=60):
            pass

    entry = {"BACKEND": f"{__name__}.Blocking", "TTL": 60, "OPTIONS": {"command_timeout": 20}}
    with configured({"default": entry}):
        backend = locks["default"]
        assert isinstance(backend, Blocking)
        asyncio.run(main())


@pytest.mark.parametrize("awaited", [True, False])
def test_a_wait_ends_when_its_time_is_over(backend: Blocking, awaited: bool) -> None:
    met = Contention("another", "held", 30.0, 0.0)
    end = clock.now() + 0.01
    how: Any = {"until": end, "interrupted": lambda: False}
    if awaited:
        assert asyncio.run(backend.async_wait(request(), met, **how)) is None
    else:
        assert BaseLockBackend.wait(backend, request(), met, **how) is None
    # A busy machine may wake it late, but long before the lease in its way ends.
    assert end <= clock.now() < end + 10


def test_g8_a_forked_child_uses_none_of_its_parents_threads(backend: Blocking) -> None:
    backend.hangs.set()
    for number in range(calls.THREADS):
        call = backend.acall(backend.acquire, request(f"n{number}"), deadline=clock.now() + 30)
        threading.Thread(target=asyncio.run, args=(call,), daemon=True).start()
    # All allowed threads are busy, so no thread would be started for another call of the parent.
    asyncio.run(until(lambda: len(backend.begun) == calls.THREADS))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            backend.after_fork()
            calls.IDLE = 60.0
            locked = asyncio.run(backend.acall(backend.locked, "it", deadline=clock.now() + 30))
            # This thread must belong to the child.
            status = 0 if len(call_threads()) == 1 and locked is False else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_answer_after_the_loop_was_closed_is_ignored(
    backend: Blocking, caplog: pytest.LogCaptureFixture
) -> None:
    backend.hangs.set()
    loop = asyncio.new_event_loop()
    # Threads of other tests' backends end after a while.
    others = set(call_threads())

    async def begin() -> None:
        acquire(backend)
        await until(lambda: set(call_threads()) - others)

    loop.run_until_complete(begin())
    for task in asyncio.all_tasks(loop):
        task.cancel()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    backend.goes_on.set()
    give_up_at = time.monotonic() + 10
    while not backend.acquired and time.monotonic() < give_up_at:
        pass
    backend.hangs.clear()
    assert not asyncio.run(backend.acall(backend.locked, "other", deadline=clock.now() + 10))
    # Locks of other tests may be collected, and their clients connect, during this one.
    others = "django_dlock", "kazoo"
    assert [one for one in caplog.records if not one.name.startswith(others)] == []


async def test_idle_threads_end(backend: Blocking) -> None:
    others = set(call_threads())
    backend.hangs.set()
    for _ in range(3):
        # A thread without a call could end before it is seen.
        backend.goes_on.clear()
        call = acquire(backend)
        await until(lambda: set(call_threads()) - others)
        backend.goes_on.set()
        await call
        await until(lambda: not set(call_threads()) - others)


def test_pauses_grow_and_end_with_the_lease_and_with_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    monkeypatch.setattr("random.uniform", lambda least, most: most)

    def pause(waited: float, remaining: float = 30.0, patience: float = 30.0) -> float:
        attempt = request(since=1000.0 - waited)
        met = Contention("o", "held", remaining, 0.0)
        return pauses.pause(attempt, met, 1000.0 + patience)

    assert pause(0.0) == pytest.approx(0.025)
    assert pause(0.8) == pytest.approx(0.125)
    assert pause(60.0) == pytest.approx(0.625)
    assert pause(60.0, remaining=0.1) == pytest.approx(0.1)
    assert pause(60.0, patience=0.2) == pytest.approx(0.2)
    assert pause(60.0, patience=-1.0) == 0.0


def test_g8_an_interrupt_in_a_forked_child_leaves_it_no_threads_of_its_parent() -> None:
    """In the child, a call gets a thread, wherever the one before was interrupted."""
    for number in itertools.count(1):
        made = calls.Calls()
        # From now on, a thread is idle.
        made.submit(os.getpid).result(5)
        if not (pid := os.fork()):
            code, nth = 1, AtNth(number)
            try:
                # An interrupt inside Python's ``Thread.start`` may leave it with a RuntimeError.
                with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                    try:
                        sys.setprofile(nth.profile)
                        made.submit(os.getpid)
                    finally:
                        sys.setprofile(None)
                made.submit(os.getpid).result(5)
                code = 2 if nth.left > 0 else 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 2), number
        if code == 2:
            break
    assert number > 3
