"""A body loses its lease while it publishes to a distant broker: nothing hangs, nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry
from celery.signals import after_task_publish

from django_dlock import LockedTask
from django_dlock.celery.delivery.interrupt import BodyRunner, LeaseAborted
from tests.support.proxy import Proxy

DISTANCE = 0.02
"""Seconds for which each reply of the broker is under way."""
PATIENCE = 30.0


@pytest.fixture(params=["redis", "rabbitmq"])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    if request.param == "redis":
        server = request.getfixturevalue("own_redis")
        proxy = Proxy("127.0.0.1", server.port)
    else:
        server = request.getfixturevalue("rabbit_server")
        proxy = Proxy("127.0.0.1", server.port, speaks="amqp")
    with proxy:
        proxy.delay = DISTANCE
        url = server.url.replace(str(server.port), str(proxy.port))
        made = Celery("interrupted", broker=url, set_as_current=False)
        made.conf.task_default_queue = f"interrupted-{request.param}"
        if request.param == "rabbitmq":
            made.conf.broker_transport_options = {"confirm_publish": True}
        yield made
        proxy.delay = 0.0
        with made.connection_for_write() as connected:
            made.amqp.queues[made.conf.task_default_queue](connected.default_channel).delete()
        made.close()


def body(self, order):
    return order


@pytest.fixture
def task(app: Celery) -> LockedTask:
    made: LockedTask = app.task(
        base=LockedTask, name="interrupted.t", bind=True, shared=False, lazy=False
    )(body)
    return made


def ended(run: Any) -> BaseException | None:
    """How the call ends, on a thread of its own, because it could hang."""
    ends: list[BaseException | None] = []

    def call() -> None:
        try:
            run()
        except BaseException as error:
            ends.append(error)
        else:
            ends.append(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert ends, "it hangs"
    return ends[0]


@pytest.mark.parametrize("swallows", [True, False])
def test_g13_a_loop_of_publishes_ends_and_leaves_whole_messages(
    app: Celery, task: LockedTask, swallows: bool
) -> None:
    runner, begun, published = BodyRunner(), [], []

    def count(sender: str, **_: Any) -> None:
        published.append(sender)

    def loop() -> None:
        while True:
            begun.append(1)
            if len(begun) == 3:
                threading.Timer(DISTANCE / 2, runner.interrupt, (None, "broken")).start()
            try:
                task.delay(1)
            except Exception:
                if not swallows or runner.interruptions >= 3:
                    raise

    after_task_publish.connect(count)
    try:
        task.delay(0)
        assert isinstance(ended(lambda: runner.run(loop)), LeaseAborted)
        # The channel is in no state of which the next publish knows nothing.
        assert ended(lambda: task.delay(2)) is None
    finally:
        after_task_publish.disconnect(count)
    # None was begun and given up; one may have been stopped before it began.
    assert len(begun) - runner.interruptions <= len(published) - 2 <= len(begun)
    with app.connection_for_read() as connected:
        queue = app.amqp.queues[app.conf.task_default_queue](connected.default_channel)
        found = 0
        while (message := queue.get(no_ack=True)) is not None:
            assert message.headers["task"] == task.name
            found += 1
    assert found == len(published)


def test_g13_a_retry_in_the_middle_of_a_loss_is_no_failure(app: Celery, task: LockedTask) -> None:
    task.delay(0)
    runner = BodyRunner()

    def run() -> None:
        task.push_request(args=(1,), kwargs={}, id="1", called_directly=False, retries=0)
        try:
            try:
                raise OSError("the reason for a retry")
            except OSError as error:
                threading.Timer(DISTANCE / 2, runner.interrupt, (None, "broken")).start()
                raise task.retry(exc=error, countdown=0) from error
        finally:
            task.pop_request()

    end = ended(lambda: runner.run(run))
    assert isinstance(end, Retry | LeaseAborted), end
