"""Redlock, ZooKeeper, etcd and fail-over: the same measurements as for Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import catalogue
from ..keepers import NODE_SCRIPTS
from ..model import OURS, Row, Session, Subject
from ..peers import ETCD, FAILOVER, REDLOCK, TOKEN, ZOOKEEPER
from ..store_peers import (
    BARE_ETCD,
    BARE_NODES,
    BARE_ZOOKEEPER,
    ETCD3GW,
    ETCD_LOCK,
    KAZOO,
    POTTERY_NODES,
    REDLOCK_PY,
    WATCHED_KEY,
    WATCHED_NODE,
)
from . import cycle, handover, renewal

if TYPE_CHECKING:
    from ..bench import Bench

PRIMARY = "its primary alone"
MANY = renewal.Many(1_000, 6.0, 2)

TITLES = {REDLOCK: "Redlock", ZOOKEEPER: "ZooKeeper", ETCD: "etcd", FAILOVER: "fail-over"}
CYCLES = {
    REDLOCK: (BARE_NODES, OURS, POTTERY_NODES, REDLOCK_PY),
    ZOOKEEPER: (BARE_ZOOKEEPER, OURS, KAZOO),
    ETCD: (BARE_ETCD, OURS, ETCD_LOCK, ETCD3GW),
    FAILOVER: (PRIMARY, OURS),
}
HANDOVERS = {
    REDLOCK: (TOKEN, OURS, POTTERY_NODES),
    ZOOKEEPER: (WATCHED_NODE, OURS, KAZOO),
    ETCD: (WATCHED_KEY, OURS, ETCD_LOCK),
    FAILOVER: (PRIMARY, OURS),
}
RENEWALS = {REDLOCK: (NODE_SCRIPTS, OURS), ZOOKEEPER: (OURS,), ETCD: (OURS,)}
"""By store; the first is the floor, if there is one."""


def rows(bench: Bench) -> Iterator[Row]:
    for store, names in CYCLES.items():
        for kind in cycle.NAMES if store == ZOOKEEPER else ("same",):
            yield _cycle(bench, store, names, kind)
        yield _handover(bench, store, HANDOVERS[store])
        if store in RENEWALS:
            yield _renewal(bench, store, RENEWALS[store])


def _cycle(bench: Bench, store: str, names: tuple[str, ...], kind: str) -> Row:
    ways = {
        name: cycle.Way(OURS, fresh=kind == "fresh")
        if name == PRIMARY
        else cycle.Way(name, fresh=kind == "fresh", store=store)
        for name in names
    }
    title = f"{TITLES[store]}: {cycle.NAMES[kind]}"
    row = cycle.row(bench, f"stores.{store}.cycle.{kind}", title, ways, names[0])
    return _started(bench, store, replace(row, seconds=8))


def _handover(bench: Bench, store: str, names: tuple[str, ...]) -> Row:
    subjects = [
        replace(_handing(bench, OURS, "redis"), name=PRIMARY, role="floor")
        if name == PRIMARY
        else _handing(bench, name, store)
        for name in names
    ]
    metrics = (handover.LATENCY, handover.CPU, handover.ROUND_TRIPS, handover.AT_SERVER)
    row = Row(
        f"stores.{store}.handover",
        f"{TITLES[store]}: release() in one process to acquire() in another, which has slept for "
        "50 to 250 ms",
        tuple(replace(one, floor=one.floor and names[0]) for one in metrics),
        tuple(subjects),
        rounds=10,
        passes=bench.size(4),
        seconds=12,
    )
    return _started(bench, store, row)


def _handing(bench: Bench, name: str, store: str) -> Subject:
    # The floor of Redlock is a token on one Redis.
    store = "redis" if name == TOKEN else store
    return handover.subject(bench, catalogue.kind(name), slept=True, store=store)


def _renewal(bench: Bench, store: str, names: tuple[str, ...]) -> Row:
    floor = NODE_SCRIPTS if NODE_SCRIPTS in names else None
    row = Row(
        f"stores.{store}.renewal",
        f"{TITLES[store]}: {MANY.count} renewed leases in one process, per interval",
        tuple(
            replace(metric, floor=metric.floor and floor)
            for metric in renewal.METRICS
            if metric.name != "connections"
        ),
        tuple(renewal.subject(bench, name, MANY, store) for name in names),
        rounds=1,
        seconds=30,
    )
    return _started(bench, store, row)


def _started(bench: Bench, store: str, row: Row) -> Row:
    """The same, with the store's servers."""
    return replace(row, subjects=tuple(_when_started(bench, store, it) for it in row.subjects))


def _when_started(bench: Bench, store: str, subject: Subject) -> Subject:
    @contextmanager
    def open_() -> Iterator[Session]:
        bench.stores.start(store)
        with subject.open() as session:
            yield session

    return replace(subject, open=open_)
