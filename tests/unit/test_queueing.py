"""The line of one process for a name: nobody's turn is lost, whatever comes between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from django_dlock import (
    BackendUnavailable,
    Lock,
    clock,
    events,
    locks,
    queueing,
    signals,
    waiting,
)
from django_dlock.lease import Contention, Lease, LeaseRequest
from django_dlock.queueing import Place

NOP = dis.opmap["NOP"]
OURS = (queueing.__file__, waiting.__file__)
TAKEN = Contention("another", "held", 30.0, 0.0)


class Struck(BaseException):
    """An interrupt."""


class Scripted:
    """A backend whose answers are told in advance; ``None`` waits, an error is raised."""

    alias, command_timeout = "scripted", 1.0

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[bool] = []
        self.on_ask: Callable[[], object] = lambda: None

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Any:
        self.asked.append(request.waits)
        self.on_ask()
        return self._answer(request)

    def wait(self, request: LeaseRequest, *_: Any, interrupted: Any, **__: Any) -> Any:
        interrupted()
        return self._answer(request)

    def _answer(self, request: LeaseRequest) -> Any:
        answer = self.answers.pop(0) if self.answers else TAKEN
        if isinstance(answer, Exception):
            raise answer
        if answer == "granted":
            return Lease(request.name, request.owner, 1, 30.0, clock.now() + 30)
        return answer

    async def acall(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method)(*args, **kwargs)


class Line:
    """Sleepers in the line for ``it``, and who of them was woken."""

    def __init__(self, backend: Scripted | None = None) -> None:
        self.backend = backend or Scripted()
        self.woken: list[Place] = []
        self.present: list[Place] = []

    def new(self) -> Place:
        place = Place(self.backend, "it", clock.now())  # type: ignore[arg-type]
        # Each as if on a thread of its own.
        place._thread = id(place)
        return place

    def join(self, place: Place | None = None) -> Place:
        """Line up, and sleep where it is not its turn."""
        if place is None:
            with elsewhere():
                return self.join(self.new())
        self.present.append(place)
        if place.line_up():
            self.woken.append(place)
        else:
            place._wake = lambda: self.woken.append(place) or True  # type: ignore[func-returns-value]
            if place.is_first():
                self.woken.append(place)
        return place

    def leave(self, place: Place) -> None:
        self.present.remove(place)
        place.leave()

    def turn(self) -> list[Place]:
        """Who of those who are awake may ask, once all that were woken have looked."""
        while True:
            looked = len(self.woken)
            awake = [p for p in self.present if p in self.woken]
            may = [place for place in awake if place.may_ask()]
            if len(self.woken) == looked:
                return may


_elsewhere = 0


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """What happens now happens on another thread, between two steps of this one."""
    global _elsewhere
    _elsewhere += 1
    try:
        yield
    finally:
        _elsewhere -= 1


def traced(step: Callable[[], None], body: Callable[[], Any]) -> Any:
    """Call ``step`` before each bytecode of the queue's own modules while ``body`` runs."""

    def local(frame: FrameType, event: str, arg: object) -> Any:
        # Python looks for signals after calls and jumps, never at a NOP, which may stand between
        # the end of a "try" and its "finally".
        if event == "opcode" and not _elsewhere and frame.f_code.co_code[frame.f_lasti] != NOP:
            step()
        return local

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        # The loop's callback apart: struck there, asyncio's own sleep never ends either.
        if frame.f_code.co_filename not in OURS or frame.f_code.co_name == "_settle":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        return body()
    finally:
        sys.settrace(before)


def every_moment(run: Callable[[Callable[[], None]], None], strike: Callable[[int], object]) -> int:
    """Repeat ``run`` and ``strike`` at its first step, its second, and so on to its last."""
    for number in itertools.count(1):
        steps = itertools.count(1)
        struck = False

        def step(number: int = number, steps: Iterator[int] = steps) -> None:
            nonlocal struck
            if next(steps) == number:
                struck = True
                strike(number)

        run(step)
        assert queueing._lines == {}, f"left behind after step {number}"
        if not struck:
            return number
    raise AssertionError


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    queueing.forget()
    yield
    queueing.forget()


# -- no turn is lost -----------------------------------------------------------------------

STORIES: dict[str, list[Any]] = {
    "granted": ["granted"],
    "contended": [TAKEN, None, "granted"],
    "handed over": [TAKEN, Lease("it", "me", 1, 30.0, 0.0)],
    "patience over": [TAKEN],
    "unavailable": [BackendUnavailable("no", "it", "scripted")],
    "unavailable later": [TAKEN, BackendUnavailable("no", "it", "scripted")],
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("how", ["thread", "coroutine"])
@pytest.mark.parametrize("behind", [False, True], ids=["first", "behind"])
@pytest.mark.parametrize("story", STORIES)
def test_g7_an_interrupt_anywhere_takes_no_turn_along(how: str, behind: bool, story: str) -> None:
    def strike(number: int) -> None:
        raise Struck

    def run(step: Callable[[], None]) -> None:
        backend = Scripted(*STORIES[story])
        line = Line(backend)
        head = line.join() if behind else None
        followers: list[Place] = []

        def follow() -> None:
            if not followers:
                followers.append(line.join())

        def met(contention: Contention) -> None:
            # From here on it is its turn, if it stood behind.
            if head in line.present:
                with elsewhere():
                    line.leave(head)

        if head is not None:
            head.contention = TAKEN
            follow()
        backend.on_ask = follow
        request = LeaseRequest("it", "me", 30.0, waits=True)
        keywords: dict[str, Any] = {"patience": 0.005, "met": met, "broke": met}

        def body() -> None:
            if how == "thread":
                waiting.acquire(backend, request, **keywords)  # type: ignore[arg-type]
                return
            coroutine = waiting.aacquire(
                backend,  # type: ignore[arg-type]
                request,
                abandoned=lambda: False,
                **keywords,
            )
            LOOP.run_until_complete(coroutine)

        try:
            traced(step, body)
        except (Struck, BackendUnavailable):
            pass
        follow()
        expected = head if head in line.present else followers[0]
        assert line.turn() == [expected]
        for place in line.present.copy():
            line.leave(place)

    LOOP = asyncio.new_event_loop()
    try:
        assert every_moment(run, strike) > 50
    finally:
        LOOP.close()


ACTS: dict[str, Callable[[Line, list[Place]], object]] = {
    "another comes": lambda line, places: line.join(),
    "the second leaves": lambda line, places: _leave(line, places, 1),
    "the first leaves": lambda line, places: _leave(line, places, 0),
    "the last leaves": lambda line, places: _leave(line, places, -1),
}


def _leave(line: Line, places: list[Place], index: int) -> None:
    others = [place for place in line.present if place is not places[0]]
    if len(others) > abs(index) - (index < 0):
        line.leave(others[index])


@pytest.mark.parametrize("acts", list(itertools.product(ACTS, ACTS)), ids=" and ".join)
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("what", ["comes", "leaves first", "leaves last"])
def test_one_who_comes_or_goes_meets_others_between_any_two_steps(
    what: str, before: int, acts: tuple[str, str]
) -> None:
    def run_at(first: int, second: int) -> int:
        """What two others do at these steps of one; gives how many steps there were."""
        line = Line()
        mine = line.new()
        if what == "leaves first":
            line.join(mine)
        for _ in range(before):
            line.join()
        if what == "leaves last":
            line.join(mine)
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            for act, moment in zip(acts, (first, second), strict=True):
                if steps == moment:
                    ACTS[act](line, [mine])

        traced(step, lambda: line.join(mine) if what == "comes" else line.leave(mine))
        turn = line.turn()
        assert len(turn) == min(1, len(line.present)), (first, second)
        while line.present:
            line.leave(line.turn()[0])
            assert len(line.turn()) == min(1, len(line.present)), (first, second)
        assert queueing._lines == {}, (first, second)
        return steps

    total = run_at(0, 0)
    for first in range(1, total + 1):
        for second in range(first, total + 1, 7):
            run_at(first, second)


# -- who goes on when somebody does not ----------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have stalled are noticed after a fifth of a second."""
    monkeypatch.setattr(queueing, "STALLED_AFTER", 0.2)
    monkeypatch.setattr(queueing, "LOOK", 0.02)
    monkeypatch.setattr(waiting, "LOOK", 0.02)
    monkeypatch.setattr(locks["local"], "command_timeout", 0.1)


class Waiter(threading.Thread):
    """Waits for ``it``, holds it for a moment, and notes when."""

    def __init__(self, order: list[Any], mark: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self.order, self.mark = order, mark
        self.lock = Lock("it", using="local", **options)
        self.got: bool | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.got = self.lock.acquire()
            if self.got:
                self.order.append(self.mark)
                self.lock.release()
        except BaseException as error:
            self.got = error

    def ends(self) -> Any:
        self.join(20)
        assert not self.is_alive()
        return self.got


def standing() -> list[Place]:
    """Who stands in line for ``it`` on the local alias."""
    return queueing._lines.get((locks["local"], "it"), [])


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def until_standing(count: int) -> None:
    until(lambda: len(standing()) == count)


async def auntil(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.fixture
def held() -> Iterator[Lock]:
    """``it``, held for as long as the test does not release it."""
    locks.reset()
    lock = Lock("it", using="local", bound=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


def test_threads_and_coroutines_of_any_loop_have_their_turn_as_they_came(held: Lock) -> None:
    order: list[Any] = []

    async def coroutine(mark: int) -> None:
        async with Lock("it", using="local", wait=20):
            order.append(mark)

    waiters: list[threading.Thread] = []
    for number in range(12):
        if number % 2:
            waiters.append(Waiter(order, number, wait=20))
        else:
            run = threading.Thread(target=asyncio.run, args=[coroutine(number)])
            run.start()
            waiters.append(run)
        until_standing(number + 1)
    held.release()
    for waiter in waiters:
        waiter.join(20)
    assert order == list(range(12))
    assert standing() == []


def test_one_of_a_hundred_waits_at_the_backend(held: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = locks["local"]
    at_backend, most = set(), 0
    wait = backend.wait

    def watched(request: LeaseRequest, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        at_backend.add(request.owner)
        most = max(most, len(at_backend))
        try:
            return wait(request, *args, **kwargs)
        finally:
            at_backend.discard(request.owner)

    monkeypatch.setattr(backend, "wait", watched)
    order: list[Any] = []

    async def crowd() -> None:
        async def one(mark: int) -> None:
            async with Lock("it", using="local", wait=20):
                order.append(mark)

        await asyncio.gather(*map(one, range(50, 100)))

    waiters: list[threading.Thread] = [Waiter(order, number, wait=20) for number in range(50)]
    waiters.append(threading.Thread(target=asyncio.run, args=[crowd()]))
    waiters[-1].start()
    until(lambda: len(standing()) == 100 and at_backend)
    info = backend.get("it")
    assert info is not None
    assert info.waiting == 1
    held.release()
    for waiter in waiters:
        waiter.join(20)
    assert sorted(order) == list(range(100))
    assert most == 1


def test_the_uncontended_never_sleep_and_leave_no_trace() -> None:
    backend = Scripted("granted")
    request = LeaseRequest("it", "me", 30.0, waits=True)
    lease = waiting.acquire(backend, request, patience=1, met=print, broke=print)  # type: ignore[arg-type]
    assert lease is not None
    assert backend.asked == [True]
    assert queueing._lines == {}


def test_whoever_tries_once_passes_the_line_and_asks_once(
    held: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = Waiter([], 0, wait=20)
    until(standing)
    asked: list[bool] = []
    acquire = locks["local"].acquire

    def watched(request: LeaseRequest, **kwargs: Any) -> Any:
        if threading.current_thread() is not waiter:
            asked.append(request.waits)
        return acquire(request, **kwargs)

    monkeypatch.setattr(locks["local"], "acquire", watched)
    lock = Lock("it", using="local", wait=0)
    assert not lock.acquire()
    assert asked == [False]
    assert lock.contention is not None
    assert len(standing()) == 1
    held.release()
    assert waiter.ends() is True


def test_patience_counts_from_the_call_and_ends_with_a_try_at_the_backend(held: Lock) -> None:
    first = Waiter([], 0, wait=20)
    until(standing)
    second = Waiter([], 1, wait=0.05)
    assert second.ends() is False
    # What it met is for Retry-After and the like.
    assert second.lock.contention is not None
    assert second.lock.contention.owner == held.owner
    held.release()
    assert first.ends() is True


def test_contention_is_told_to_those_who_stand_in_line(held: Lock) -> None:
    told = []

    def receiver(name: str, **_: Any) -> None:
        told.append(name)

    signals.contended.connect(receiver)
    try:
        first = Waiter([], 0, wait=20)
        until(lambda: standing() and standing()[0].contention)
        second = Waiter([], 1, wait=20)
        until(lambda: second.lock.contention)
        assert second.lock.contention.owner == held.owner  # type: ignore[union-attr]
        until(lambda: len(told) == 2)
        held.release()
        assert first.ends() is second.ends() is True
    finally:
        signals.contended.disconnect(receiver)
    assert events.flush()
    assert told == ["it", "it"]


def test_g10_where_the_first_has_no_answer_each_asks_for_itself(
    held: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = threading.Event()
    asked: list[str] = []
    backend = locks["local"]
    acquire, wait = backend.acquire, backend.wait

    def unavailable(request: LeaseRequest) -> BackendUnavailable:
        return BackendUnavailable("no answer", request.name, "local")

    def acquire_or_fail(request: LeaseRequest, **kwargs: Any) -> Any:
        if down.is_set():
            asked.append(request.owner)
            raise unavailable(request)
        return acquire(request, **kwargs)

    def wait_or_fail(request: LeaseRequest, *args: Any, **kwargs: Any) -> Any:
        kwargs["interrupted"] = down.is_set
        wait(request, *args, **kwargs)
        raise unavailable(request)

    monkeypatch.setattr(backend, "acquire", acquire_or_fail)
    monkeypatch.setattr(backend, "wait", wait_or_fail)
    waiters = [Waiter([], number, wait=None) for number in range(20)]
    until_standing(20)
    down.set()
    errors = [waiter.ends() for waiter in waiters]
    assert all(isinstance(error, BackendUnavailable) for error in errors)
    # But for the first, whose wait failed; and nobody's error is another's.
    assert len(asked) == len(set(asked)) == 19
    assert len(set(map(id, errors))) == 20


def test_those_who_were_told_to_ask_keep_their_places(held: Lock) -> None:
    order: list[Any] = []
    waiters = []
    for number in range(5):
        waiters.append(Waiter(order, number, wait=20))
        until_standing(number + 1)
    before = standing().copy()
    before[0].warn()
    until(lambda: not any(place.told for place in before))
    assert standing() == before
    held.release()
    assert [waiter.ends() for waiter in waiters] == [True] * 5
    assert order == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("soon")
def test_a_loop_that_is_blocked_costs_the_others_a_moment(held: Lock) -> None:
    blocked, go_on = threading.Event(), threading.Event()

    async def blocks() -> None:
        tasks = [asyncio.create_task(Lock("it", using="local").aacquire()) for _ in range(3)]
        await auntil(lambda: len(standing()) == 3)
        blocked.set()
        go_on.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = threading.Thread(target=asyncio.run, args=[blocks()])
    loop.start()
    assert blocked.wait(20)
    waiter = Waiter([], 0, wait=20)
    try:
        until(lambda: [place._loop for place in standing()] == [None])
        held.release()
        assert waiter.ends() is True
    finally:
        go_on.set()
        loop.join(20)
    assert standing() == []


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_a_loop_that_ended_with_tasks_in_line_keeps_nobody(held: Lock, how: str) -> None:
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(Lock("it", using="local").aacquire()) for _ in range(3)]

    async def line_up() -> None:
        await auntil(lambda: len(standing()) == 3)

    loop.run_until_complete(line_up())
    if how == "closed":
        loop.close()
    waiter = Waiter([], 0, wait=20)
    held.release()
    assert waiter.ends() is True
    if how == "stopped":
        # It goes on after all: its tasks line up again.
        one = asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        done, rest = loop.run_until_complete(one)
        assert [task.result() for task in done] == [True]
        for task in rest:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.close()
    for task in tasks:
        # Their handles are kept, as a traceback might.
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_blocking_call_does_not_wait_for_a_coroutine_of_the_loop_it_blocks(held: Lock) -> None:
    async def main() -> bool:
        task = asyncio.create_task(Lock("it", using="local", wait=20).aacquire())
        await auntil(standing)
        threading.Timer(0.05, held.release).start()
        lock = Lock("it", using="local", wait=20)
        # Beside the line: whoever of the two the backend grants first.
        got = lock.acquire(timeout=queueing.STALLED_AFTER / 2)
        if got:
            lock.release()
        await task
        return got

    assert asyncio.run(main())


def test_a_signal_handler_does_not_wait_for_the_call_that_it_interrupts(held: Lock) -> None:
    answers: list[bool] = []

    def handler(*_: Any) -> None:
        answers.append(Lock("it", using="local").acquire(timeout=0.01))
        held.release()
        with Lock("it", using="local", wait=20):
            answers.append(True)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.main_thread().ident
        assert main is not None

        def strike() -> None:
            until(standing)
            signal.pthread_kill(main, signal.SIGUSR1)

        thread = threading.Thread(target=strike)
        thread.start()
        with Lock("it", using="local", wait=20):
            answers.append(True)
        thread.join(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert answers == [False, True, True]
    assert standing() == []


async def test_g7_cancelled_coroutines_take_no_turn_along() -> None:
    locks.reset()
    held = Lock("it", using="local")
    await held.aacquire()
    tasks = [asyncio.create_task(Lock("it", using="local").aacquire()) for _ in range(6)]
    await auntil(lambda: len(standing()) == 6)
    for task in (tasks[0], tasks[1], tasks[3]):
        task.cancel()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(Lock("it", using="local").aacquire(timeout=20), 0.05)
    await held.arelease()
    granted = await tasks[2]
    assert granted
    assert len(standing()) == 2
    for task in tasks[4:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert standing() == []


def test_a_thousand_threads_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    locks.reset()
    order: list[Any] = []
    waiters = [Waiter(order, number, wait=None) for number in range(1000)]
    for waiter in waiters:
        assert waiter.ends() is True
    assert sorted(order) == list(range(1000))
    assert queueing._lines == {}


def test_many_who_come_and_go_at_once_lose_no_turn_and_leave_no_line() -> None:
    locks.reset()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    counts = [0] * 8

    def work(number: int) -> None:
        for turn in range(200):
            # Some give up at once, so that both ends of the line are busy.
            if Lock("it", using="local").acquire(timeout=0.0001 if turn % 3 else 20):
                counts[number] += 1
                Lock("other", using="local")
                registry_release(number)

    def registry_release(number: int) -> None:
        info = locks["local"].get("it")
        assert info is not None
        locks["local"].release("it", info.owner, min_hold=0, deadline=clock.now() + 1)

    try:
        threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(before)
    assert min(counts) >= 60
    assert queueing._lines == {}


GEVENT = """
from gevent import monkey; monkey.patch_all()
import threading, django; django.setup()
from django_dlock import Lock, locks, queueing
held = Lock("it", using="local"); held.acquire()
done = []
def work(number):
    with Lock("it", using="local", wait=20):
        done.append(number)
threads = [threading.Thread(target=work, args=[n]) for n in range(50)]
for thread in threads:
    thread.start()
while len(queueing._lines.get((locks["local"], "it"), [])) < 50:
    threading.Event().wait(0.001)
print(locks["local"].get("it").waiting)
held.release()
for thread in threads:
    thread.join(20)
print(done == list(range(50)), queueing._lines)
"""


def test_greenlets_stand_in_line_as_threads_do() -> None:
    pytest.importorskip("gevent", reason="gevent is not installed: it has no wheel")
    done = subprocess.run(
        [sys.executable, "-c", GEVENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["1", "True {}"], done.stdout
