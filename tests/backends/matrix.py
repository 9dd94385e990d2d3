"""``python -m tests.backends.matrix``: which guarantee is tested on which backend, as a table.

Runs the tests of the backends whose names begin with a guarantee (``test_g1_…``), counts those that
passed on each backend, and writes ``contributing/backend-matrix.md``. A failed test makes the
command fail, and writes nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from django_dlock.backends.etcd import EtcdBackend
from django_dlock.backends.redlock import RedlockBackend
from django_dlock.backends.zookeeper import ZooKeeperBackend

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "contributing" / "backend-matrix.md"

BACKENDS = (
    "local",
    "SQLite",
    "PostgreSQL",
    "MariaDB",
    "Redis",
    "Redis Sentinel",
    "Redis Cluster",
    "Redlock",
    "ZooKeeper",
    "etcd",
    "fail-over",
)
GUARANTEES = tuple(f"G{number}" for number in range(1, 12))
FEATURES = ("min_hold", "parking", "reservations", "memory_of_ends", "wakeup", "listing")
OTHER_FEATURES = ("breaking", "proof of death")
CAPABILITIES: dict[str, Collection[str]] = {
    "Redlock": RedlockBackend.capabilities,
    "ZooKeeper": ZooKeeperBackend.capabilities,
    "etcd": EtcdBackend.capabilities,
}
"""The capabilities of the backends that do not have all of them."""
WORDS = {
    "min_hold": ("min_hold",),
    "parking": ("passes_to_a_request_that_names", "names_an_owner"),
    "reservations": ("reservation", "kind_of_a_lease"),
    "memory_of_ends": ("tells_an_expired_and_a_broken", "late_acquire"),
    "wakeup": ("woken", "wake_up"),
    "listing": ("listed", "list_", "page", "listing"),
    "breaking": ("break", "broken"),
    "proof of death": ("dead", "death"),
}
"""Feature → parts of the names of its tests."""

REASONS = {
    ("local", "G6"): "yes: the same watchdog as with Redis, and no server that could hang",
    ("local", "G10"): "yes: no call leaves the process",
    ("local", "G2"): "yes: the watchdog's own tests use this backend",
    ("Redis Sentinel", ""): "yes: the same code as Redis, where it is tested",
    ("Redis Cluster", ""): "yes: the same code as Redis, where it is tested",
    ("SQLite", "G10"): "yes: a file on the same machine, which no network can cut off",
    ("fail-over", "G10"): "yes: its calls are those of its stores",
    ("", "G11"): (
        "no: `replicas` is an option of the Redis backend. Redlock, ZooKeeper and etcd need a "
        "majority for every grant"
    ),
    ("", "G6"): "yes: the same watchdog as with Redis, where it is tested",
    ("", "G9"): "yes: the contract suite measures each lease from before its request",
    ("", ""): "unknown: no test of its own",
}
"""Why a cell is empty; an empty string stands for all backends, or for all rows."""

CLUES: tuple[tuple[str, str], ...] = (
    ("failover_switch", "fail-over"),
    ("test_failover", "fail-over"),
    ("redis_cluster", "Redis Cluster"),
    ("redis_sentinel", "Redis Sentinel"),
    ("redlock", "Redlock"),
    ("zookeeper", "ZooKeeper"),
    ("etcd", "etcd"),
    ("test_local", "local"),
    ("test_redis", "Redis"),
    ("tests/faults/", "Redis"),
)
DATABASES = {
    "sqlite": "SQLite",
    "memory": "SQLite",
    "project_file": "SQLite",
    "lease_file": "SQLite",
    "mariadb": "MariaDB",
    "postgres": "PostgreSQL",
    "pooled": "PostgreSQL",
}


def backend_of(nodeid: str, fixtures: Iterable[str]) -> str | None:
    """The backend that a test is about."""
    if "test_database" in nodeid:
        parameters = nodeid.partition("[")[2]
        for clue, backend in DATABASES.items():
            if clue in parameters:
                return backend
        where = f"{nodeid} {' '.join(fixtures)}"
        return next((backend for clue, backend in DATABASES.items() if clue in where), None)
    if "test_redis_failover" in nodeid:
        return "Redis Sentinel" if "sentinel" in nodeid.partition("[")[2] else "Redis Cluster"
    return next((backend for clue, backend in CLUES if clue in nodeid), None)


def rows_of(nodeid: str) -> list[str]:
    """The guarantees and features that a test is about."""
    name = nodeid.rpartition("::")[2].partition("[")[0]
    leading = re.match(r"test_((?:g\d+_)*)", name)
    found = [f"G{number}" for number in re.findall(r"g(\d+)_", leading[1] if leading else "")]
    features = [row for row, words in WORDS.items() if any(word in name for word in words)]
    return [*found, *features]


class Recorder:
    """A plugin that counts results by backend and row."""

    def __init__(self) -> None:
        self.passed: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        backend = backend_of(report.nodeid, dict(report.user_properties).get("fixtures", ()))
        if backend is None:
            return
        if report.when == "call" and report.passed:
            self.passed[backend].update(rows_of(report.nodeid))


@pytest.hookimpl
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On each worker: the fixtures travel with the report."""
    for item in items:
        item.user_properties.append(("fixtures", list(getattr(item, "fixturenames", ()))))


def page(recorder: Recorder) -> str:
    """The page of the documentation."""
    notes: list[str] = []

    def cell(backend: str, row: str) -> str:
        count = recorder.passed[backend][row]
        if row in FEATURES and row not in CAPABILITIES.get(backend, FEATURES):
            return "no"
        if count:
            return str(count)
        keys = ((backend, row), (backend, ""), ("", row), ("", ""))
        reason = next(REASONS[key] for key in keys if key in REASONS)
        if reason not in notes:
            notes.append(reason)
        return f"– {chr(ord('a') + notes.index(reason))}"

    def table(rows: Iterable[str], titled: Callable[[str], str]) -> str:
        lines = [f"| | {' | '.join(BACKENDS)} |", f"| --- |{' ---: |' * len(BACKENDS)}"]
        lines += [
            f"| {titled(row)} | {' | '.join(cell(backend, row) for backend in BACKENDS)} |"
            for row in rows
        ]
        return "\n".join(lines)

    guarantees = table(GUARANTEES, lambda row: row)
    features = table((*FEATURES, *OTHER_FEATURES), lambda row: f"`{row}`" if "_" in row else row)
    explained = "\n".join(
        f"* {chr(ord('a') + number)}: {note}." for number, note in enumerate(notes)
    )
    return f"""# What was tested on which backend

This page is written by `make backend-matrix`, which runs the tests and counts those that passed.
The tests use real servers, which they kill, pause and restart, and whose connections they cut.

## Guarantees

The numbers count the tests whose names begin with the [guarantee](../docs/reference/guarantees.md).
A `–` means that no test of this backend has that number.
The note says whether the guarantee holds ("yes") or not ("no"), and why.
G12 to G15 are about tasks and transactions, and are the same for all backends.

{guarantees}

## Features

`no` means that the backend does not have the capability, and refuses the options that need it.
See [Backends](../docs/reference/backends.md#what-a-backend-is-capable-of).

{features}

{explained}
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.backends.matrix", description=__doc__)
    parser.add_argument("--jobs", default="4", help="processes that run tests")
    options = parser.parse_args(arguments)
    recorder = Recorder()
    words = " or ".join(["test_g", *(word for words in WORDS.values() for word in words)])
    args = ["-q", "-n", options.jobs, "--dist", "loadscope", "-p", "tests.backends.matrix"]
    args += ["-p", "no:cacheprovider", "-k", words, "tests/backends", "tests/faults"]
    code: Any = pytest.main(args, plugins=[recorder])
    if code or recorder.failed:
        print("Tests failed; the page was not written.", *recorder.failed, sep="\n")
        return 1
    PAGE.write_text(page(recorder))
    print(f"Written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
