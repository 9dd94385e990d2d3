"""A message that its worker may not publish goes back to the broker later."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from amqp import AccessRefused
from celery import Celery
from celery.app.trace import trace_task
from celery.exceptions import Reject

from django_dlock.celery.parent import LockedRequest
from django_dlock.celery.publishing import destination, requeue
from django_dlock.celery.publishing.header import HEADER
from django_dlock.celery.publishing.refusal import GivenBack, is_refusal
from django_dlock.celery.worker import given_back
from tests.support.deliveries import held, in_memory, task, waiting

pytestmark = pytest.mark.django_db(transaction=True)

REFUSED = AccessRefused("ACCESS_REFUSED - access to exchange 'amq.default' refused")


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    given_back._headers.clear()


class Prefetch:
    value = 1

    def increment_eventually(self) -> None:
        self.value += 1

    def decrement_eventually(self) -> None:
        self.value -= 1


class Parent:
    """A consumer whose timer the test advances."""

    pool = connection = task_consumer = None

    def __init__(self) -> None:
        self.qos, self.timer, self.later = Prefetch(), self, []

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        function(*args)

    def call_after(self, seconds: float, function: Callable[[], Any]) -> None:
        self.later.append((seconds, function))


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Parent:
    made = Parent()
    monkeypatch.setattr(destination, "consumer", lambda: made)
    return made


def deliver(app: Celery, made: Any, message: Any) -> tuple[LockedRequest, list[bool]]:
    rejected: list[bool] = []
    request = LockedRequest(
        message,
        app=app,
        task=made,
        on_ack=lambda *_: None,
        on_reject=lambda logger, errors, requeue: rejected.append(requeue),
    )
    args, kwargs, _ = message.payload
    answer = trace_task(made, request.id, args, kwargs, request.request_dict, app=app)
    request.on_failure(answer.retval, return_ok=True)
    return request, rejected


def refuse(monkeypatch: pytest.MonkeyPatch, app: Celery) -> None:
    def send_task(*args: Any, **options: Any) -> None:
        raise REFUSED

    monkeypatch.setattr(app, "send_task", send_task)


def test_g13_a_refused_message_goes_back_after_its_back_off(app, parent, monkeypatch):
    made = task(app)
    made.delay(1)
    message = waiting(app)
    refuse(monkeypatch, app)
    with held("order:1"):
        _, rejected = deliver(app, made, message)
        assert rejected == []
        assert parent.qos.value == 2
        [(first, give_back)] = parent.later
        give_back()
        assert (rejected, parent.qos.value) == ([True], 1)
        # It comes again and again, and waits longer and longer.
        message.delivery_info["redelivered"] = True
        for _ in range(4):
            request, _ = deliver(app, made, message)
        assert parent.later[-1][0] > first
        assert given_back._headers[request.id]["count"] == 5
        assert given_back._headers[request.id]["since"] is not None


def test_g13_each_return_to_a_quorum_queue_counts_so_the_pauses_grow(app, parent, monkeypatch):
    """A quorum queue drops a message that came back too often, so that is put off."""
    monkeypatch.setattr(requeue, "unacknowledged_for", lambda app: 1800.0)
    made = task(app)
    made.apply_async((1,), headers={"x-delivery-count": 19})
    message = waiting(app)
    refuse(monkeypatch, app)
    monkeypatch.setattr(requeue._PublishAttempts, "wait", lambda self: False)
    with held("order:1"):
        deliver(app, made, message)
    assert parent.later[0][0] >= 450


def test_a_header_is_remembered_for_a_message_that_comes_again_only(app, parent):
    made = task(app)
    sent = made.delay(1)
    message = waiting(app)
    given_back._headers[sent.id] = {"count": 7}
    request = LockedRequest(message, app=app, task=made)
    assert HEADER not in request.request_dict
    message.delivery_info["redelivered"] = True
    request = LockedRequest(message, app=app, task=made)
    assert request.request_dict[HEADER] == {"count": 7}
    assert not given_back._headers


def test_only_so_many_headers_are_remembered(parent, monkeypatch):
    monkeypatch.setattr(given_back, "MOST", 2)
    for number in range(4):
        given = GivenBack("refused", True, 1.0, {"count": number})
        given_back.later(parent, str(number), given, lambda requeue: None)
    assert list(given_back._headers) == ["2", "3"]


def test_a_child_can_send_it_to_its_parent():
    made = pickle.loads(pickle.dumps(GivenBack("refused", True, 1.5, {"count": 1})))
    assert isinstance(made, Reject)
    assert (made.reason, made.requeue, made.delay, made.header) == (
        "refused",
        True,
        1.5,
        {"count": 1},
    )


def test_what_a_refusal_is():
    from redis.exceptions import NoPermissionError

    assert is_refusal(REFUSED)
    assert is_refusal(NoPermissionError("this user has no permissions"))
    assert not is_refusal(OSError("the broker is away"))
