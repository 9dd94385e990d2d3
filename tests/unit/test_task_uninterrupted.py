"""A body is not interrupted inside a publish, but right after it."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from kombu import Producer
from kombu.transport import memory

from django_dlock import LockedTask
from django_dlock.celery.delivery import interrupt as interrupting
from django_dlock.celery.delivery import uninterrupted
from django_dlock.celery.delivery.interrupt import BodyRunner, LeaseAborted
from django_dlock.exceptions import LeaseLost

numbers = itertools.count()


@pytest.fixture
def app() -> Celery:
    made = Celery("publishing", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.task_default_queue = f"publishing-{next(numbers)}"
    return made


@pytest.fixture
def plain(app: Celery) -> Any:
    @app.task(name="plain", shared=False, lazy=False)
    def plain(number=0, *others):
        return number

    return plain


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupting, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(interrupting, "LONGEST_PAUSE", 0.001)


class Losing:
    """Loses the lease while a message is on its way to the broker."""

    def __init__(self, runner: BodyRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner, self.whole, self.fails = runner, 0, BaseException
        self._real, self._tried = memory.Channel._put, threading.Semaphore(0)

        # Not the bound method, which would not get the channel.
        def put(channel: memory.Channel, *args: Any, **kwargs: Any) -> None:
            self._put_in(channel, *args, **kwargs)

        monkeypatch.setattr(memory.Channel, "_put", put)
        real = runner._interrupt_once

        def interrupt_once() -> bool:
            again = real()
            self._tried.release()
            return again

        monkeypatch.setattr(runner, "_interrupt_once", interrupt_once)

    def _put_in(self, *args: Any, **kwargs: Any) -> None:
        if self.runner.reason is None:
            lost = threading.Thread(target=self.runner.interrupt, args=(None, "broken"))
            lost.start()
            lost.join()
        # Bytecode runs, and the interrupter comes again and again.
        for _ in range(3):
            while not self._tried.acquire(timeout=0.0005):
                pass
        if self.fails is not BaseException:
            raise self.fails
        self._real(*args, **kwargs)
        self.whole += 1


@contextmanager
def stopped() -> Iterator[None]:
    with pytest.raises(LeaseAborted) as caught:
        yield
    assert caught.value.reason == "broken"


PUBLISH: dict[str, tuple[Callable[[Celery, Any], Any], int]] = {
    "delay": (lambda app, plain: plain.delay(), 1),
    "apply_async": (lambda app, plain: plain.apply_async(countdown=1), 1),
    "send_task": (lambda app, plain: app.send_task("plain"), 1),
    "signature": (lambda app, plain: plain.s().apply_async(), 1),
    "group": (lambda app, plain: group(plain.s(1), plain.s(2), plain.s(3)).delay(), 3),
    "chain": (lambda app, plain: chain(plain.s(1), plain.s(2)).delay(), 1),
    "chord": (lambda app, plain: chord([plain.s(1), plain.s(2)], plain.s()).delay(), 2),
    "kombu": (lambda app, plain: by_kombu(app), 1),
}


def by_kombu(app: Celery) -> None:
    queue = app.amqp.queues[app.conf.task_default_queue]
    with app.connection_for_write() as connected:
        Producer(connected).publish({}, routing_key=queue.name, declare=[queue])


@pytest.mark.parametrize("way", PUBLISH)
def test_g13_a_body_is_interrupted_right_after_a_publish(app, plain, way, monkeypatch):
    runner = BodyRunner()
    losing, (publish, messages), after = Losing(runner, monkeypatch), PUBLISH[way], []

    def body() -> None:
        publish(app, plain)
        after.append(1)

    with stopped():
        runner.run(body)
    assert losing.whole == messages
    assert not after


def test_g6_a_body_that_only_publishes_ends(app, plain, monkeypatch):
    runner = BodyRunner()
    losing = Losing(runner, monkeypatch)

    def body() -> None:
        while True:
            plain.delay()

    with stopped():
        runner.run(body)
    assert losing.whole == 1


def test_g6_a_body_whose_publishes_fail_ends(app, plain, monkeypatch):
    runner = BodyRunner()
    losing = Losing(runner, monkeypatch)
    losing.fails = ValueError("refused")

    def body() -> None:
        while True:
            with suppress(ValueError):
                plain.delay()

    with stopped():
        runner.run(body)
    assert losing.whole == 0


def test_a_time_limit_does_not_wait_for_a_publish(app, plain, monkeypatch):
    runner = BodyRunner()
    Losing(runner, monkeypatch).fails = SoftTimeLimitExceeded()
    with pytest.raises(SoftTimeLimitExceeded):
        runner.run(plain.delay)


def locked(app: Celery) -> LockedTask:
    made: LockedTask = app.task(
        base=LockedTask, name=f"t{next(numbers)}", bind=True, shared=False, lazy=False
    )(body_of_order)
    return made


def body_of_order(self, order):
    return order


@contextmanager
def delivered(task: LockedTask) -> Iterator[None]:
    task.push_request(args=(1,), kwargs={}, id="1", called_directly=False, retries=0)
    try:
        yield
    finally:
        task.pop_request()


def test_g13_a_loss_inside_a_retry_lets_the_retry_stand(app, monkeypatch):
    runner, task = BodyRunner(), locked(app)
    losing = Losing(runner, monkeypatch)
    with delivered(task), pytest.raises(Retry):
        runner.run(lambda: task.retry(countdown=0))
    # The message of the retry is whole, and nothing else ends the task.
    assert losing.whole == 1
    assert not runner.interrupted


def test_g13_a_retry_that_was_interrupted_is_no_failure(app, monkeypatch):
    # A version of Celery may call what is not protected here.
    task = locked(app)
    lost = LeaseAborted(reason="broken")

    def refuse(*args, **kwargs):
        raise Reject(lost, requeue=False)

    monkeypatch.setattr("celery.contrib.django.task.DjangoTask.retry", refuse)
    with delivered(task), pytest.raises(LeaseLost) as caught:
        task.retry()
    assert caught.value is lost


def test_nothing_waits_outside_a_body(app, plain):
    runner = BodyRunner()
    assert runner.run(lambda: plain.delay().id)
    plain.delay()
    assert not runner.interrupted


def test_a_body_inside_a_body_has_its_own_interruptions(app, plain, monkeypatch):
    outer, inner = BodyRunner(), BodyRunner()
    losing = Losing(inner, monkeypatch)

    def body() -> str:
        with stopped():
            inner.run(plain.delay)
        # From here on it is the outer body again, which has lost nothing.
        return str(plain.name)

    assert outer.run(body) == "plain"
    assert losing.whole == 1


def test_the_functions_of_other_libraries_are_there_and_protected_once():
    clients = [
        (getattr(importlib.import_module(f"redis.{module}"), kind), name)
        for module, calls in uninterrupted.CLIENTS.items()
        for kind, name in calls
    ]
    uninterrupted.end(uninterrupted.begin(BodyRunner()))
    functions = [*uninterrupted.CALLS, *uninterrupted.READS, *clients]
    before = [getattr(kind, name) for kind, name in functions]
    uninterrupted.protect()
    after = [getattr(kind, name) for kind, name in functions]
    assert after == before
    assert all(hasattr(function, "_dlock_protects") for function in after)


def test_a_version_without_one_of_them_gives_a_warning(monkeypatch, caplog):
    """Otherwise, nobody could import the package with it."""
    monkeypatch.setattr(uninterrupted, "CALLS", ((Publisher, "publish_batch"),))
    uninterrupted.protect()
    assert "Publisher.publish_batch is not there" in caplog.text


def test_g13_the_loss_of_an_outer_body_lets_the_inner_one_publish(app, plain, monkeypatch):
    """An eager task runs inside the body that calls it."""
    outer, inner = BodyRunner(), BodyRunner()
    losing = Losing(outer, monkeypatch)
    with stopped():
        outer.run(lambda: inner.run(plain.delay))
    assert losing.whole == 1


class Traced:
    """Wraps a method as tracing libraries do, which learn the instance when it is bound."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._call(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(None, *args, **kwargs)

    def _call(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        instance.traced += 1
        return self.function(instance, *args, **kwargs)


class Publisher:
    traced = 0

    def publish(self, text: str) -> str:
        return text


@pytest.mark.parametrize("in_body", [False, True])
def test_a_tracing_wrapper_that_came_first_works(monkeypatch, in_body):
    monkeypatch.setattr(Publisher, "publish", Traced(Publisher.publish))
    monkeypatch.setattr(uninterrupted, "CALLS", ((Publisher, "publish"),))
    uninterrupted.protect()
    publisher = Publisher()
    call = lambda: publisher.publish("x")  # noqa: E731 - one call in two ways
    assert (BodyRunner().run(call) if in_body else call()) == "x"
    assert publisher.traced == 1


def test_g8_a_child_that_a_body_forks_publishes(plain):
    # At the moment of the fork, the interrupting thread may have the runner's lock.
    runner, taken, forked = BodyRunner(), threading.Event(), threading.Event()

    def hold() -> None:
        with runner._lock:
            taken.set()
            forked.wait()

    def body() -> int:
        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()
        child = os.fork()
        if not child:
            # A child that hangs is ended by this signal.
            signal.alarm(20)
            plain.delay()
            os._exit(0)
        forked.set()
        thread.join()
        return os.waitpid(child, 0)[1]

    assert runner.run(body) == 0
