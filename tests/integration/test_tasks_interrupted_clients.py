"""A body loses its lease between a request and its reply: nobody else gets that reply."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from amqp.transport import TCPTransport
from celery import Celery
from django.core.cache.backends.redis import RedisCache
from kombu import Connection as Broker
from redis.connection import Connection

from django_dlock.celery.delivery import interrupt as interrupting
from django_dlock.celery.delivery.interrupt import BodyRunner, LeaseAborted
from tests.support.proxy import Proxy

pytestmark = pytest.mark.extended

DISTANCE = 0.02
"""Seconds for which a reply is under way, so that a pool does not see it."""


@pytest.fixture
def distant(own_redis: Any) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", own_redis.port) as proxy:
        proxy.delay = DISTANCE
        yield proxy


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupting, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(interrupting, "LONGEST_PAUSE", 0.001)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> BodyRunner:
    """Its body loses the lease when redis-py has sent a command."""
    return losing(monkeypatch, Connection, "send_packed_command")


def losing(monkeypatch: pytest.MonkeyPatch, kind: Any, method: str) -> BodyRunner:
    """Its body loses the lease when it has sent something."""
    made, tried = BodyRunner(), threading.Semaphore(0)
    real_once, real_send = made._interrupt_once, getattr(kind, method)
    body = threading.get_ident()

    def interrupt_once() -> bool:
        again = real_once()
        tried.release()
        return again

    def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        sent = real_send(self, *args, **kwargs)
        if made._thread == body and made.reason is None and not made._closing:
            made.interrupt(None, "broken")
            # Bytecode runs, and the interrupter comes again and again.
            for _ in range(3):
                while not tried.acquire(timeout=0.0005):
                    pass
        return sent

    monkeypatch.setattr(made, "_interrupt_once", interrupt_once)
    monkeypatch.setattr(kind, method, send)
    return made


def by_client(proxy: Proxy) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    client = redis.Redis(port=proxy.port, decode_responses=True)
    return lambda key: client.set(key, key), client.get


def by_pipeline(proxy: Proxy) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    client = redis.Redis(port=proxy.port, decode_responses=True)
    return lambda key: client.set(key, key), lambda key: client.pipeline().get(key).execute()[0]


def by_cache(proxy: Proxy) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    cache = RedisCache(f"redis://127.0.0.1:{proxy.port}/1", {})
    return lambda key: cache.set(key, key), cache.get


def by_results(proxy: Proxy) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    url = f"redis://127.0.0.1:{proxy.port}/2"
    backend = Celery("results", broker="memory://", backend=url, set_as_current=False).backend

    def get(key: str) -> Any:
        # Otherwise the backend would answer from its own memory.
        backend._cache.clear()
        return backend.get_result(key)

    return lambda key: backend.store_result(key, key, "SUCCESS"), get


@pytest.mark.parametrize("how", [by_client, by_pipeline, by_cache, by_results])
def test_g13_nobody_reads_the_reply_to_an_interrupted_request(
    distant: Proxy, runner: BodyRunner, how: Callable[[Proxy], Any]
) -> None:
    store, get = how(distant)
    for key in ("mine", "yours"):
        store(key)
    # Connected.
    assert get("mine") == "mine"
    with pytest.raises(LeaseAborted):
        runner.run(lambda: get("mine"))
    assert get("yours") == "yours"


def test_a_client_that_connects_is_not_interrupted_in_between(
    distant: Proxy, runner: BodyRunner
) -> None:
    client = redis.Redis(port=distant.port, decode_responses=True)
    with pytest.raises(LeaseAborted):
        runner.run(lambda: client.set("mine", "mine"))
    assert client.get("mine") == "mine"


def test_a_subscriber_gets_the_next_message_after_an_interrupted_one(
    distant: Proxy, runner: BodyRunner
) -> None:
    client = redis.Redis(port=distant.port, decode_responses=True)
    subscriber = client.pubsub(ignore_subscribe_messages=True)
    with pytest.raises(LeaseAborted):
        runner.run(lambda: subscriber.subscribe("news"))
    client.publish("news", "first")
    found = None
    while found is None:
        found = subscriber.get_message(timeout=5)
    assert found["data"] == "first"


def test_g13_nobody_gets_the_answer_of_rabbitmq_to_an_interrupted_question(
    rabbit_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a body that waits for a result in RPC's backend."""
    with (
        Proxy("127.0.0.1", rabbit_server.port, speaks="amqp") as proxy,
        Broker(rabbit_server.url.replace(str(rabbit_server.port), str(proxy.port))) as broker,
    ):
        # A connection keeps the method that it found.
        runner = losing(monkeypatch, TCPTransport, "write")
        channel: Any = broker.default_channel
        proxy.delay = DISTANCE
        with pytest.raises(LeaseAborted):
            runner.run(lambda: channel.queue_declare("mine", exclusive=True))
        assert channel.queue_declare("yours", exclusive=True).queue == "yours"
