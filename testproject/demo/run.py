"""Publishes the orders, causes the faults, waits until all is done, and prints the results."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from django_dlock import clock

from .interrupt import pause
from .journal import Event, Kind
from .metrics import compare
from .metrics import table as comparison
from .report import COLUMNS, TITLES, Tally, conclusion, legend, table, verdict, with_table
from .stage import Stage
from .stream import LONG, SHORT, Fault, Order, orders

KILLS: tuple[Fault, ...] = ("kill", "kill after the effect")

FAULTS: dict[Fault, str] = {
    "kill": "kills the child that runs it, halfway (SIGKILL)",
    "kill after the effect": "kills the child that runs it, after its charge (SIGKILL)",
    "stop": "stops the child that runs it until another has charged it (SIGSTOP)",
    "kill the worker": "kills its whole worker: the parent and all children (SIGKILL)",
}
"""The faults, each made once for each task while the order with that fault runs."""

WORKERS = 2
"""Workers of each task."""
CHILDREN = 6
"""Child processes of each worker; enough for one worker to do the work alone."""

TICK = 0.05
TELL = 5.0
"""Seconds between two lines of progress if the output is not a terminal."""
PACE = 0.1
"""Seconds between two orders of the stream."""
LATER = 0.5
"""Seconds from the end of an order's first body to its late duplicate."""
PAUSE = 1.0
"""Seconds for which the locks are unreachable; less than a lease has left when it is renewed."""
NOTICED = 2.0
"""Seconds after which an operator or a customer sends the messages of a killed worker again, if the
broker does not redeliver them."""
QUIET = 1.0
"""Seconds without a message after which the run is over. For a moment, a message on its way to a
worker is counted neither in the queue nor at the worker."""
LONGEST = 90.0
"""Seconds after which waiting for the workers, or for the stream, ends with a failure."""


class Show:
    """One run: a loop over the journal, the broker and the due actions."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.broker = stage.broker(COLUMNS)
        self.redelivers = stage.kind == "redis"
        self.orders = {order.number: order for order in orders(redelivers=self.redelivers)}
        self.events: list[Event] = []
        self.began = clock.now()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._stopped: dict[tuple[str, int], Event] = {}
        self._started_last: set[str] = set()
        self._open: set[str] = set()
        self._unsent = len(COLUMNS) * sum(order.messages for order in self.orders.values())
        self.messages = self._unsent
        self._told = self.began

    def say(self, text: str) -> None:
        _clear_line()
        print(f"{clock.now() - self.began:5.1f} s  {text}", flush=True)

    def close(self) -> None:
        self.broker.close()

    # -- the parts -----------------------------------------------------------------------

    def wait_for_workers(self, count: int) -> bool:
        """Wait for ``count`` workers; ``False`` if one has ended, or it takes too long."""
        give_up = clock.now() + LONGEST
        while sum(event.kind == "ready" for event in self.events) < count:
            if self.stage.dead() or clock.now() > give_up:
                return False
            pause(TICK)
            self.events += self.stage.journal.new()
            ready = sum(event.kind == "ready" for event in self.events)
            self._show_progress(f"{ready} of {count} workers are ready")
        return True

    def play(self) -> bool:
        """Run the whole stream with its faults; returns whether all messages are done."""
        stream = [o for o in self.orders.values() if o.fault != "kill the worker"]
        for index, order in enumerate(stream):
            self._later(index * PACE, partial(self._publish, order))
        give_up = clock.now() + LONGEST
        busy = clock.now()
        while clock.now() < busy + QUIET:
            if clock.now() > give_up or self.stage.dead():
                return False
            self._tick()
            waiting = self.broker.messages(self._unfinished())
            done = max(0, self.messages - self._unsent - waiting)
            self._show_progress(f"{done} of {self.messages} messages are done")
            if self._due or self._stopped or self._unsent or waiting:
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
        pause(TICK)
        news = self.stage.journal.new()
        self.events += news
        for event in news:
            self._react(event)
        now = clock.now()
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            item[1]()
        self.broker.restore_visible()

    def _unfinished(self) -> int:
        """How many messages were sent and are not done, or are running again."""
        self._open -= {event.run for event in self.events if event.kind == "done"}
        return max(len(self._open), sum(len(self._running(column)) for column in COLUMNS))

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._due.append((clock.now() + seconds, what))

    def _publish(self, order: Order) -> None:
        for column in COLUMNS:
            for _ in range(order.copies):
                self._send(column, order)

    def _send(self, column: str, order: Order) -> None:
        from .tasks import TASKS

        arguments = (order.number, order.work, order.tail)
        sent = TASKS[column].apply_async(arguments, queue=column)
        self._open.add(str(sent.id))
        self._unsent -= 1

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

    # -- faults ------------------------------------------------------------------------

    def _harm(self, order: Order, event: Event) -> None:
        if self._is_over(event):
            return
        what = (order.fault, event.kind)
        if what == ("kill", "start"):
            self._later(0.5, partial(self._kill, event))
        elif what == ("kill the worker", "start"):
            self._later(0.5, partial(self._freeze_worker, event))
        elif what == ("kill after the effect", "effect"):
            self._kill(event)
        elif what == ("stop", "start"):
            self._stop(event)
        elif what == ("outage", "start"):
            self._started_last.add(event.column)
            if len(self._started_last) == len(COLUMNS):
                self._later(0.5, self._take_locks_away)

    def _is_over(self, event: Event) -> bool:
        """Whether the body has ended; its process may be running another one."""
        return any(other.kind == "end" and other.run == event.run for other in self.events)

    def _kill(self, event: Event) -> None:
        if self._is_over(event):
            return
        # Recorded before the kill, so that the next run never starts before it.
        self._note("killed", event)
        os.kill(event.pid, signal.SIGKILL)
        self._tell(event, f"killed the child that ran order {event.order}")

    def _freeze_worker(self, event: Event) -> None:
        if self._is_over(event):
            return
        # Pause it first, so that the journal contains everything that its children have begun.
        self.stage.freeze(event.pid)
        self._later(2 * TICK, partial(self._kill_worker, event))

    def _kill_worker(self, event: Event) -> None:
        worker = os.getpgid(event.pid)
        beside = [run for run in self._running(event.column) if os.getpgid(run.pid) == worker]
        beside = [run for run in beside if run.run != event.run]
        self._note("worker_killed", event)
        for run in beside:
            self._note("killed_beside", run)
        name = self.stage.name_of(event.pid)
        self.stage.kill(event.pid)
        orders = f"order {event.order}"
        if beside:
            # The order of the fault first.
            *others, last = [str(run.order) for run in (event, *beside)]
            orders = f"orders {', '.join(others)} and {last}"
        self._tell(event, f"killed the whole worker that ran {orders}")
        if not self.redelivers:
            self._later(NOTICED, partial(self._resend, event, name))

    def _resend(self, event: Event, worker: str) -> None:
        count = self.broker.resend(worker)
        self._tell(event, f"sent all {count} messages again that the killed worker ever had")

    def _running(self, column: str) -> list[Event]:
        """The starts of the runs that have not ended."""
        over = ("end", "killed", "worker_killed", "killed_beside")
        ended = {event.run for event in self.events if event.kind in over}
        return [
            event
            for event in self.events
            if event.kind == "start" and event.column == column and event.run not in ended
        ]

    def _stop(self, event: Event) -> None:
        os.kill(event.pid, signal.SIGSTOP)
        self._note("stopped", event)
        self._stopped[event.column, event.order] = event
        self._tell(event, f"stopped the child that ran order {event.order}")
        order = self.orders[event.order]
        if order.again:
            self._later(NOTICED, partial(self._send, event.column, order))

    def _wake(self, event: Event) -> None:
        # Only after the other run has ended: no lock can keep a process that continues from running
        # at the same time as its successor, until it checks.
        self._note("woken", event)
        os.kill(event.pid, signal.SIGCONT)
        self._tell(event, f"let it continue: another run has charged order {event.order}")
        for order in self.orders.values():
            if order.fault == "kill the worker":
                self._send(event.column, order)

    def _take_locks_away(self) -> None:
        locks = self.stage.locks
        self.say(
            f"{locks.name}: {locks.how} for {PAUSE:g} s while all three tasks run a slow order"
        )
        with locks.away():
            pause(PAUSE)

    def _tell(self, event: Event, text: str) -> None:
        self.say(f"{TITLES[event.column]}: {text}")

    def _note(self, kind: Kind, event: Event) -> None:
        noted = Event(kind, event.column, event.order, event.run, event.pid, True, clock.now())
        self.stage.journal.write(noted)

    def _show_progress(self, text: str) -> None:
        if sys.stdout.isatty():
            _clear_line()
            print(f"{clock.now() - self.began:5.1f} s  {text}", end="", flush=True)
        elif clock.now() >= self._told + TELL:
            self._told = clock.now()
            self.say(text)


def _clear_line() -> None:
    if sys.stdout.isatty():
        print("\r\033[K", end="")


def run(kind: str = "redis", *, metrics: bool = False, page: Path | None = None) -> int:
    """The demonstration from beginning to end; its exit code.

    Args:
        metrics: Whether to count for Prometheus, too, and to compare that.
        page: Gets the table between its comments, if nothing failed.

    Raises:
        ServerNotFound: There is nothing of that kind to keep the locks.
    """
    with Stage(kind, metrics=metrics) as stage, contextlib.closing(Show(stage)) as show:
        print("\n".join(_introduction(stage)), end="\n\n")
        show.say(f"{stage.locks.ready}; starting workers")
        for column in COLUMNS:
            for number in range(1, WORKERS + 1):
                stage.start_worker([column], f"{column}{number}", children=CHILDREN)
        failures, tallies = _play(show)
        if metrics:
            compared = compare(show.events)
            print(f"{comparison(compared)}\n")
            failures += [f"the metrics differ: {line.what}" for line in compared if not line.agrees]
        logs = stage.logs() if failures else ""
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        print(logs, file=sys.stderr)
        return 1
    print(conclusion(tallies))
    if page is not None:
        page.write_text(with_table(page.read_text(), tallies))
    return 0


def _introduction(stage: Stage) -> Iterator[str]:
    """What will happen, and with which settings."""
    from .settings import CELERY_BROKER_TRANSPORT_OPTIONS, DLOCKS

    redelivers = stage.kind == "redis"
    stream = list(orders(redelivers=redelivers))
    ttl = DLOCKS["default"]["TTL"]
    slow = [order for order in stream if order.work == LONG]
    twice = sum(order.copies > 1 for order in stream)
    later = sum(order.later for order in stream)
    yield f"Three tasks charge the same {len(stream)} orders:"
    yield f"  {TITLES[COLUMNS[0]]:13}  an ordinary task with acks_late and reject_on_worker_lost"
    yield f"  {TITLES[COLUMNS[1]]:13}  LockedTask: one run per order at a time"
    yield f"  {TITLES[COLUMNS[2]]:13}  LockedTask that also records in the database what was done"
    yield ""
    yield "Settings, short so that a minute is enough:"
    yield f"  TTL of a lock       {ttl:g} s; renewed while its task runs"
    if redelivers:
        visible = CELERY_BROKER_TRANSPORT_OPTIONS["visibility_timeout"]
        yield f"  visibility timeout  {visible:g} s; then Redis delivers unfinished messages again"
    else:
        yield f"  locks               in {stage.locks.name}; neither Redis nor RabbitMQ is used"
        yield "  messages            in files; this broker forgets what a killed worker had"
    yield f"  task body           {SHORT:g} s; {len(slow)} orders take {LONG:g} s"
    yield f"  workers             {WORKERS} for each task, with {CHILDREN} children each"
    yield ""
    yield "What goes wrong, for each task:"
    yield f"  {twice} orders are sent twice at once"
    yield f"  {later} orders are sent again {LATER:g} s after their first run"
    for order in stream:
        if order.fault in FAULTS:
            yield f"  order {order.number:<2}  {FAULTS[order.fault]}"
        if order.again:
            yield f"            and sends it again {NOTICED:g} s later"
        elif order.fault == "kill the worker" and not redelivers:
            yield f"            and sends all that it ever had again {NOTICED:g} s later"
    (last,) = [order for order in stream if order.fault == "outage"]
    locks = stage.locks
    yield f"  order {last.number:<2}  {locks.name} {locks.how} for {PAUSE:g} s while it runs"


def _play(show: Show) -> tuple[list[str], dict[str, Tally]]:
    """Print progress and table; return what was not shown, and the tallies."""
    workers = WORKERS * len(COLUMNS)
    if not show.wait_for_workers(workers):
        return ["the workers did not start"], {}
    show.say(f"{workers} workers are ready; sending {len(show.orders)} orders to each of 3 tasks")
    settled = show.play()
    show.say(f"all {show.messages} messages are done" if settled else "gave up waiting")
    tallies = show.tallies()
    print(f"\n{table(tallies)}\n\n{legend(redelivers=show.redelivers)}\n")
    failures = verdict(tallies, kills=len(KILLS))
    if not settled:
        failures.append("some messages were not finished, or a worker ended by itself")
    return failures, tallies
