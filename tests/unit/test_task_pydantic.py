"""Keys of tasks with ``pydantic=True``: they are made of the message, before there are models.

Without ``from __future__ import annotations``: Celery 5.5 makes no models where annotations are
text.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from pydantic import BaseModel

from django_dlock import locks
from tests.support.deliveries import in_memory, recorded, states, task, work

pytestmark = pytest.mark.django_db(transaction=True)

# Older versions leave it to the caller to make a dict of a model.
needs_dump = pytest.mark.skipif(
    not hasattr(Celery("it", set_as_current=False).Task, "_dump_pydantic_arguments"),
    reason="this Celery sends no models",
)


class Order(BaseModel):
    id: int
    note: str = ""


ORDER = Order(id=7)


@pytest.fixture
def app() -> Iterator[Celery]:
    seen.clear()
    with in_memory() as app:
        yield app


seen: list[tuple[Any, list[str]]] = []
"""What the body got, and the locks that were held."""


def body(self: Any, order: Order) -> int:
    seen.append((order, [lease.name for lease in locks["default"].list()]))
    return order.id


def made(app: Celery, lock_key: Any) -> Any:
    return task(app, body, pydantic=True, lock_key=lock_key)


def delivered(app: Celery, result: Any) -> Any:
    """What becomes of a task whose message waits: its result, or its error."""
    work(app)
    return result.result


KEYS = ["order:{order[id]}", lambda order: f"order:{order['id']}"]


@pytest.mark.parametrize("key", KEYS, ids=["template", "callable"])
def test_a_key_takes_the_fields_of_a_dict(app: Celery, key: Any) -> None:
    run, sent = made(app, key), ORDER.model_dump()
    assert delivered(app, run.delay(sent)) == 7
    assert delivered(app, run.apply_async(kwargs={"order": sent})) == 7
    assert run.apply((sent,)).result == 7
    assert seen == [(ORDER, ["order:7"])] * 3


@needs_dump
@pytest.mark.parametrize("eager", [False, True])
def test_a_model_that_celery_sends_is_a_dict_for_the_key(app: Celery, eager: bool) -> None:
    app.conf.task_always_eager = eager
    result = made(app, "order:{order[id]}").delay(ORDER)
    assert (result.result if eager else delivered(app, result)) == 7
    assert seen == [(ORDER, ["order:7"])]


@pytest.mark.parametrize("key", ["order:{order.id}", lambda order: f"order:{order.id}"])
def test_a_key_cannot_take_the_attributes_of_a_model(app: Celery, key: Any) -> None:
    error = delivered(app, made(app, key).delay(ORDER.model_dump()))
    assert "'dict' object has no attribute 'id'" in str(error)
    assert seen == []


def test_the_error_names_the_field_to_use(app: Celery) -> None:
    error = made(app, "order:{order.id}").apply((ORDER.model_dump(),)).result
    assert "a dict here: use {order[id]}" in str(error)


@pytest.mark.parametrize("key", ["order:{order[id]}", ["order"]])
def test_a_model_in_apply_is_a_model_for_the_key(app: Celery, key: Any) -> None:
    """``apply()`` sends no message, so nothing has made a dict of it."""
    assert made(app, key).apply((ORDER,)).state == "FAILURE"
    assert seen == []
    assert made(app, "order:{order.id}").apply((ORDER,)).result == 7


def test_digests_and_payloads_are_those_of_the_dict(app: Celery) -> None:
    """A default of the model, or a number as text, gives another digest."""
    run = recorded(app, body, pydantic=True, lock_key="orders", idempotency_key=["order"])
    sent = ({"id": 7}, {"id": 7, "note": ""}, {"id": "7"}, {"id": 7})
    assert [delivered(app, run.delay(order)) for order in sent] == [7] * 4
    assert [order for order, _ in seen] == [ORDER] * 3
    assert states() == ["succeeded"] * 3


def test_what_is_no_model_fails_in_the_body(app: Celery) -> None:
    error = delivered(app, made(app, "order:{order[id]}").delay({"id": "seven"}))
    assert "ValidationError" in str(error)
    assert seen == locks["default"].list() == []
