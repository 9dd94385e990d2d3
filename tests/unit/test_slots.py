"""Who may use a connection, who gets the next one, and that none is ever lost."""

from __future__ import annotations

import collections
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_dlock import clock
from django_dlock.backends import slots as module
from django_dlock.backends.database.pool import Pool, Urgency
from django_dlock.backends.slots import Slot, Slots
from tests.support.databases import until
from tests.support.points import heard

ORDINARY, END, RENEW = 0, 1, 2
PATIENCE = 20.0


@pytest.fixture
def slots() -> Iterator[Slots]:
    it = Slots(2, 1, 1)
    yield it
    assert count_free(it) == 4


def count_free(slots: Slots) -> int:
    return sum(free.qsize() for free in slots.free)


def take_all(slots: Slots) -> list[Slot]:
    """All four slots: both ordinary ones, then the one for ends, then the one for renewals."""
    taken = [slots.take_now(RENEW) for _ in range(4)]
    assert slots.take_now(RENEW) is None
    return [slot for slot in taken if slot is not None]


class Waiter(threading.Thread):
    """Waits for a slot, notes that it has got one, and returns it."""

    def __init__(self, slots: Slots, urgency: int, served: list[int]) -> None:
        super().__init__(daemon=True)
        self._slots, self._urgency, self._served = slots, urgency, served
        with heard("pool.waiting", urgency=urgency) as waiting:
            self.start()
            waiting.wait()

    def run(self) -> None:
        slot = self._slots.take(self._urgency, clock.now() + PATIENCE)
        if slot is not None:
            self._served.append(self._urgency)
            slot.release()


@pytest.mark.parametrize("urgency", [ORDINARY, END, RENEW])
def test_a_call_uses_only_slots_of_its_urgency_and_below(slots: Slots, urgency: int) -> None:
    taken = [slots.take_now(urgency) for _ in range(2 + urgency)]
    assert None not in taken
    assert slots.take_now(urgency) is None
    assert count_free(slots) == 2 - urgency


@pytest.mark.parametrize(
    ("urgency", "returned", "served"),
    [(u, number, u >= kind) for u in (0, 1, 2) for number, kind in enumerate((0, 0, 1, 2))],
)
def test_whoever_waits_is_served_by_any_slot_that_it_may_use(
    slots: Slots, urgency: int, returned: int, served: bool
) -> None:
    taken, who = take_all(slots), list[int]()
    waiter = Waiter(slots, urgency, who)
    taken.pop(returned).release()
    if served:
        waiter.join(PATIENCE)
        assert who == [urgency]
    else:
        assert count_free(slots) == 1
        assert not who
    taken.clear()
    waiter.join(PATIENCE)


def test_the_most_urgent_call_is_served_first_and_then_the_one_that_came_first(
    slots: Slots,
) -> None:
    taken, served = take_all(slots), list[int]()
    order = ORDINARY, END, RENEW, ORDINARY, END
    waiters = [Waiter(slots, urgency, served) for urgency in order]
    # Each of them passes it on to the next.
    taken.pop(0).release()
    for waiter in waiters:
        waiter.join(PATIENCE)
    assert served == [RENEW, END, END, ORDINARY, ORDINARY]
    taken.clear()


def test_a_call_that_waited_in_vain_waits_no_more(slots: Slots) -> None:
    taken = take_all(slots)
    assert slots.take(RENEW, clock.now() + 0.01) is None
    assert slots.take(RENEW, clock.now() - 1) is None
    assert not any(map(any, slots.users))
    taken.clear()


def test_g7_a_slot_that_an_interrupted_call_was_given_serves_the_next(slots: Slots) -> None:
    class Interrupted(Exception):
        pass

    class Queue(queue.SimpleQueue):  # type: ignore[type-arg]
        """The queue of a call that is interrupted at the moment when it is given a slot."""

        def get(self, *args: object, **kwargs: object) -> Slot:
            taken.pop().release()
            raise Interrupted

    taken, served = take_all(slots), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.queue, "SimpleQueue", Queue)
        with pytest.raises(Interrupted):
            slots.take(RENEW, clock.now() + PATIENCE)
    assert count_free(slots) == 1
    Waiter(slots, ORDINARY, served)
    taken.clear()
    until(lambda: bool(served))


@pytest.mark.parametrize("how", [queue.Empty, KeyboardInterrupt])
def test_g10_what_kept_errors_refer_to_takes_no_slot_away(how: type[BaseException]) -> None:
    def end_when_served(*_: object, **facts: object) -> None:
        """The call that waits ends at the moment when it is given a slot."""
        taken.pop().release()
        raise how

    def call(then: Callable[[], object]) -> None:
        slot = slots.take(ORDINARY, clock.now() + PATIENCE)
        if slot is None:
            return
        try:
            then()
        finally:
            slot.release()

    slots = Slots(1)
    taken, errors = list[Slot](), list[BaseException]()
    with pytest.raises(ZeroDivisionError) as failed:
        call(lambda: 1 / 0)
    # Its traceback keeps the call's variables, as does a cycle of references.
    errors.append(failed.value)
    taken += filter(None, [slots.take_now(ORDINARY)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "reached", end_when_served)
        try:
            call(lambda: None)
        except KeyboardInterrupt as error:
            errors.append(error)
    assert count_free(slots) == 1


def test_a_slot_that_was_returned_twice_is_there_once() -> None:
    slots = Slots(1)
    taken = slots.take_now(ORDINARY)
    assert taken is not None
    taken.release()
    taken.release()
    del taken
    assert count_free(slots) == 1


def test_no_slot_is_lost_and_none_is_used_twice_by_many_threads(slots: Slots) -> None:
    in_use, most, calls = collections.deque[int](), list[int](), itertools.count()
    threads, times = 12, 300

    def run(number: int) -> None:
        draw = random.Random(number)
        for _ in range(times):
            # Some give up before they are served.
            patience = draw.choice((0.0, 0.0001, PATIENCE))
            slot = slots.take(draw.randrange(3), clock.now() + patience)
            if slot is None:
                continue
            in_use.append(number)
            most.append(len(in_use))
            if draw.random() < 0.3:
                time.sleep(0.0005)
            in_use.pop()
            next(calls)
            if draw.random() < 0.5:
                slot.release()
            # Else it is dropped, as by an interrupt.
            del slot

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in running)
    assert max(most) <= 4
    assert next(calls) > threads * times / 3


def test_g8_a_slot_of_the_parent_does_not_return_in_a_child(slots: Slots) -> None:
    # A forked child makes new ones, while stacks of the parent's threads keep some of the old.
    old = Slots(1)
    slot = old.take_now(ORDINARY)
    assert slot is not None
    del old
    slot.release()
    del slot


def test_g10_a_call_is_answered_though_another_one_takes_its_connection_at_once() -> None:
    class Fake:
        def close(self) -> None:
            pass

    class Idle(collections.deque):  # type: ignore[type-arg]
        """Another thread takes each connection as soon as it is there."""

        def append(self, connection: object) -> None:
            super().append(connection)
            taken.append(self.pop())

    pool, taken = Pool(Fake, 4), list[object]()  # type: ignore[arg-type]
    pool.idle._connections = Idle()
    assert pool.run(lambda _: "answer", clock.now() + PATIENCE, "ordinary") == "answer"
    assert len(taken) == 1


def test_a_database_call_that_ends_a_lease_gets_the_connection_of_an_acquire() -> None:
    class Fake:
        def close(self) -> None:
            pass

    pool = Pool(Fake, 4)  # type: ignore[arg-type]
    deadline, served = clock.now() + PATIENCE, threading.Event()
    blocked: list[tuple[threading.Thread, threading.Event]] = []
    urgencies: tuple[Urgency, ...] = ("ordinary", "ordinary", "end", "renew")
    for urgency in urgencies:
        entered, go_on = threading.Event(), threading.Event()

        def use(_: object, entered: threading.Event = entered, go_on: Any = go_on) -> None:
            entered.set()
            go_on.wait(PATIENCE)

        thread = threading.Thread(target=pool.run, args=(use, deadline, urgency))
        thread.start()
        assert entered.wait(PATIENCE)
        blocked.append((thread, go_on))
    end = threading.Thread(target=pool.run, args=(lambda _: served.set(), deadline, "end"))
    with heard("pool.waiting") as waiting:
        end.start()
        waiting.wait()
    for thread, go_on in blocked:
        # The first one is an acquire.
        go_on.set()
        assert served.wait(PATIENCE)
        thread.join(PATIENCE)
    end.join(PATIENCE)
