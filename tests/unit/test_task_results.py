"""Recorded results."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid

import pytest
from celery import Celery

from django_dlock.celery import results


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, "ü"]},
        dt.datetime(2024, 2, 29, 12, tzinfo=dt.timezone.utc),
        dt.date(2024, 2, 29),
        decimal.Decimal("1.10"),
        uuid.UUID(int=7),
        b"bytes",
    ],
)
def test_a_result_is_read_unchanged(value):
    assert results.decode(results.encode(value, task="t"), task="t") == value


def test_no_recorded_result_reads_as_none():
    assert results.decode("", task="t") is None


class Strange:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("result", [object(), Strange(), "x" * results.MAX_RESULT])
def test_the_warning_for_a_result_that_cannot_be_recorded_names_task_and_solution(result, caplog):
    assert results.encode(result, task="shop.charge") == ""
    assert "shop.charge" in caplog.text
    assert "store_result=False" in caplog.text


def test_results_of_celerys_own_are_recorded_as_its_backends_store_them():
    app = Celery(set_as_current=False)
    one = app.AsyncResult("one", parent=app.AsyncResult("parent"))
    assert results.decode(results.encode(one, task="t"), task="t") == [
        ["one", [["parent", None], None]],
        None,
    ]
    several = app.GroupResult("g", [one])
    assert results.decode(results.encode(several, task="t"), task="t") == [
        ["g", None],
        [[["one", [["parent", None], None]], None]],
    ]
