"""The cost of its lock for a task on a real worker, beside a plain task with the same settings."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..bench import Bench
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject, Unavailable
from ..peers import no_postgres

if TYPE_CHECKING:
    from ..celery_worker import SharedWorker

PLAIN = "plain Celery"

SUBJECTS: tuple[tuple[str, Role, str, str], ...] = (
    (PLAIN, "floor", "plain", "acks_late and reject_on_worker_lost, as all of them; no results"),
    (OURS, "ours", "locked", 'LockedTask, lock_key="order:{order}"; renewed by the watchdog'),
    (
        f"{OURS}, with record",
        "ours",
        "recorded",
        "the same with an idempotency_key: three more transactions in SQLite (WAL)",
    ),
    ("celery-once", "peer", "once", "locks when it is published, for an hour; not renewed"),
    ("celery-singleton", "peer", "singleton", "locks when it is published, lock_expiry=3600"),
)
"""Name, role, task and options of each."""

PACKAGES = {"once": "celery_once", "singleton": "celery_singleton"}

METRICS = (
    Metric("run", "s", floor=PLAIN),
    Metric("publish", "s", floor=PLAIN),
    # A lock acquired when the message is published costs nothing in the worker.
    Metric("total", "s", floor=PLAIN),
    # Of publisher, worker and Redis.
    Metric("cpu", "s", floor=PLAIN),
    Metric("at_server"),
    # Of ``delay()``, beyond that of the plain task.
    Metric("publish_commands"),
)


class _Task(Session):
    def __init__(self, worker: SharedWorker, task: str, messages: int) -> None:
        self._worker, self._task, self._messages = worker, task, messages

    def once(self) -> Readings:
        extra = self._worker.commands(self._task) - self._worker.commands("plain")
        return {"publish_commands": extra}

    def round(self) -> Readings:
        batch = self._worker.batch(self._task, self._messages)
        return {**dataclasses.asdict(batch), "total": batch.publish + batch.run}


def rows(bench: Bench) -> Iterable[Row]:
    # Twice as many as elsewhere, because parent, child and broker share the processors.
    body = "A task without a body on a worker"
    yield row(bench, "task", f"{body}: one process (prefork)", SUBJECTS, rounds=30)
    title = f"{body}: in the worker itself (solo)"
    yield row(bench, "task.solo", title, SUBJECTS, rounds=3, pool="solo")
    title = f"{body}: four threads"
    yield row(bench, "task.threads", title, SUBJECTS, rounds=3, pool="threads", concurrency=4)


def row(
    bench: Bench,
    name: str,
    title: str,
    subjects: Sequence[tuple[str, Role, str, str]],
    *,
    rounds: int,
    pool: str = "prefork",
    concurrency: int = 1,
) -> Row:
    workers: list[SharedWorker] = []

    def worker() -> SharedWorker:
        # Not before the row runs, because the import sets up Django and Celery.
        if not workers:
            from ..celery_worker import SharedWorker

            workers.append(SharedWorker(pool, concurrency, bench.server_spent))
        return workers[0]

    def subject(subject: str, role: Role, task: str, options: str) -> Subject:
        # A record is written three times: fewer of them take as long as the others' batch.
        messages = bench.size(40 if "recorded" in task else 200, 20)

        @contextmanager
        def ready() -> Iterator[Session]:
            package = PACKAGES.get(task)
            if task.startswith("writing") and not bench.postgres_url:
                raise Unavailable(no_postgres())
            if package and importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed")
            with worker().joined():
                yield _Task(worker(), task, messages)

        return Subject(subject, role, options, ready)

    return Row(
        name,
        title,
        METRICS,
        tuple(subject(*facts) for facts in subjects),
        rounds=rounds,
        seconds=max(10.0, 1.6 * rounds),
    )
