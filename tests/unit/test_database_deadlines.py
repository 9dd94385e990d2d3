"""Calls to a database are cut at their deadlines, whatever happened to the calls before them."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest

from django_dlock import clock
from django_dlock.backends.database.deadlines import Deadlines
from tests.support.at_nth import AtNth
from tests.support.points import heard

PATIENCE = 20.0


class Call:
    """A call that is cut at its deadline."""

    def __init__(self) -> None:
        self.was_cut = threading.Event()

    def cut(self) -> None:
        self.was_cut.set()


def test_g10_a_late_call_is_cut_and_one_in_time_is_not() -> None:
    deadlines, late, in_time = Deadlines(), Call(), Call()
    deadlines.begin(in_time, clock.now() + 2 * PATIENCE)
    deadlines.begin(late, clock.now())
    assert late.was_cut.wait(PATIENCE)
    assert not deadlines.end(late)
    assert deadlines.end(in_time)


def test_g10_an_interrupted_call_keeps_no_other_call_from_its_deadline() -> None:
    for place in itertools.count(1):
        deadlines, before, interrupted, late = Deadlines(), Call(), Call(), Call()
        latest = clock.now() + 10 * PATIENCE
        with heard("worker.asleep", name="dlock-deadlines", until=latest) as asleep:
            deadlines.begin(before, latest)
            asleep.wait()
        nth = AtNth(place)
        try:
            sys.setprofile(nth.profile)
            # Sooner than the one before, so that the watching thread has to be woken.
            deadlines.begin(interrupted, clock.now() + 5 * PATIENCE)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        other = threading.Thread(target=deadlines.begin, args=(late, clock.now()), daemon=True)
        other.start()
        assert late.was_cut.wait(PATIENCE), place
        deadlines.end(before)
        deadlines.end(interrupted)
        if nth.left > 0:
            break
    assert place > 5


def test_g10_a_call_that_cannot_be_cut_is_told_and_keeps_no_other_from_its_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stubborn:
        def cut(self) -> None:
            raise RuntimeError("in use from another thread")

    deadlines, stubborn, late = Deadlines(), Stubborn(), Call()
    deadlines.begin(stubborn, clock.now())
    deadlines.begin(late, clock.now() + 0.1)
    assert late.was_cut.wait(PATIENCE)
    assert "outlives its deadline" in caplog.text
    assert "in use from another thread" in caplog.text
