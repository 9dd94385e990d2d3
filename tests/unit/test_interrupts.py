"""An interrupt between any two lines of a lock's own code leaves no lease renewed by mistake."""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import CodeType, FrameType
from typing import Any

import pytest

from django_dlock import BackendUnavailable, LeaseLost, Lock, locks
from django_dlock import lock as lock_module
from django_dlock.core import (
    acquire,
    cleanup,
    held_lease,
    holds,
    release,
    transactions,
    watchdog,
)
from django_dlock.core.held_lease import registry

OURS = {module.__file__ for module in (held_lease, holds, release, lock_module, acquire, watchdog)}

BEFORE = {
    Lock.release.__code__: 2,
    Lock.__exit__.__code__: 2,
    Lock.__aexit__.__code__: 2,
    Lock._release_late.__code__: 1,
}
"""Lines before the ``try`` of these functions; an interrupt there is as one before the call."""


class Interrupt(BaseException):
    """Raised between two lines."""


class Interrupter:
    """Raises before the n-th line."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.where = ""
        self._seen: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename in OURS else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not self._is_exempt(frame):
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise Interrupt
        return self._line

    def _is_exempt(self, frame: FrameType) -> bool:
        code: CodeType = frame.f_code
        if code is watchdog.Watchdog.wake.__code__:
            # A thread lock is released between two lines, where Python checks for no signals.
            return True
        if _is_collecting(frame):
            return True
        self._seen[frame] = self._seen.get(frame, 0) + 1
        return self._seen[frame] <= BEFORE.get(code, 0)


def _is_collecting(frame: FrameType | None) -> bool:
    """Whether an object is being finalized; Python prints and ignores exceptions there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def everywhere(prepare: Callable[[], Callable[[], object]], check: Callable[[str], object]) -> int:
    """Prepare and run repeatedly, each time interrupted one line later.

    Returns the number of lines.
    """
    for n in itertools.count(1):
        locks.reset()
        registry.take_all()
        kept.clear()
        run = prepare()
        interrupter = Interrupter(n)
        sys.settrace(interrupter)
        try:
            run()
        except (Interrupt, BackendUnavailable) as error:
            sys.settrace(None)
            # Flows left suspended end here, and not during the next run.
            traceback.clear_frames(error.__traceback__)
        finally:
            sys.settrace(None)
        if not interrupter.where:
            return n - 1
        check(interrupter.where)
    raise AssertionError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    locks.reset()
    # At once, because nothing here shall wait for another thread.
    monkeypatch.setattr(cleanup, "cancel_later", cancel_now)


def cancel_now(backend: Any, request: Any, *, min_hold: float = 0.0) -> None:
    backend.cancel_acquire(request, deadline=backend.call_deadline())


def renewed() -> list[str]:
    """The names that this process renews."""
    schedule = watchdog._watchdog.schedules.get(id(locks["local"]))
    holds = {} if schedule is None else {**schedule.leases, **schedule.fresh}
    return [hold.name for hold in holds.values() if hold.renews and not hold.ended]


kept: list[Lock] = []
"""Garbage-collected handles end their renewal; these are kept alive."""


def new(**options: Any) -> Lock:
    kept.append(Lock("it", using="local", wait=0, **options))
    return kept[-1]


def in_block(**options: Any) -> None:
    with new(**options):
        pass


def by_hand(**options: Any) -> None:
    lock = new(**options)
    if lock.acquire():
        lock.release()


def unbound(**options: Any) -> None:
    with new(**options) as lock:
        lock.unbind()


def awaited(**options: Any) -> None:
    async def block() -> None:
        async with new(bound=False, **options):
            pass

    async def call(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    locks["local"].acall = call  # type: ignore[method-assign]
    with contextlib.suppress(StopIteration):
        block().send(None)


def nothing_is_renewed(where: str) -> None:
    assert renewed() == [], where


@pytest.mark.parametrize("story", [in_block, by_hand, unbound, awaited])
@pytest.mark.parametrize("reentrant", [False, True])
def test_g7_an_interrupt_before_any_line_leaves_nothing_renewed(
    story: Callable[..., None], reentrant: bool
) -> None:
    run = partial(story, reentrant=reentrant)
    assert everywhere(lambda: run, nothing_is_renewed) > 40


def test_g7_an_interrupt_while_a_lost_lock_is_acquired_again_leaves_nothing_renewed() -> None:
    def prepare() -> Callable[[], object]:
        lock = new()
        lock.__enter__()
        locks["local"].break_("it", owner=lock.owner or "")
        with pytest.raises(LeaseLost):
            lock.renew()

        def again() -> None:
            with contextlib.suppress(LeaseLost):
                try:
                    with lock:
                        pass
                    lock.acquire()
                finally:
                    lock.__exit__(None, None, None)

        return again

    assert everywhere(prepare, nothing_is_renewed) > 40


@pytest.mark.parametrize("enter", [Lock.__enter__, Lock.acquire])
def test_g7_an_interrupted_reentrant_entry_does_not_count(enter: Callable[[Lock], object]) -> None:
    def prepare() -> Callable[[], object]:
        assert new(reentrant=True).acquire()
        return partial(enter, new(reentrant=True))

    def check(where: str) -> None:
        outer, inner = kept
        assert (outer.held, inner.held) == (True, False), where
        outer.release()
        assert not outer.locked(), where
        assert renewed() == [], where

    assert everywhere(prepare, check) > 10


def test_g7_an_interrupted_release_without_an_answer_renews_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_answer(*_: Any, **__: Any) -> None:
        raise BackendUnavailable("no answer", "it", "local")

    def prepare() -> Callable[[], object]:
        lock = new()
        assert lock.acquire()
        monkeypatch.setattr(locks["local"], "release", no_answer)
        return lock.release

    assert everywhere(prepare, nothing_is_renewed) > 10


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_g7_an_interrupted_call_of_a_release_is_repeated_in_the_background(
    before: bool, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, backend, repeated = new(reentrant=reentrant), locks["local"], []
    assert lock.acquire()
    owner, release = lock.owner, backend.release

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if not before:
            release(*args, **kwargs)
        raise Interrupt

    monkeypatch.setattr(backend, "release", interrupted)
    monkeypatch.setattr(cleanup, "cancel_later", lambda backend, it, **_: repeated.append(it.owner))
    with pytest.raises(Interrupt):
        lock.release()
    assert (lock.state, repeated) == ("free", [owner])
    # The thread does not count as the holder either.
    assert new(reentrant=reentrant).acquire() is not before


def test_g7_an_interrupted_release_does_not_end_another_threads_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, backend = new(), locks["local"]
    release = backend.release

    def interrupted(*args: Any, **kwargs: Any) -> None:
        release(*args, **kwargs)
        monkeypatch.setattr(backend, "release", release)
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(shared.acquire).result()
        raise Interrupt

    shared.acquire()
    monkeypatch.setattr(backend, "release", interrupted)
    with pytest.raises(Interrupt):
        shared.release()
    assert renewed() == ["it"]


def test_g7_an_interrupted_release_after_a_transaction_renews_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare() -> Callable[[], object]:
        late: list[Callable[[], object]] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                transactions, "run_after", lambda release: late.append(release) or release
            )
            lock = new(hold_until="commit")
            lock.acquire()
            lock.release()
        assert lock.held
        return late[0]

    assert everywhere(prepare, nothing_is_renewed) > 10
