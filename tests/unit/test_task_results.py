"""Recorded results."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid

import pytest

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
def test_a_result_comes_back_as_it_was(value):
    assert results.decode(results.encode(value, task="t")) == value


def test_no_recorded_result_reads_as_none():
    assert results.decode("") is None


def test_a_result_that_json_cannot_hold_names_task_and_cure():
    with pytest.raises(TypeError, match=r"'shop\.charge'.*store_result=False"):
        results.encode(object(), task="shop.charge")


def test_a_result_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="store_result=False"):
        results.encode("x" * results.MAX_RESULT, task="t")
