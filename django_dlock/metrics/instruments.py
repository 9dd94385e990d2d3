"""What is measured: one list for all exporters and for the documentation.

Names and units follow OpenTelemetry's conventions; Prometheus's names are made from them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram", "up_down"]
"""``gauge``: the last value of a process. ``up_down``: the sum over all processes."""

DURATIONS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0)
"""Upper bounds of the buckets of histograms, in seconds."""


class Instrument(NamedTuple):
    """One metric.

    Attributes:
        unit: As in UCUM: ``s``, or what is counted, in braces. Not ``1``: OpenTelemetry's collector
            and Prometheus take a gauge with that unit for a ratio, and change its name.
        labels: ``group`` is made from the lock's name; see ``groups``.
        values: All values of the last label, if they are counted from zero; see
            ``Recorder``.
        bounds: Of the buckets of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ("alias", "group")
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = DURATIONS


ATTEMPTS = Instrument(
    "django_dlock.acquire.attempts",
    "counter",
    "{attempt}",
    "Acquires that have ended, by outcome: acquired, contended or unavailable",
    ("alias", "group", "outcome"),
    ("acquired", "contended", "unavailable"),
)
CONTENTIONS = Instrument(
    "django_dlock.acquire.contentions", "counter", "{acquire}", "Acquires that found the lock held"
)
WAITING = Instrument(
    "django_dlock.waiting", "up_down", "{acquire}", "Acquires that found the lock held and wait now"
)
WAITS = Instrument(
    "django_dlock.wait.duration", "histogram", "s", "Time from an acquire to its grant"
)
HOLDS = Instrument(
    "django_dlock.hold.duration",
    "histogram",
    "s",
    "Time from a grant to its end: released, parked, unanswered or lost",
    ("alias", "group", "end"),
)
HELD = Instrument("django_dlock.held", "up_down", "{lock}", "Locks that are held now")
RENEWALS = Instrument(
    "django_dlock.renewals", "counter", "{renewal}", "Confirmed renewals", ("alias",)
)
LATENESS = Instrument(
    "django_dlock.renewal.lateness",
    "histogram",
    "s",
    "How late the renewal thread of a process turned to leases that were due",
    (),
    bounds=(0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 30.0, 120.0, 600.0),
)
DOUBTS = Instrument(
    "django_dlock.doubts", "counter", "{lock}", "Locks that were not confirmed for half their TTL"
)
LOSSES = Instrument(
    "django_dlock.losses",
    "counter",
    "{lock}",
    "Locks that ended while held, by reason",
    ("alias", "group", "reason"),
    (
        *("broken", "collected", "exit", "expired", "fork", "holder_ended", "interrupted"),
        *("max_hold", "refused", "unreachable"),
    ),
)
BREAKS = Instrument(
    "django_dlock.breaks",
    "counter",
    "{lock}",
    "Locks of other processes that were ended, by reason: operator, command, code or holder_dead",
    ("alias", "group", "reason"),
    ("operator", "command", "code", "holder_dead"),
)
REQUEUES = Instrument(
    "django_dlock.task.requeues",
    "counter",
    "{delivery}",
    "Deliveries of tasks that were requeued, by reason",
    ("task", "reason"),
)

EVENTS = (
    ATTEMPTS,
    CONTENTIONS,
    WAITING,
    WAITS,
    HOLDS,
    HELD,
    RENEWALS,
    LATENESS,
    DOUBTS,
    LOSSES,
    BREAKS,
    REQUEUES,
)
"""What a process counts itself."""

STORE_UP = Instrument(
    "django_dlock.store.up", "gauge", "{store}", "Whether the store of an alias answers", ("alias",)
)
STORE_LATENCY = Instrument(
    "django_dlock.store.latency", "gauge", "s", "How long it took to answer", ("alias",)
)
STORE_LEASES = Instrument(
    "django_dlock.store.leases", "gauge", "{lease}", "Leases in the store, of all kinds", ("alias",)
)
STORE_WAITING = Instrument(
    "django_dlock.store.waiting",
    "gauge",
    "{waiter}",
    "Threads and coroutines of all processes that wait; only up to 10000 leases",
    ("alias",),
)
STORE_HOLDERS = Instrument(
    "django_dlock.store.holders",
    "gauge",
    "{lease}",
    "Held leases by the state of their holder; only up to 10000 leases",
    ("alias", "state"),
)
STORE_EPOCH = Instrument(
    "django_dlock.store.epoch",
    "gauge",
    "{switch}",
    "With fail-over: rises by one with each switch to the other store",
    ("alias",),
)
RECORDS = Instrument(
    "django_dlock.records", "gauge", "{record}", "Idempotency records, by state", ("state",)
)
LEFT_OUT = Instrument(
    "django_dlock.scrape.left_out",
    "gauge",
    "{part}",
    "1 if this part of the metrics is left out because it did not answer, else 0",
    ("part", "alias"),
)

STORES = (
    STORE_UP,
    STORE_LATENCY,
    STORE_EPOCH,
    STORE_LEASES,
    STORE_WAITING,
    STORE_HOLDERS,
    RECORDS,
    LEFT_OUT,
)
"""What is asked for when metrics are read; the same in every process."""


def prometheus_name(instrument: Instrument) -> str:
    """The name that Prometheus and OpenTelemetry's exporters for it use."""
    name = instrument.name.replace(".", "_")
    if instrument.unit == "s":
        name += "_seconds"
    return f"{name}_total" if instrument.kind == "counter" else name
