"""Runs rows: all subjects of a row in turn, round by round."""

from __future__ import annotations

import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

from .model import Gathering, Readings, Row, RowResult, Session, Subject, SubjectResult, Unavailable
from .processes import clean
from .progress import Progress

T = TypeVar("T")

QUICK_ROUNDS = 3
FEWEST_ROUNDS = 5
FEWEST_PASSES = 4


class _Turns:
    """One subject of a running row."""

    def __init__(self, subject: Subject, row: Row) -> None:
        self.subject = subject
        self.gathering = Gathering(row.metrics)
        self.session: Session | None = None
        self.cannot: str | None = None
        self._passes: list[Readings] = []
        self._stack = ExitStack()

    def open(self) -> None:
        self.session = self._attempt(lambda: self._stack.enter_context(self.subject.open()))

    def close(self) -> None:
        """Clean up; if that fails, the measurements are still valid."""
        try:
            self._stack.close()
        except Exception as error:  # noqa: BLE001
            self._complain(error)

    def once(self) -> None:
        if self.session is not None:
            self._keep(self._attempt(self.session.once))
            self.end_round()

    def turn(self) -> None:
        if self.session is not None:
            self._keep(self._attempt(self.session.round))

    def end_round(self) -> None:
        passes, self._passes = self._passes, []
        if passes and self.cannot is None:
            self.gathering.add(*passes)

    def _keep(self, readings: Readings | None) -> None:
        if readings is not None:
            self._passes.append(readings)

    def _attempt(self, step: Callable[[], T]) -> T | None:
        """One step of the measurement; if it fails, the row continues without the subject."""
        clean()
        try:
            return step()
        except Unavailable as error:
            self.cannot = str(error)
        except Exception as error:  # noqa: BLE001 - a peer that breaks does not end the run
            self.cannot = f"{type(error).__name__}: {error}".strip().rpartition("\n")[2]
            self._complain(error)
        self.session = None
        return None

    def _complain(self, error: Exception) -> None:
        print(f"\n{self.subject.name}:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)

    def result(self) -> SubjectResult:
        series = {} if self.cannot else self.gathering.series()
        return SubjectResult(self.subject.role, self.subject.options, series, self.cannot)


class _Pace:
    """Limits the time of a row: a slow machine does fewer passes, or fewer rounds.

    There are never fewer than a meaningful median needs.
    """

    def __init__(self, rounds: int, seconds: float) -> None:
        self._rounds, self._seconds = rounds, seconds
        self._started = time.monotonic()

    def passes(self, row: Row, number: int) -> Iterator[int]:
        share = self._seconds * (number + 1) / self._rounds
        for part in range(row.passes):
            if part >= FEWEST_PASSES and self.so_far() > share:
                return
            yield part

    def rounds(self) -> Iterator[int]:
        for number in range(self._rounds):
            if number >= FEWEST_ROUNDS and self.so_far() > self._seconds:
                return
            yield number

    def so_far(self) -> float:
        return time.monotonic() - self._started


def run_row(row: Row, rounds: int, progress: Progress, *, seconds: float = math.inf) -> RowResult:
    """Measure all subjects of a row in ``rounds`` interleaved rounds.

    Args:
        seconds: The time it may take, as far as the number of rounds and passes decides that.
    """
    pace = _Pace(rounds, seconds)
    # Collect the garbage of earlier rows.
    gc.unfreeze()
    turns = [_Turns(subject, row) for subject in row.subjects]
    with ExitStack() as stack:
        for turn in turns:
            progress.step(row, 0, turn.subject.name)
            turn.open()
            stack.callback(turn.close)
        for turn in turns:
            progress.step(row, 0, turn.subject.name)
            turn.once()
        for number in pace.rounds():
            for part in pace.passes(row, number):
                for turn in _rotated(turns, number + part):
                    progress.step(row, number + 1, turn.subject.name)
                    turn.turn()
            for turn in turns:
                turn.end_round()
    return RowResult(
        name=row.name,
        title=row.title,
        metrics=row.metrics,
        family=row.family,
        x=row.x,
        bed=row.bed,
        parser=row.parser,
        subjects={turn.subject.name: turn.result() for turn in turns},
        seconds=pace.so_far(),
    )


def _rotated(turns: Sequence[_Turns], number: int) -> Sequence[_Turns]:
    """Rotate the order in each round, so that no subject always follows the same other one."""
    first = number % len(turns)
    return [*turns[first:], *turns[:first]]
