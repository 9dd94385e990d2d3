"""Which hooks and signals of Celery run for each kind of delivery: the table in the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals
from celery.exceptions import Ignore, Reject

from django_dlock import LockedTask
from tests.support.deliveries import held, in_memory, recorded, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/tasks.md"


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


seen: list[str] = []


class Noting(LockedTask):
    """Notes each hook that Celery calls."""

    abstract = True

    def before_start(self, *args: Any) -> None:
        seen.append("before_start")

    def on_success(self, *args: Any) -> None:
        seen.append("on_success")

    def on_failure(self, *args: Any) -> None:
        seen.append("on_failure")

    def on_retry(self, *args: Any) -> None:
        seen.append("on_retry")

    def after_return(self, *args: Any) -> None:
        seen.append("after_return")


SIGNALS = {
    "task_success": "on_success",
    "task_failure": "on_failure",
    "task_retry": "on_retry",
}


@contextmanager
def noted(name: str) -> Iterator[None]:
    """Notes a signal of Celery."""
    signal = getattr(signals, name)

    def receive(sender: Any = None, **_: Any) -> None:
        if isinstance(sender, Noting):
            seen.append(name)

    signal.connect(receive, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receive)


def delivered(app: Celery, **options: Any) -> list[str]:
    """What was noted during the next delivery; the signal of an end goes with its hook."""
    with ExitStack() as stack:
        for name in ("task_prerun", "task_postrun", *SIGNALS):
            stack.enter_context(noted(name))
        seen.clear()
        work(app, **options)
    for name, hook in SIGNALS.items():
        assert seen.count(name) == seen.count(hook)
    return [each for each in seen if each not in SIGNALS]


def made(app: Celery, end: Callable[[Any], Any] = lambda task: None, **options: Any) -> Any:
    def body(self: Any, order: int) -> Any:
        seen.append("body")
        return end(self)

    return recorded(app, body, base=Noting, **options)


def raises(error: Exception) -> Callable[[Any], Any]:
    def end(task: Any) -> None:
        raise error

    return end


def sent(app: Celery, *args: Any, **options: Any) -> list[str]:
    made(app, *args, **options).delay(1)
    return delivered(app)


def contended(app: Celery, **options: Any) -> list[str]:
    with held("order:1"):
        return sent(app, **options)


def second(app: Celery, **options: Any) -> list[str]:
    task = made(app, **options)
    task.delay(1)
    work(app)
    task.delay(1)
    return delivered(app)


def copy_of_a_failure(app: Celery) -> list[str]:
    task = made(app, raises(ValueError("no")))
    first = task.delay(1)
    work(app)
    task.apply_async((1,), task_id=first.id)
    return delivered(app, redelivered=True)


ROWS: dict[str, Callable[[Celery], list[str]]] = {
    "the body returns": sent,
    "the body raises, and no retry is left": lambda app: sent(app, raises(ValueError("no"))),
    "the body calls `retry()`": lambda app: sent(app, lambda task: task.retry(countdown=9)),
    "the body raises `Ignore`, or calls `replace()`": lambda app: sent(app, raises(Ignore())),
    "the body raises `Reject`": lambda app: sent(app, raises(Reject("no"))),
    "the message is requeued, because of contention or an outage": contended,
    'the lock is held, and `if_contended="skip"`': lambda app: contended(app, if_contended="skip"),
    'the lock is held, and `if_contended="fail"`': lambda app: contended(app, if_contended="fail"),
    "the work is done already (a duplicate, or a redelivery)": second,
    'the same, and `if_duplicate="fail"`': lambda app: second(app, if_duplicate="fail"),
    "a copy of a message whose run failed for good": copy_of_a_failure,
}


def table() -> dict[str, list[str]]:
    """The rows of the table in the page, by their first column."""
    section = PAGE.read_text().partition("### When hooks run")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_page_has_the_rows_of_this_test():
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("kind", ROWS)
def test_each_hook_runs_when_the_page_says_so(app, kind):
    found = ROWS[kind](app)
    runs, hooks = table()[kind]
    body = ["before_start", "body"] if runs == "run" else []
    assert found == ["task_prerun", *body, *re.findall(r"\w+", hooks), "task_postrun"]
    waiting(app)
