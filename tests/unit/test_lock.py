"""The handle: what it returns, when it raises, and which thread or task holds."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import gc
import os
import pickle
import re
import socket
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from django_dlock import (
    AcquireTimeout,
    AlreadyHeld,
    BackendUnavailable,
    ConnectionsBusy,
    LeaseLost,
    Lock,
    LockError,
    LockNotAcquired,
    NotHeld,
    clock,
    exceptions,
    idempotent_view,
    locked,
    locked_view,
    locks,
    signals,
)
from django_dlock.backends.local import LocalBackend
from django_dlock.core import dispatch, transactions
from django_dlock.lease import Contention
from tests.support.leases import lease_of

pytestmark = pytest.mark.usefixtures("_fresh_local")


@pytest.fixture
def _fresh_local() -> None:
    locks.reset()


def local(name: str = "it", **options: Any) -> Lock:
    return Lock(name, using="local", **options)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_an_option_that_the_alias_does_not_support_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks["local"], "capabilities", frozenset())
    with pytest.raises(ValueError, match=r"min_hold .*'min_hold'.*'local'"):
        local(min_hold=5)
    with local(min_hold=0):
        pass


# -- acquire and release -------------------------------------------------------------------


def test_a_block_holds_and_releases() -> None:
    lock = local()
    assert (lock.state, lock.held, lock.token, lock.owner) == ("free", False, None, None)
    with lock as entered:
        assert entered is lock
        assert (lock.state, lock.held, lock.lost) == ("held", True, False)
        assert lock.locked()
        assert 0 < lock.remaining <= 30
        lock.check()
    assert (lock.state, lock.held, lock.token, lock.owner) == ("free", False, None, None)
    assert not lock.locked()


def test_acquire_returns_false_and_a_block_raises() -> None:
    with local():
        assert in_thread(lambda: local().acquire(blocking=False)) is False
        assert in_thread(lambda: local().acquire(timeout=0.01)) is False

        def enter(wait: float) -> type[BaseException] | None:
            try:
                with local(wait=wait):
                    return None
            except LockNotAcquired as error:
                return type(error)

        assert in_thread(lambda: enter(0)) is LockNotAcquired
        assert in_thread(lambda: enter(0.01)) is AcquireTimeout


def test_contended_reports_the_holder() -> None:
    lock = local()
    with local():
        in_thread(lambda: lock.acquire(blocking=False))
    assert lock.contention is not None
    assert 0 < lock.contention.remaining <= 30


def test_a_waiter_is_granted_when_the_holder_releases() -> None:
    holder, waiter = local(), local()
    waiting = threading.Event()
    assert holder.acquire()

    def met(**_: Any) -> None:
        waiting.set()

    signals.contended.connect(met, weak=False, dispatch_uid="met")
    try:
        got: list[bool] = []
        thread = threading.Thread(target=lambda: got.append(waiter.acquire(timeout=-1)))
        thread.start()
        assert waiting.wait(30)
        holder.release()
        thread.join(30)
    finally:
        signals.contended.disconnect(dispatch_uid="met")
    assert got == [True]
    waiter.release()


def test_release_and_renew_without_a_hold_are_not_held() -> None:
    lock = local()
    with pytest.raises(NotHeld):
        lock.release()
    with pytest.raises(RuntimeError):
        lock.renew()
    with pytest.raises(NotHeld):
        lock.check()


def test_a_second_release_is_not_held() -> None:
    lock = local()
    lock.acquire()
    lock.release()
    with pytest.raises(NotHeld):
        lock.release()


def test_a_handle_may_be_acquired_again_and_gets_a_higher_token() -> None:
    lock = local()
    tokens = []
    for _ in range(3):
        with lock:
            tokens.append(lock.token)
    assert tokens == sorted(set(tokens))


def test_any_thread_may_release() -> None:
    lock = local()
    lock.acquire()
    in_thread(lock.release)
    assert not lock.locked()


def test_after_a_release_inside_the_block_its_end_does_nothing() -> None:
    with local() as lock:
        lock.release()
    assert lock.state == "free"


# -- the holder -----------------------------------------------------------------------------


def test_a_second_blocking_acquire_by_the_holder_is_already_held() -> None:
    with local():
        with pytest.raises(AlreadyHeld):
            local().acquire()
        assert local().acquire(blocking=False) is False


def test_reentrant_handles_count_up_without_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = local(reentrant=True), local(reentrant=True)
    with outer:
        monkeypatch.setattr(locks["local"], "acquire", None)
        with inner:
            assert inner.token == outer.token
            with outer:
                pass
            assert outer.held
        assert outer.held
        assert not inner.held
    assert not outer.locked()


def test_reentrance_must_be_set_on_both_handles() -> None:
    with local(reentrant=True), pytest.raises(AlreadyHeld):
        local().acquire()
    with local(), pytest.raises(AlreadyHeld):
        local(reentrant=True).acquire()


def test_an_unbound_handle_is_its_own_holder() -> None:
    lock = local(bound=False)
    lock.acquire()
    assert local().acquire(blocking=False) is False
    assert in_thread(lambda: lock.held)
    with pytest.raises(AlreadyHeld):
        lock.acquire()
    in_thread(lock.release)
    assert not lock.locked()


def test_a_shared_handle_keeps_the_leases_of_its_threads_apart() -> None:
    lock = local()
    lock.acquire()
    locks["local"].break_(lock.name, owner=lock.owner or "")
    assert in_thread(lock.acquire)
    try:
        with pytest.raises(LeaseLost):
            lock.renew()
        with pytest.raises(LeaseLost):
            lock.check()
    finally:
        with pytest.raises(LeaseLost):
            lock.release()
    assert locks["local"].locked(lock.name, deadline=1e12), "the other thread's hold is alive"
    lock.release()


def test_a_collected_handle_leaves_no_trace() -> None:
    lock = local()
    lock.acquire()
    gone = weakref.ref(lock)
    del lock
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("renew", [True, False])
def test_dropping_a_held_lock_warns_at_once(renew: bool, caplog: pytest.LogCaptureFixture) -> None:
    # What other tests have left must not be collected in the block.
    gc.collect()
    with pytest.warns(ResourceWarning, match=r"Lock 'it' .* cannot be released") as caught:
        assert local(renew=renew).acquire()
    assert len(caught) == 1
    # The line where the lock was made, which Python shows with -X tracemalloc.
    assert isinstance(caught[0].source, Lock)
    assert dispatch.flush(30)
    assert "Use `with`, or keep the Lock" in caplog.text
    assert locks["local"].locked("it", deadline=1e12), "what it guards may still run"


def test_the_warning_names_the_line_that_created_a_dropped_lock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracemalloc.start()
    try:
        with pytest.warns(ResourceWarning):
            assert local().acquire()
    finally:
        tracemalloc.stop()
    assert dispatch.flush(30)
    assert re.search(r"s left; created at .*\.py:\d+\)", caplog.text)


def test_a_reentrant_handle_that_is_dropped_keeps_no_entry() -> None:
    outer = local(reentrant=True)
    outer.acquire()
    inner = local(reentrant=True)
    inner.acquire()
    del inner
    gc.collect()
    outer.release()
    assert not locks["local"].locked("it", deadline=1e12)


def test_the_last_reentrant_handle_that_is_dropped_ends_the_renewal() -> None:
    outer = local(reentrant=True)
    outer.acquire()
    inner = local(reentrant=True)
    inner.acquire()
    hold = lease_of(inner)
    outer.release()
    assert hold.renews
    del inner
    gc.collect()
    assert not hold.renews


def test_dropping_a_lock_that_is_not_held_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    # What other tests have left is collected first.
    gc.collect()
    recwarn.clear()
    lock = local()
    with lock:
        pass
    lost = local()
    lost.acquire()
    break_it(lost)
    with pytest.raises(LeaseLost):
        lost.renew()
    del lock, lost
    local(name="never")
    with pytest.raises(ValueError, match="1 to"):
        Lock("", using="local")
    gc.collect()
    assert not recwarn.list


# -- messages about the holder -------------------------------------------------------------------


def test_a_refusal_names_the_holder_and_the_time_of_its_acquire() -> None:
    with (
        local(metadata={"task_name": "shop.charge", "task_id": "42"}, bound=False),
        pytest.raises(LockNotAcquired) as caught,
        local(wait=0),
    ):
        pass
    said = str(caught.value)
    assert (
        f". Holder: task shop.charge[42], process {os.getpid()} on {socket.gethostname()}" in said
    )
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC \(\d+\.\d s\)$", said)
    assert caught.value.info is not None
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.holder) == (said, caught.value.holder)


def test_a_refusal_says_when_this_very_thread_holds() -> None:
    with local(), pytest.raises(LockNotAcquired, match="this very thread"), local(wait=0):
        pass


async def test_a_refusal_of_a_coroutine_names_the_holder() -> None:
    async def enter() -> None:
        async with local(wait=0.01):
            pass

    with (
        local(metadata={"path": "/checkout/"}, bound=False),
        pytest.raises(AcquireTimeout, match="Holder: request /checkout/"),
    ):
        await enter()


def test_the_error_stays_the_same_if_the_holder_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_answer(name: str) -> None:
        raise BackendUnavailable("gone", name, "local")

    with local(bound=False):
        monkeypatch.setattr(locks["local"], "get", no_answer)
        with pytest.raises(LockNotAcquired) as caught, local(wait=0):
            pass
    assert caught.value.holder == ""


# -- loss ----------------------------------------------------------------------------------


def break_it(lock: Lock) -> None:
    assert locks["local"].break_(lock.name, owner=lock.owner or "")


def test_leaving_a_block_after_a_loss_raises() -> None:
    lock = local()
    with pytest.raises(LeaseLost) as caught, lock:
        break_it(lock)
    assert (caught.value.reason, caught.value.name, caught.value.alias) == ("broken", "it", "local")
    assert lock.lost_reason == "broken"


def test_the_bodys_own_exception_propagates_with_a_note() -> None:
    with pytest.raises(KeyError) as caught, local() as lock:
        break_it(lock)
        raise KeyError("mine")
    notes = getattr(caught.value, "__notes__", ["lost (before Python 3.11 there are no notes)"])
    assert "lost" in notes[0]


def test_a_refused_renewal_is_a_loss() -> None:
    lock = local()
    lock.acquire()
    break_it(lock)
    with pytest.raises(LeaseLost):
        lock.renew()
    assert lock.lost
    with pytest.raises(LeaseLost):
        lock.release()
    with pytest.raises(NotHeld):
        lock.release()
    assert lock.acquire(blocking=False)
    lock.release()


def test_on_lost_is_called_once_on_another_thread() -> None:
    calls: list[tuple[Lock, str, str]] = []

    def on_lost(lock: Lock, reason: str) -> None:
        calls.append((lock, reason, threading.current_thread().name))

    lock = local(on_lost=on_lost)
    with pytest.raises(LeaseLost), lock:
        break_it(lock)
        with pytest.raises(LeaseLost):
            lock.renew()
    assert dispatch.flush(30)
    assert calls == [(lock, "broken", "dlock-on-lost")]


def test_a_coroutine_that_on_lost_returns_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LeaseLost), local(on_lost=lambda *_: awaited()) as lock:
        break_it(lock)
    assert dispatch.flush(30)
    assert "nobody awaits" in caplog.text


def test_a_lost_lease_does_not_free_the_next_holder() -> None:
    lock = local()
    lock.acquire()
    break_it(lock)
    other = local()
    assert in_thread(other.acquire)
    with pytest.raises(LeaseLost):
        lock.release()
    assert other.locked()
    other.release()


def test_renew_can_set_another_ttl() -> None:
    lock = local(ttl=30, renew=False)
    with lock:
        lock.renew(ttl=dt.timedelta(minutes=10))
        assert 500 < lock.remaining <= 600


def test_a_shorter_ttl_counts_at_the_backend_too() -> None:
    with local(ttl=30, renew=False) as lock:
        lock.renew(ttl=10)
        info = locks["local"].get("it")
        assert info is not None
        assert info.ttl is not None
        assert lock.remaining <= info.ttl <= 10


@pytest.mark.parametrize("renew", [True, False])
def test_g1_a_shorter_ttl_counts_even_without_a_confirmation(
    renew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local(ttl=30, renew=renew) as lock:
        hold = lease_of(lock)
        earlier = clock.now()

        def no_answer(*_: Any, **__: Any) -> None:
            # The answer to the watchdog's renewal arrives while this renewal runs.
            hold.confirm(earlier, 30, clock.now())
            raise BackendUnavailable("no answer", "it", "local")

        with monkeypatch.context() as patch:
            patch.setattr(locks["local"], "renew", no_answer)
            with pytest.raises(BackendUnavailable):
                lock.renew(ttl=5)
        # The renewal may have been executed.
        assert lock.remaining <= 5


def test_a_ttl_too_short_for_renewals_is_refused() -> None:
    with local(ttl=30) as lock:
        with pytest.raises(ValueError, match="at least 3 times the command_timeout"):
            lock.renew(ttl=1)
        assert lock.remaining > 20
    with local(ttl=30, renew=False) as fixed:
        fixed.renew(ttl=2.9)


def test_a_lock_held_under_former_settings_does_not_affect_new_ones() -> None:
    with local() as before:
        locks.reset()
        # This is another backend, so the first one's lock is a different one.
        with local() as after:
            assert before.held
            assert after.held


def test_a_release_with_an_unknown_outcome_counts_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = local()
    lock.acquire()
    monkeypatch.setattr(locks["local"], "release", lambda *_, **__: "unknown")
    with caplog.at_level("INFO", "django_dlock"):
        lock.release()
    assert lock.state == "free"
    assert "cannot tell" in caplog.text


def test_g2_a_release_with_an_unknown_outcome_is_a_loss_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = local()
    lock.acquire()
    hold = lease_of(lock)

    def release(*_: Any, **__: Any) -> str:
        hold.deadline = 0.0
        return "unknown"

    monkeypatch.setattr(locks["local"], "release", release)
    with pytest.raises(LeaseLost, match="expired"):
        lock.release()
    assert lock.lost_reason == "expired"


def test_g7_after_an_interrupted_release_the_lease_is_not_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    lock = local()
    lock.acquire()
    monkeypatch.setattr(transactions, "open_since", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lock.release()
    monkeypatch.undo()
    hold = lease_of(lock)
    assert (hold.renews, hold.due) == (False, hold.deadline)
    lock.release()
    assert not lock.locked()


# -- async ---------------------------------------------------------------------------------


async def test_async_block_and_twins() -> None:
    lock = local()
    async with lock:
        assert lock.held
        assert await lock.alocked()
        await lock.arenew()
        with pytest.raises(AlreadyHeld):
            async with local():
                pass
    assert not await lock.alocked()
    assert await lock.aacquire(blocking=False)
    await lock.arelease()
    with pytest.raises(NotHeld):
        await lock.arelease()


@pytest.mark.parametrize("wait", [5, None])
async def test_no_task_waits_for_itself(wait: float | None) -> None:
    async with local():
        with pytest.raises(AlreadyHeld):
            await local(wait=wait).aacquire()
        assert await local().aacquire(blocking=False) is False
        # A block in another task waits as usual.
        other = asyncio.create_task(local().aacquire(timeout=0.01))
        assert await other is False
    lock = local()
    await lock.aacquire()
    with pytest.raises(AlreadyHeld):
        async with local(wait=wait):
            pass
    with pytest.raises(LockNotAcquired):
        async with local(wait=0):
            pass
    await lock.arelease()
    async with local():
        pass


async def test_a_handle_that_both_kinds_of_methods_acquire_does_not_wait_for_itself() -> None:
    shared = local(wait=None)
    for acquired in (shared.acquire, shared.aacquire):
        got = acquired()
        assert got if isinstance(got, bool) else await got
        with pytest.raises(AlreadyHeld):
            await shared.aacquire()
        with pytest.raises(AlreadyHeld):
            shared.acquire()
        with pytest.raises(AlreadyHeld):
            async with shared:
                pass
        assert shared.acquire(blocking=False) is False
        assert await shared.aacquire(blocking=False) is False
        # Nor do two handles of one task.
        with pytest.raises(AlreadyHeld):
            local(wait=None).acquire()
        shared.release()
    async with shared:
        with pytest.raises(AlreadyHeld):
            shared.acquire()
    # Another task waits, as it can be released meanwhile.
    shared.acquire()
    waiting = asyncio.create_task(local(wait=20).aacquire())
    await asyncio.sleep(0)
    shared.release()
    assert await waiting


async def test_after_wait_for_a_handle_does_not_wait_for_itself() -> None:
    shared = local(wait=None)
    assert await asyncio.wait_for(shared.aacquire(), 20)
    with pytest.raises(AlreadyHeld):
        shared.acquire()
    with pytest.raises(AlreadyHeld):
        async with shared:
            pass
    await shared.arelease()


def test_a_coroutine_does_not_wait_for_the_thread_that_runs_it() -> None:
    async def again() -> None:
        with pytest.raises(AlreadyHeld):
            async with local(wait=None):
                pass

    with local():
        asyncio.run(again())


async def test_an_unbound_handle_excludes_its_own_task_like_any_other() -> None:
    async with local():
        assert await local(bound=False).aacquire(timeout=0.01) is False
    lock = local()
    await lock.aacquire()
    lock.unbind()
    with pytest.raises(LockNotAcquired):
        async with local(wait=0.01):
            pass
    # At the same time, another task may release another handle.
    assert await local().aacquire(timeout=0.01) is False
    await lock.arelease()


async def test_a_task_can_reenter_by_every_way_to_acquire() -> None:
    async with local(reentrant=True) as outer:
        inner = local(reentrant=True)
        assert await inner.aacquire()
        assert inner.token == outer.token
        await inner.arelease()
        assert outer.held
    assert not await outer.alocked()
    assert await outer.aacquire()
    async with local(reentrant=True) as inner:
        assert inner.token == outer.token
    await outer.arelease()
    assert not await outer.alocked()


async def test_two_tasks_exclude_each_other() -> None:
    inside = 0

    async def work() -> None:
        nonlocal inside
        for _ in range(5):
            async with local():
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1

    await asyncio.gather(*(work() for _ in range(4)))


async def test_an_aacquire_in_wait_for_outlives_that_task() -> None:
    lock = local()
    assert await asyncio.wait_for(lock.aacquire(), 30)
    hold = lease_of(lock)
    assert not isinstance(hold.key, asyncio.Task)
    await lock.arelease()


async def test_g7_a_cancelled_waiter_leaves_nothing() -> None:
    holder, waiter = local(), local()
    await holder.aacquire()
    loop, waits = asyncio.get_running_loop(), asyncio.Event()

    def met(**_: Any) -> None:
        loop.call_soon_threadsafe(waits.set)

    signals.contended.connect(met)
    try:
        task = asyncio.create_task(waiter.aacquire(timeout=-1))
        await waits.wait()
    finally:
        signals.contended.disconnect(met)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await holder.arelease()
    # If the cancelled waiter got the lock, nobody would release it.
    assert await local().aacquire(timeout=30)


async def test_a_coroutine_cannot_hold_until_commit() -> None:
    with pytest.raises(TypeError, match="transaction of a thread"):
        await local(hold_until="commit").aacquire()


# -- bad input -----------------------------------------------------------------------------


async def awaited(*_: object) -> None: ...


class Awaited:
    async def __call__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"timeout": 5}, TypeError, "use ttl="),
        ({"ttl": 0.01, "renew": False}, ValueError, "at least 0.1"),
        ({"ttl": 2.9}, ValueError, "command_timeout"),
        ({"ttl": "30"}, TypeError, "timedelta"),
        ({"ttl": float("nan")}, ValueError, "at most"),
        ({"ttl": True}, TypeError, "seconds"),
        ({"wait": -1}, ValueError, "wait"),
        ({"max_hold": 0}, ValueError, "max_hold"),
        ({"min_hold": -1}, ValueError, "min_hold"),
        ({"hold_until": "never"}, ValueError, "commit"),
        ({"on_lost": 5}, TypeError, "callable"),
        ({"on_lost": awaited}, TypeError, "nobody awaits"),
        ({"on_lost": functools.partial(awaited)}, TypeError, "nobody awaits"),
        ({"on_lost": Awaited()}, TypeError, "nobody awaits"),
        ({"metadata": {"a": object()}}, TypeError, "JSON"),
        ({"metadata": {"a": "x" * 4096}}, ValueError, "4105 characters.* at most 4096"),
        ({"metadata": {"path": "x" * 5000}}, ValueError, "at most 4096"),
    ],
)
def test_a_wrong_option_is_refused_at_construction(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        local(**options)


def test_too_much_metadata_is_refused_where_it_is_set() -> None:
    many = {"a": "x" * 5000}
    with pytest.raises(ValueError, match="at most 4096"):
        locked("it", using="local", metadata=many)
    with pytest.raises(ValueError, match="at most 4096"):
        locked_view("it", using="local", metadata=many)
    with pytest.raises(ValueError, match="at most 4096"):
        idempotent_view(using="local", metadata=many)


def test_the_path_that_a_visitor_chooses_does_not_count_as_metadata() -> None:
    # As JSON, each of these characters is twelve.
    facts = {"path": "\N{PILE OF POO}" * 512, "user": "7", "note": "x" * 4000}
    assert local(metadata=facts).acquire()


def test_a_ttl_of_exactly_three_command_timeouts_is_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks["local"], "command_timeout", 0.2)
    # In floating point, 3 * 0.2 is more than 0.6.
    assert local(ttl=0.6).acquire()
    with pytest.raises(ValueError, match="command_timeout"):
        local(ttl=0.5999)


def test_a_fixed_lease_may_be_short() -> None:
    assert local(ttl=0.1, renew=False).acquire()


@pytest.mark.parametrize(
    ("blocking", "timeout"), [(False, 1.0), (True, -2.0), (True, float("inf"))]
)
def test_a_wrong_timeout_is_refused(blocking: bool, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        local().acquire(blocking, timeout)


def test_an_unknown_alias_names_the_known_ones() -> None:
    with pytest.raises(exceptions.InvalidLockBackend, match="default"):
        Lock("x", using="elsewhere")


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in exceptions.__all__ if n != "InvalidLockBackend"])
def test_every_error_names_lock_and_alias_and_survives_pickling(name: str) -> None:
    error_class = getattr(exceptions, name)
    error = error_class("why", "order:1", "default")
    twin = pickle.loads(pickle.dumps(error))
    rebuilt = error_class(*error.args)
    for each in (error, twin, rebuilt):
        assert isinstance(each, LockError)
        assert (each.name, each.alias) == ("order:1", "default")
        assert "order:1" in str(each)
        assert "default" in str(each)


# -- signals -------------------------------------------------------------------------------


def test_signals_report_the_life_of_a_lock() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    kinds = ("acquired", "released", "lost")

    def connect(kind: str) -> None:
        def tell(name: str, **facts: Any) -> None:
            # Locks dropped by other tests may be lost now.
            if name == "lived":
                told.append((kind, {"name": name, **facts}))

        getattr(signals, kind).connect(tell, weak=False, dispatch_uid="t")

    for kind in kinds:
        connect(kind)
    try:
        with local("lived", metadata={"why": "test"}):
            pass
        with pytest.raises(LeaseLost), local("lived") as lock:
            break_it(lock)
        assert dispatch.flush(30)
    finally:
        for kind in kinds:
            getattr(signals, kind).disconnect(dispatch_uid="t")
    assert [kind for kind, _ in told] == ["acquired", "released", "acquired", "lost"]
    for _, facts in told:
        assert facts["sender"] is Lock
        assert {"name", "alias", "owner", "token", "metadata"} <= facts.keys()
    assert told[0][1]["metadata"] == {"why": "test"}
    assert told[1][1]["held_for"] >= 0
    assert told[3][1]["reason"] == "broken"


def test_a_receiver_that_raises_or_hangs_prevents_nothing() -> None:
    free = threading.Event()

    def raises(**_: Any) -> None:
        raise ValueError("receiver")

    def hangs(**_: Any) -> None:
        free.wait(30)

    signals.acquired.connect(raises, dispatch_uid="r")
    signals.acquired.connect(hangs, dispatch_uid="h")
    try:
        with local() as lock:
            lock.renew()
        assert not lock.locked()
    finally:
        signals.acquired.disconnect(dispatch_uid="r")
        signals.acquired.disconnect(dispatch_uid="h")
        free.set()
    assert dispatch.flush(30)


async def test_locked_waits_for_a_free_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ConnectionsBusy("All are in use", "it", "local"), True] * 2

    def locked(*_: Any, **__: Any) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(LocalBackend, "locked", locked)
    lock = Lock("it", using="local")
    assert lock.locked()
    assert await lock.alocked()


def test_what_a_handle_remembers_of_a_contention_takes_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ticket of PostgreSQL is a place among the waiters."""
    backend = locks["local"]
    acquire = backend.acquire

    def with_ticket(request: Any, **options: Any) -> Any:
        answer = acquire(request, **options)
        return answer._replace(ticket=object()) if isinstance(answer, Contention) else answer

    monkeypatch.setattr(backend, "acquire", with_ticket)
    with Lock("it", using="local", bound=False):
        lock = Lock("it", using="local", bound=False)
        assert not lock.acquire(blocking=False)
        assert lock.contention is not None
        assert lock.contention.owner
        assert lock.contention.ticket is None
