"""Compares the metrics of a run, read over HTTP as Prometheus does, with what was counted."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from django_dlock import clock

from .journal import Event
from .report import LOCKED, RECORD, TITLES

GROUPS = {LOCKED: "locked", RECORD: "order"}
"""The group of names of each column's locks: what is before the colon of ``lock_key``."""
PATIENCE = 10.0
"""Seconds until the events of the last lock have been counted and written."""
KILLED = frozenset({"killed", "worker_killed", "killed_beside"})


class Comparison(NamedTuple):
    """One line: a number from the metrics, and the same from elsewhere.

    Attributes:
        at_least: The metrics may also be higher.
    """

    column: str
    what: str
    metrics: int
    counted: int
    where: str
    at_least: bool = False

    @property
    def agrees(self) -> bool:
        return self.metrics == self.counted or (self.at_least and self.metrics > self.counted)


class Samples:
    """What one scrape answered."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> int:
        return round(
            sum(
                sample.value
                for sample in self._samples
                if sample.name == f"django_dlock_{name}" and labels.items() <= sample.labels.items()
            )
        )


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def _site() -> Iterator[str]:
    """The site in a thread of this process; yields the address of its metrics."""
    from django.core.wsgi import get_wsgi_application

    with make_server("127.0.0.1", 0, get_wsgi_application(), handler_class=_Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def compare(events: Sequence[Event]) -> list[Comparison]:
    """Read the metrics until they agree with the other numbers, for ten seconds at the most.

    Args:
        events: The journal of the run.
    """
    give_up = clock.now() + PATIENCE
    with _site() as address:
        while True:
            with urllib.request.urlopen(address, timeout=10) as answer:
                samples = Samples(answer.read().decode())
            found = [line for column in GROUPS for line in _lines(column, samples, events)]
            if all(line.agrees for line in found) or clock.now() > give_up:
                return found
            time.sleep(0.2)


def _lines(column: str, samples: Samples, events: Sequence[Event]) -> Iterator[Comparison]:
    from django_dlock.models import LockEvent

    group = GROUPS[column]
    rows = LockEvent.objects.filter(name__startswith=f"{group}:")
    mine = [event.kind for event in events if event.column == column]
    bodies = mine.count("start")
    acquired = samples.total("acquire_attempts_total", group=group, outcome="acquired")
    # A delivery that finds the order recorded has the lock, too, but runs no body.
    yield Comparison(column, "locks acquired", acquired, bodies, "bodies run", column == RECORD)
    unended = acquired - samples.total("hold_duration_seconds_count", group=group)
    killed = sum(kind in KILLED for kind in mine)
    yield Comparison(column, "locks without an end", unended, killed, "bodies killed")
    lost = rows.filter(event__in=[LockEvent.Event.LOST, LockEvent.Event.MAX_HOLD]).count()
    losses = samples.total("losses_total", group=group)
    yield Comparison(column, "locks lost", losses, lost, "lock events")
    taken = rows.filter(event=LockEvent.Event.TAKEN_OVER).count()
    breaks = samples.total("breaks_total", group=group, reason="holder_dead")
    yield Comparison(column, "locks of dead holders", breaks, taken, "lock events")


def table(found: Sequence[Comparison]) -> str:
    """The comparison as text."""
    lines = [f"{'read over HTTP from /metrics':44}{'metrics':>8}{'counted':>9}  from"]
    for line in found:
        sign = "≥" if line.at_least and line.metrics > line.counted else " "
        text = f"{TITLES[line.column]}: {line.what}"
        mark = "" if line.agrees else "  DIFFERS"
        lines.append(f"{text:44}{line.metrics:>8}{sign}{line.counted:>8}  {line.where}{mark}")
    return "\n".join(lines)
