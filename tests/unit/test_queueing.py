"""The line of one process for a name: nobody's turn is lost, whatever comes between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from django_dlock import BackendUnavailable, clock, queueing, waiting
from django_dlock.lease import Contention, Lease, LeaseRequest
from django_dlock.queueing import Place
from django_dlock.testing import FakeClock

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
        place = Place(self.backend, "it", now=clock.now(), blocks=False)  # type: ignore[arg-type]
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


