"""Waits for the package's points, and acts or stops where they are reached.

``django_dlock/process/points.py`` lists them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django_dlock.process import points

PATIENCE = 20.0

Values = dict[str, Any]


def matches(values: Values, wanted: Values) -> bool:
    return all(key in values and values[key] == value for key, value in wanted.items())


@contextmanager
def at(point: str, act: Callable[[Values], object], **wanted: Any) -> Iterator[None]:
    """Call ``act`` whenever this point is reached with these values, on the thread that does.

    What it raises is raised there.
    """
    assert point in points.POINTS, f"{point!r} is no point of the package"

    def listener(name: str, values: Values) -> None:
        if name == point and matches(values, wanted):
            act(values)

    _ours.add(listener)
    points.listen(listener)
    try:
        yield
    finally:
        points.unlisten(listener)
        _ours.discard(listener)


class Heard:
    """How often, and with which values, a point was reached since the ``with`` block began."""

    def __init__(self) -> None:
        # Reentrant, as a signal handler or a finalizer may reach the point inside it.
        self._changed = threading.Condition(threading.RLock())
        self._values: list[Values] = []

    def note(self, values: Values) -> None:
        with self._changed:
            self._values.append(values)
            self._changed.notify_all()

    @property
    def latest(self) -> Values:
        return self._values[-1]

    def count(self, **wanted: Any) -> int:
        return sum(matches(values, wanted) for values in list(self._values))

    def each(self, key: str) -> set[Any]:
        """The different values that ``key`` had."""
        return {values[key] for values in list(self._values) if key in values}

    def until(self, condition: Callable[[Heard], object], patience: float = PATIENCE) -> None:
        """Wait until the condition is true; it is asked when the point is reached."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), patience), (
                f"not in {patience} s; reached {len(self._values)} times"
            )

    def wait(self, times: int = 1, patience: float = PATIENCE, **wanted: Any) -> None:
        """Wait until it was reached so often with these values."""
        self.until(lambda it: it.count(**wanted) >= times, patience)

    def again(self, patience: float = PATIENCE, **wanted: Any) -> None:
        """Wait until it is reached once more from here on."""
        self.wait(self.count(**wanted) + 1, patience, **wanted)

    def clear(self) -> None:
        """Forget what was reached so far."""
        with self._changed:
            self._values.clear()


@contextmanager
def heard(point: str, **wanted: Any) -> Iterator[Heard]:
    """Notes when the point is reached with these values: ``with heard("…") as it: … it.wait()``."""
    it = Heard()
    with at(point, it.note, **wanted):
        yield it


class Stop:
    """A thread that stands still at a point."""

    def __init__(self) -> None:
        self._reached, self._goes_on = threading.Event(), threading.Event()

    def __call__(self, values: Values) -> None:
        self._reached.set()
        assert self._goes_on.wait(PATIENCE), "nobody let it go on"

    def wait(self, patience: float = PATIENCE) -> None:
        """Wait until a thread has stopped there."""
        assert self._reached.wait(patience), "not reached"

    def go_on(self) -> None:
        self._goes_on.set()


@contextmanager
def stop_at(point: str, **wanted: Any) -> Iterator[Stop]:
    """Each thread that reaches the point stays there until ``go_on``, or the block's end."""
    stop = Stop()
    try:
        with at(point, stop, **wanted):
            yield stop
    finally:
        stop.go_on()


_ours: set[points.Listener] = set()

# A thread of the parent may have had the lock of a ``Heard``. Only the parent waits for points.
os.register_at_fork(after_in_child=lambda: points.unlisten(*_ours))
