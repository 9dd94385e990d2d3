"""What a task pays for its lock, on a real worker, beside a plain task with the same acks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..bench import Bench
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject, Unavailable

if TYPE_CHECKING:
    from ..celery_worker import Crew

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
    # A lock that is taken when the message is published costs nothing in the worker.
    Metric("total", "s", floor=PLAIN),
    # Of ``delay()``, beyond those of the plain task.
    Metric("publish_commands"),
)


class _Task(Session):
    def __init__(self, crew: Crew, task: str, messages: int) -> None:
        self._crew, self._task, self._messages = crew, task, messages

    def once(self) -> Readings:
        extra = self._crew.commands(self._task) - self._crew.commands("plain")
        return {"publish_commands": extra}

    def round(self) -> Readings:
        publish, run = self._crew.batch(self._task, self._messages)
        return {"run": run, "publish": publish, "total": publish + run}


def rows(bench: Bench) -> Iterable[Row]:
    # Twice as many as elsewhere: parent, child and broker share the processors, and it shows.
    yield _row(bench, "task", "one process (prefork)", "prefork", 1, rounds=30)
    yield _row(bench, "task.solo", "in the worker itself (solo)", "solo", 1, rounds=3)
    yield _row(bench, "task.threads", "four threads", "threads", 4, rounds=3)


def _row(bench: Bench, name: str, title: str, pool: str, concurrency: int, *, rounds: int) -> Row:
    crews: list[Crew] = []

    def crew() -> Crew:
        # Not before the row runs: the import sets Django and Celery up.
        if not crews:
            _migrate()
            from ..celery_worker import Crew

            crews.append(Crew(pool, concurrency))
        return crews[0]

    def subject(subject: str, role: Role, task: str, options: str) -> Subject:
        # A record is written three times: fewer of them take as long as the others' batch.
        messages = bench.size(40 if task == "recorded" else 200, 20)

        @contextmanager
        def ready() -> Iterator[Session]:
            package = PACKAGES.get(task)
            if package and importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed")
            with crew().joined():
                yield _Task(crew(), task, messages)

        return Subject(subject, role, options, ready)

    return Row(
        name,
        f"A task without a body on a worker: {title}",
        METRICS,
        tuple(subject(*facts) for facts in SUBJECTS),
        rounds=rounds,
        seconds=max(10.0, 1.6 * rounds),
    )


def _migrate() -> None:
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
