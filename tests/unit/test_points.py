"""The package's points, and the helpers that wait for them."""

from __future__ import annotations

import ast
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_dlock
from django_dlock.process import points
from tests.support.points import at, heard, stop_at

PACKAGE = Path(django_dlock.__file__).parent
POINT = "wait.asleep"


def calls() -> Iterator[ast.Call]:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reached":
                yield node


def test_every_point_is_described_and_reached_with_the_values_that_are_described() -> None:
    reached = Counter[str]()
    for call in calls():
        (name,) = call.args
        assert isinstance(name, ast.Constant)
        reached[name.value] += 1
        for keyword in call.keywords:
            assert f"`{keyword.arg}`" in points.POINTS[name.value]
    assert reached.keys() == points.POINTS.keys()


def test_without_a_listener_nothing_happens() -> None:
    with heard(POINT) as it:
        points.reached(POINT, waiter="one")
    points.reached(POINT, waiter="two")
    assert it.each("waiter") == {"one"}


def test_only_the_wanted_values_are_heard() -> None:
    with heard(POINT, waiter="one") as it:
        points.reached(POINT, waiter="two")
        points.reached("listener.failed", waiter="one")
        assert not it.count()
        with pytest.raises(AssertionError, match="reached 0 times"):
            it.wait(patience=0.01)
        points.reached(POINT, waiter="one")
        it.wait()


def test_what_an_action_raises_is_raised_where_it_is_reached() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with at(POINT, interrupt), pytest.raises(KeyboardInterrupt):
        points.reached(POINT)
    points.reached(POINT)


def test_a_thread_stops_there_until_it_may_go_on() -> None:
    with stop_at(POINT) as stop:
        thread = threading.Thread(target=points.reached, args=(POINT,))
        thread.start()
        stop.wait()
        assert thread.is_alive()
        stop.go_on()
        thread.join(20)
        assert not thread.is_alive()


def test_nobody_listens_in_a_forked_child() -> None:
    with heard(POINT) as it:
        pid = os.fork()
        if pid == 0:
            points.reached(POINT)
            os._exit(it.count())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
