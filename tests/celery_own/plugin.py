"""A pytest plugin that makes each task a ``LockedTask`` and records the outcome of each test."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import django
import pytest
from celery import Celery, current_task

from .explained import APART

HOW = os.environ["CELERY_OWN"]
RESULTS = Path(os.environ["CELERY_OWN_RESULTS"])
RERUNS = int(os.environ["CELERY_OWN_RERUNS"])
"""Celery's tests have ``flaky(reruns=5)``; repeating one that hangs would take half an hour."""

PATIENCE = 3
"""How many times longer than their ``TIMEOUT`` tests wait for a result, on a busy machine."""


def _task_id(*args: object, **kwargs: object) -> str:
    """The key of a record per task id."""
    return str(current_task.request.id)


def pytest_configure() -> None:
    django.setup()
    if HOW == "plain":
        return
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    from django_dlock import LockedTask

    class Guarded(LockedTask):
        """The base class of every task that names none."""

        abstract = True
        idempotency_key = staticmethod(_task_id) if HOW == "record" else None

    # ``app.task`` and ``shared_task`` make subclasses of it.
    Celery.task_cls = Guarded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this part, and set how often a failed one is repeated."""
    part = os.environ["CELERY_OWN_PART"]
    if part == "apart":
        items[:] = sorted((item for item in items if _is_apart(item)), key=_place_apart)
    elif part:
        number, parts = map(int, part.split("/"))
        items[:] = [item for item in items if not _is_apart(item)][number - 1 :: parts]
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "TIMEOUT"):
            module.TIMEOUT *= PATIENCE
    for item in (item for item in items if isinstance(item, pytest.Function)):
        item.add_marker(pytest.mark.flaky(reruns=RERUNS), append=False)
        if "test_trace_log_arguments" in item.nodeid:
            # It needs an earlier test to have started the worker.
            item.fixturenames.insert(0, "celery_session_worker")


def _is_apart(item: pytest.Item) -> bool:
    return _place_apart(item) < len(APART)


def _place_apart(item: pytest.Item) -> int:
    """The number of the first pattern that the test matches; their count if it matches none."""
    return next(
        (at for at, found in enumerate(APART) if fnmatchcase(item.nodeid, found)), len(APART)
    )


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    failed = report.when != "call" and report.outcome == "failed"
    entry = {"test": report.nodeid, "outcome": "error" if failed else report.outcome}
    with RESULTS.open("a") as results:
        results.write(json.dumps({**entry, "seconds": round(report.duration, 1)}) + "\n")
