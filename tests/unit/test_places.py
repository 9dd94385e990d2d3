"""The place of a waiter among those of its process, at whatever store it waits."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest

from django_dlock import clock
from django_dlock.backends.shared.waiting import Waiter, Waiters
from tests.support.at_nth import AtNth
from tests.support.points import Heard, heard

PATIENCE = 20.0


def never() -> bool:
    return False


def later() -> float:
    return clock.now() + PATIENCE


@pytest.fixture
def waiters() -> Waiters[Waiter]:
    return Waiters()


@pytest.fixture
def asleep() -> Iterator[Heard]:
    with heard("wait.asleep") as it:
        yield it


def wait(waiters: Waiters[Waiter], waiter: Waiter, until: float) -> None:
    waiters.wait(waiter, until, never)


async def async_wait(waiters: Waiters[Waiter], waiter: Waiter, until: float) -> None:
    await waiters.async_wait(waiter, until, never, lambda: None)


def wait_in_a_loop(waiters: Waiters[Waiter], waiter: Waiter, until: float) -> None:
    asyncio.run(async_wait(waiters, waiter, until))


WAITS = pytest.mark.parametrize("waits", [wait, wait_in_a_loop])


@WAITS
def test_g4_a_wake_up_that_comes_before_the_wait_ends_it(waits, waiters):
    early, until = Waiter("o1"), later()
    waiters.enter(early)
    waiters.end_waits()
    waits(waiters, early, until)
    assert clock.now() < until
    assert not waiters.by_owner


@WAITS
def test_g4_a_waiter_is_woken_from_another_thread(waits, waiters, asleep):
    until = later()
    waiting = threading.Thread(target=waits, args=(waiters, Waiter("o1"), until))
    waiting.start()
    asleep.wait(waiter="o1")
    waiters.end_waits()
    waiting.join(PATIENCE)
    assert clock.now() < until
    assert not waiters.by_owner


@WAITS
def test_a_wait_ends_with_its_time(waits, waiters):
    waits(waiters, Waiter("o1"), clock.now())
    assert not waiters.by_owner


def test_a_wait_ends_when_it_is_interrupted(waiters):
    until = later()
    waiters.wait(Waiter("o1"), until, lambda: True)
    asyncio.run(waiters.async_wait(Waiter("o1"), until, lambda: True, lambda: None))
    assert clock.now() < until
    assert not waiters.by_owner


def test_g7_an_interrupt_anywhere_leaves_no_place(waiters):
    """Between any two lines, also while the place is left; the error keeps all frames alive."""
    errors = []
    for number in itertools.count(1):
        nth = AtNth(number)
        try:
            sys.setprofile(nth.profile)
            waiters.wait(Waiter("o1"), clock.now() + 0.01, never)
        except KeyboardInterrupt as interrupt:
            errors.append(interrupt)
        finally:
            sys.setprofile(None)
        assert not waiters.by_owner, number
        if nth.left > 0:
            break
    assert len(errors) > 10


@WAITS
def test_g7_a_place_is_left_although_an_interrupt_lands_in_leaving_it(waits):
    class Interrupted(Waiters[Waiter]):
        interrupts = 1

        def leave(self, waiter: Waiter) -> None:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            super().leave(waiter)

    waiters = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        waits(waiters, Waiter("o1"), clock.now())
    assert not waiters.by_owner


def test_a_place_that_is_left_late_does_not_take_that_of_the_next_wait(waiters):
    before, after = Waiter("o1"), Waiter("o1")
    waiters.enter(before)
    waiters.enter(after)
    waiters.leave(before)
    assert waiters.by_owner["o1"] is after


async def test_g7_a_cancelled_coroutine_leaves_no_place(waiters):
    task = asyncio.create_task(async_wait(waiters, Waiter("o1"), later()))
    await asyncio.sleep(0)
    assert waiters.by_owner
    task.cancel()
    await asyncio.wait([task])
    assert not waiters.by_owner


@pytest.mark.parametrize("collected", [False, True])
def test_g4_the_place_of_a_coroutine_whose_loop_was_closed_is_left(waiters, collected):
    abandoned = []
    loop = asyncio.new_event_loop()
    waiting = waiters.async_wait(Waiter("o1"), later(), never, lambda: abandoned.append(True))
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    # Otherwise asyncio logs an error when it is collected.
    task._log_destroy_pending = False
    if collected:
        del task, waiting, loop
        gc.collect()
    waiters.end_waits()
    assert abandoned == ([] if collected else [True])
    assert not waiters.by_owner


def test_a_place_keeps_no_loop_alive_that_was_dropped_without_being_closed(waiters):
    loop = asyncio.new_event_loop()
    task = loop.create_task(async_wait(waiters, Waiter("o1"), later()))
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False
    kept = weakref.ref(loop)
    del task, loop
    with warnings.catch_warnings():
        # Python warns of such a loop.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert kept() is None
    assert not waiters.by_owner


def test_a_coroutine_whose_loop_was_stopped_goes_on_with_it(waiters):
    until, loop = later(), asyncio.new_event_loop()
    task = loop.create_task(async_wait(waiters, Waiter("o1"), until))
    loop.run_until_complete(asyncio.sleep(0))
    waiters.end_waits()
    assert waiters.by_owner
    loop.run_until_complete(task)
    loop.close()
    assert clock.now() < until
    assert not waiters.by_owner


async def test_g8_a_coroutine_that_goes_on_in_a_forked_child_asks_again(waiters):
    until = later()
    task = asyncio.create_task(async_wait(waiters, Waiter("o1"), until))
    await asyncio.sleep(0)
    waiters.forget()
    await task
    assert clock.now() < until


def test_those_who_only_might_have_waited_are_not_waited_for(waiters):
    waiter = Waiter("o1")
    waiters.enter(waiter)
    waiters.leave(waiter)
    assert not waiters.are_needed(PATIENCE)
    wait(waiters, Waiter("o1"), clock.now())
    assert waiters.are_needed(PATIENCE)
    assert not waiters.are_needed(0.0)
