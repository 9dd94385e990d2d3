"""Feeds the stream, does the harm, waits until all is quiet, and tells what came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from django_dlock import clock

from .broker import Broker
from .journal import Event, Kind
from .report import COLUMNS, TITLES, Tally, table, verdict
from .stage import Stage
from .stream import LONG, Fault, Order, orders

__all__ = ["Show", "run"]

KILLS: tuple[Fault, ...] = ("kill", "kill after the effect")

TICK = 0.05
PACE = 0.1
"""Seconds between two orders of the stream."""
LATER = 0.5
"""Seconds from the first end of an order's body to its late duplicate."""
PAUSE = 1.0
"""Seconds for which Redis is stopped: less than is left of a lease when a renewal is due."""
QUIET = 1.0
"""Seconds without a message after which all is over. For a moment, a message that a worker took
from its queue is neither there nor with the worker yet."""
LONGEST = 45.0
"""Seconds after which the workers, or the stream, are given up."""


class Show:
    """One performance: a loop over the journal, the broker and what is due."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.broker = Broker(COLUMNS)
        self.orders = {order.number: order for order in orders()}
        self.events: list[Event] = []
        self.began = clock.now()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._stopped: dict[tuple[str, int], Event] = {}
        self._started_last: set[str] = set()

    def say(self, text: str) -> None:
        _clear_line()
        print(f"{clock.now() - self.began:5.1f} s  {text}", flush=True)

    def close(self) -> None:
        self.broker.close()

    # -- the parts -----------------------------------------------------------------------

    def wait_for_workers(self, count: int) -> bool:
        """Until so many are ready; false where one ended before, or it takes too long."""
        give_up = clock.now() + LONGEST
        while sum(event.kind == "ready" for event in self.events) < count:
            if self.stage.dead() or clock.now() > give_up:
                return False
            time.sleep(TICK)
            self.events += self.stage.journal.new()
        return True

    def play(self) -> bool:
        """The whole stream and its faults; whether all of it came to an end."""
        for index, order in enumerate(self.orders.values()):
            self._later(index * PACE, partial(self._publish, order))
        give_up = clock.now() + LONGEST
        busy = clock.now()
        while clock.now() < busy + QUIET:
            if clock.now() > give_up or self.stage.dead():
                return False
            self._tick()
            if self._due or self._stopped or not self.broker.is_empty():
                busy = clock.now()
        return True

    def tallies(self) -> dict[str, Tally]:
        from testproject.shop.models import Effect

        now = clock.now()
        self.events += self.stage.journal.new()
        return {
            column: Tally.of(
                list(self.orders),
                [event for event in self.events if event.column == column],
                list(Effect.objects.filter(by=column).values_list("order_number", flat=True)),
                now,
            )
            for column in COLUMNS
        }

    # -- the loop ------------------------------------------------------------------------

    def _tick(self) -> None:
        time.sleep(TICK)
        news = self.stage.journal.new()
        self.events += news
        for event in news:
            self._react(event)
        now = clock.now()
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            item[1]()
        self.broker.restore_visible()
        self._show_progress()

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._due.append((clock.now() + seconds, what))

    def _publish(self, order: Order) -> None:
        for column in COLUMNS:
            for _ in range(order.copies):
                self._send(column, order)

    def _send(self, column: str, order: Order) -> None:
        from .tasks import TASKS

        arguments = (order.number, order.work, order.tail)
        TASKS[column].apply_async(arguments, queue=column)

    def _react(self, event: Event) -> None:
        order = self.orders.get(event.order)
        if order is None:
            return
        if event.kind == "end":
            if event.first and order.later:
                self._later(LATER, partial(self._send, event.column, order))
            stopped = self._stopped.pop((event.column, event.order), None)
            if stopped is not None:
                self._wake(stopped)
        elif event.first:
            self._harm(order, event)

    # -- the harm ------------------------------------------------------------------------

    def _harm(self, order: Order, event: Event) -> None:
        if self._is_over(event):
            return
        what = (order.fault, event.kind)
        if what == ("kill", "start"):
            self._later(0.5, partial(self._kill, event))
        elif what == ("kill after the effect", "effect"):
            self._kill(event)
        elif what == ("stop", "start"):
            self._stop(event)
        elif what == ("redis", "start"):
            self._started_last.add(event.column)
            if len(self._started_last) == len(COLUMNS):
                self._later(0.5, self._pause_redis)

    def _is_over(self, event: Event) -> bool:
        """Whether the body has ended: its process may be in another one by now."""
        return any(other.kind == "end" and other.run == event.run for other in self.events)

    def _kill(self, event: Event) -> None:
        if self._is_over(event):
            return
        # Noted before, so that it is never after the start of whoever takes over.
        self._note("killed", event)
        os.kill(event.pid, signal.SIGKILL)
        self._tell(event, f"killed a worker in the middle of order {event.order}")

    def _stop(self, event: Event) -> None:
        os.kill(event.pid, signal.SIGSTOP)
        self._note("stopped", event)
        self._stopped[event.column, event.order] = event
        self._tell(event, f"stopped a worker in order {event.order}, beyond its lease")

    def _wake(self, event: Event) -> None:
        # Only now that the other has ended: that a worker which wakes up runs beside its
        # successor until it looks is what no lock can prevent.
        self._note("woken", event)
        os.kill(event.pid, signal.SIGCONT)
        self._tell(event, f"woke it up after another finished order {event.order}")

    def _pause_redis(self) -> None:
        self.say(f"Redis: stopped for {PAUSE:g} s in the middle of slow bodies")
        self.stage.redis.pause()
        time.sleep(PAUSE)
        self.stage.redis.resume()

    def _tell(self, event: Event, text: str) -> None:
        self.say(f"{TITLES[event.column]}: {text}")

    def _note(self, kind: Kind, event: Event) -> None:
        noted = Event(kind, event.column, event.order, event.run, event.pid, True, clock.now())
        self.stage.journal.write(noted)

    def _show_progress(self) -> None:
        if sys.stdout.isatty():
            bodies = sum(event.kind == "start" for event in self.events)
            ended = sum(event.kind == "end" for event in self.events)
            seconds = clock.now() - self.began
            print(f"\r{seconds:5.1f} s  {bodies} bodies began, {ended} ended ", end="", flush=True)


def _clear_line() -> None:
    if sys.stdout.isatty():
        print("\r\033[K", end="")


def run() -> int:
    """The demonstration from beginning to end; its exit code."""
    print("One stream of orders for three guards. It brings duplicates, slow bodies, killed and")
    print("stopped workers, and a Redis that is stopped for a moment.")
    with Stage() as stage, contextlib.closing(Show(stage)) as show:
        print(_times(), end="\n\n")
        show.say(f"Redis on port {stage.redis.port}, SQLite migrated; starting workers")
        for column in COLUMNS:
            for number in (1, 2):
                stage.start_worker([column], f"{column}{number}")
        failures = _play(show)
        logs = stage.logs() if failures else ""
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        print(logs, file=sys.stderr)
        return 1
    print("Plain Celery doubled; the lock kept bodies apart; with the record, once per order.")
    return 0


def _times() -> str:
    from .settings import CELERY_BROKER_TRANSPORT_OPTIONS, DLOCKS

    lease = DLOCKS["default"]["TTL"]
    visible = CELERY_BROKER_TRANSPORT_OPTIONS["visibility_timeout"]
    return f"A lease lives {lease:g} s, Redis redelivers after {visible} s, slow is {LONG:g} s."


def _play(show: Show) -> list[str]:
    """Print progress and table; what was not shown."""
    if not show.wait_for_workers(2 * len(COLUMNS)):
        return ["the workers did not start"]
    show.say(f"6 workers ready; {len(show.orders)} orders for each of 3 tasks")
    settled = show.play()
    show.say("everything delivered" if settled else "given up")
    tallies = show.tallies()
    print(f"\n{table(tallies)}\n")
    failures = verdict(tallies, kills=len(KILLS))
    if not settled:
        failures.append("messages were still under way, or a worker ended by itself")
    return failures
