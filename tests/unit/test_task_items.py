"""The items of ``map`` and ``starmap``, each under its lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, xmap, xstarmap
from celery.exceptions import Ignore, Reject

from django_dlock import Lock, locks
from django_dlock.exceptions import AcquireTimeout, DuplicateRun
from tests.support.deliveries import effects, held, in_memory, recorded, states, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def sent(app: Celery, made: Any, *orders: int, **options: Any) -> Any:
    """The finished result of ``starmap``."""
    items = [(order,) for order in orders]
    found = xstarmap(made.s(), items, app=app).apply_async(**options)
    work(app)
    return found


def test_each_item_holds_its_lock_while_it_runs_and_no_longer(app):
    def body(self, order):
        backend = locks["default"]
        return [lease.name for lease in backend.list()], self.current_run.lock.name

    made = task(app, body)
    for number, found in enumerate(sent(app, made, 1, 2).get(), 1):
        assert found == [[f"order:{number}"], f"order:{number}"]
    assert not Lock("order:1").locked()


def test_map_locks_like_starmap(app):
    def body(self, order):
        return self.current_run.lock.name

    made = task(app, body)
    found = xmap(made.s(), [1, 2], app=app).apply_async()
    work(app)
    assert found.get() == ["order:1", "order:2"]


def test_an_item_waits_for_another_holder_and_then_fails_its_chunk(app):
    made = task(app, lock_wait=0.01)
    with held("order:2"):
        found = sent(app, made, 1, 2, 3)
    assert isinstance(found.result, AcquireTimeout)
    assert effects() == 1
    assert waiting(app) is None


def test_g12_items_take_effect_once_and_return_their_results_again(app):
    made = recorded(app)
    assert sent(app, made, 1, 1, 2).get() == [1, 1, 2]
    assert sent(app, made, 2, 3).get() == [2, 3]
    assert (effects(), states()) == (3, ["succeeded"] * 3)


def test_g12_an_item_of_a_redelivered_message_is_no_duplicate(app):
    made = recorded(app, if_duplicate="fail")
    for _ in range(2):
        assert sent(app, made, 1, 2, task_id="chunk").get() == [1, 2]
    assert effects() == 2
    found = sent(app, made, 1, task_id="another")
    assert isinstance(found.result, DuplicateRun)


def test_a_retry_of_an_item_runs_at_once(app):
    tried: list[int] = []

    def body(self, order):
        tried.append(self.request.retries)
        if len(tried) == 1:
            raise self.retry(countdown=60)
        return order

    assert sent(app, recorded(app, body), 1).get() == [1]
    assert tried == [0, 1]


def test_an_ignored_item_has_no_result_and_a_rejected_one_rejects_its_chunk(app):
    def ignored(self, order):
        raise Ignore

    def rejected(self, order):
        raise Reject("no", requeue=False)

    assert sent(app, task(app, ignored), 1).get() == [None]
    assert sent(app, task(app, rejected), 1).state not in ("SUCCESS", "FAILURE")


def test_a_call_in_the_body_of_an_item_takes_no_lock(app):
    def called(self, order):
        return Lock(f"order:{order}").locked()

    def calls(self, order):
        return inner(order + 1)

    inner = task(app, called)
    assert sent(app, task(app, calls), 1).get() == [False]
