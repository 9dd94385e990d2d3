"""Where a requeued message goes, and that it stays the same message."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.app.task import Context
from celery.app.trace import trace_task
from celery.worker.request import Request
from kombu import Connection, Consumer, Exchange, Queue, serialization
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    calculate_routing_key,
)

from django_dlock.celery.parent import LockedRequest
from django_dlock.celery.publishing import broker, destination
from tests.support.deliveries import held, in_memory, numbers, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def two_queues(app: Celery, kind: str) -> tuple[Exchange, list[str]]:
    """An exchange with two queues that both get messages with the key ``both``."""
    exchange = Exchange(f"news-{next(numbers)}", kind)
    names = [f"{exchange.name}.{name}" for name in ("a", "b")]
    app.conf.task_queues = [Queue(name, exchange, routing_key="both") for name in names]
    return exchange, names


def take(app: Celery, name: str):
    with app.connection_for_read() as connected:
        return app.amqp.queues[name](connected.default_channel).get(no_ack=True)


@pytest.mark.parametrize("kind", ["fanout", "topic", "direct"])
def test_g13_a_requeue_through_an_exchange_of_two_queues_makes_no_third_message(app, kind):
    exchange, names = two_queues(app, kind)
    made = task(app)
    with app.connection_for_write() as connection:
        for queue in app.amqp.queues.values():
            queue(connection.default_channel).declare()
    with held("order:1"):
        made.apply_async((1,), exchange=exchange.name, exchange_type=kind, routing_key="both")
        for _ in range(3):
            messages = [take(app, name) for name in names]
            assert all(messages)
            assert [take(app, name) for name in names] == [None, None]
            for name, message in zip(names, messages, strict=True):
                app.amqp.queues.select([name])
                Request(message, app=app, task=made, on_ack=lambda *_: None).execute()


def test_a_requeue_to_an_unknown_queue_is_refused_and_logged(app, caplog):
    two_queues(app, "direct")
    made = task(app)
    with held("order:1"):
        sent = made.delay(1)
        message = waiting(app)
        message.delivery_info["exchange"] = "of another application"
        Request(message, app=app, task=made, on_ack=lambda *_: None).execute()
    assert sent.state == "FAILURE"
    assert isinstance(sent.result, destination.CannotRequeue)
    assert "'of another application'" in caplog.text


class Receiver:
    """What a worker's parent knows of its consumer."""

    def __init__(self, connection: Connection, *queues: str) -> None:
        self.connection, channel = connection, connection.default_channel
        self.task_consumer = Consumer(channel, [Queue(name, no_declare=True) for name in queues])


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
@pytest.mark.parametrize("others", [(), ("a-other", "z-other")])
def test_g13_a_message_of_an_exchange_that_no_setting_names_goes_back(
    app, monkeypatch, kind, others
):
    name, made = f"foreign-{next(numbers)}", task(app)
    key = "orders.#" if kind == "topic" else "orders.new"
    with app.connection_for_write() as connection:
        queue = Queue(name, Exchange(name, kind), routing_key=key)(connection.default_channel)
        queue.declare()
        receiver = Receiver(connection, name, *others)
        monkeypatch.setattr(destination, "consumer", lambda: receiver)
        made.apply_async((1,), exchange=name, exchange_type=kind, routing_key="orders.new")
        message = queue.get(no_ack=True)
        with held("order:1"):
            request = LockedRequest(message, app=app, task=made)
            # As the child of a pool does.
            args, kwargs, _ = message.payload
            trace_task(made, request.id, args, kwargs, request.request_dict, app=app)
        again = queue.get(no_ack=True)
    assert again.headers["id"] == request.id
    assert again.delivery_info["exchange"] == ""


@pytest.mark.parametrize("queue", ["plain", "with.dots", "with:colons%and.more"])
def test_the_queue_is_known_by_the_key_under_which_rabbitmq_delayed_a_message(app, queue):
    key = calculate_routing_key(5, f"dlock:{destination._quoted(queue)}")
    info = {"exchange": CELERY_DELAYED_DELIVERY_EXCHANGE, "routing_key": key}
    with app.connection_for_write() as connection:
        found = destination._queue_of(app, info, connection)
    assert found == queue
    # A single word, so that no other queue's key ends with it.
    assert key.count(".") == 28


@pytest.fixture
def odd() -> Iterator[str]:
    """A serializer other than that of the tasks."""
    serialization.register("odd", json.dumps, json.loads, "application/x-odd", "utf-8")
    serialization.enable_insecure_serializers(["odd"])
    yield "odd"
    serialization.unregister("odd")


def test_a_requeue_keeps_serializer_and_compression(app, odd):
    """Another serializer may not know its types; without compression it may be too long."""
    app.conf.accept_content = ["json", odd]
    made = task(app)
    with held("order:1"):
        made.apply_async((1,), compression="zlib", serializer=odd, root_id="r")
        before = waiting(app)
        request = LockedRequest(before, app=app, task=made)
        # As the child of a pool does.
        args, kwargs, _ = before.payload
        trace_task(made, request.id, args, kwargs, request.request_dict, app=app)
    after = waiting(app)
    assert after.content_type == before.content_type == "application/x-odd"
    assert after.headers["compression"] == before.headers["compression"] == "application/x-gzip"
    assert after.payload == before.payload


def test_a_requeue_keeps_the_properties_of_the_message(app):
    kept = {
        "MessageGroupId": "customer-7",
        "message_id": "m-1",
        "app_id": "shop",
        "type": "charge",
        "timestamp": 1,
    }
    dropped = {"MessageDeduplicationId": "d-1", "user_id": "guest"}
    made = task(app)
    with held("order:1"):
        made.apply_async((1,), expiration=90, **kept, **dropped)
        before = work(app)
    after = waiting(app)
    assert {name: after.properties.get(name) for name in kept} == kept
    assert not dropped.keys() & after.properties.keys()
    assert after.properties["expiration"] == before.properties["expiration"] == "90000"


def test_a_retry_does_not_contain_the_parents_data_about_the_message(app):
    def body(self, order):
        raise self.retry(countdown=0)

    made = task(app, body)
    made.delay(1)
    message = waiting(app)
    request = LockedRequest(message, app=app, task=made, on_ack=lambda *_: None)
    assert request.request_dict["delivery_info"][destination.CONTENT_TYPE] == "application/json"
    request.execute()
    assert "dlock_" not in str(waiting(app).headers)
    assert destination.CONTENT_TYPE not in Context(request.request_dict).headers or {}


def test_without_a_count_of_deliveries_a_message_is_returned_at_once(app):
    assert broker.unacknowledged_for(app) == 0
