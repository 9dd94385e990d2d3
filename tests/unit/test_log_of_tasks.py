"""What the log lines of deliveries carry."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from celery import Celery

from django_dlock.log import FIELDS
from tests.support.deliveries import held, in_memory, recorded, task, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def told(caplog, words):
    """The fields of the lines with these words."""
    return [
        {field: getattr(record, field) for field in FIELDS}
        for record in caplog.records
        if words in record.getMessage()
    ]


def test_a_contended_task_tells_task_and_lock(app, caplog):
    caplog.set_level(logging.INFO, "django_dlock")
    made = task(app)
    with held("order:1"):
        sent = made.delay(1)
        work(app)
    lines = told(caplog, "is held by someone else")
    # That of the lock, and that of the task, which is requeued.
    assert len(lines) == 2
    for line in lines:
        assert (line["lock_name"], line["lock_alias"]) == ("order:1", "default")
        assert (line["task_id"], line["reason"]) == (sent.id, "contended")


def test_a_duplicate_tells_task_and_lock(app, caplog):
    caplog.set_level(logging.INFO, "django_dlock")
    made = recorded(app)
    made.delay(1)
    work(app)
    again = made.delay(1)
    work(app)
    (line,) = told(caplog, "is a duplicate of a run that succeeded")
    assert (line["lock_name"], line["lock_alias"]) == ("order:1", "default")
    assert line["task_id"] == again.id
    assert line["lock_owner"]
    assert line["lock_token"]


def test_a_result_that_cannot_be_recorded_tells_the_task(app, caplog):
    def body(self, order):
        return object()

    made = recorded(app, body, ignore_result=True)
    sent = made.delay(1)
    work(app)
    (line,) = told(caplog, "the result is not recorded")
    assert line["task_id"] == sent.id
