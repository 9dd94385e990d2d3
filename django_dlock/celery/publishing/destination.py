"""Finds the queue that a message came from, so that it is requeued there and nowhere else.

An exchange may have several queues, each of which gets a copy of every message. If each copy were
requeued through the exchange, one message would become hundreds.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from celery import Celery
from celery.app.task import Context
from celery.utils.quorum_queues import detect_quorum_queues
from django.core.exceptions import ImproperlyConfigured
from kombu import Connection, Exchange, Queue
from kombu.exceptions import InconsistencyError
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
    level_name,
)

QUEUE, CONTENT_TYPE = "dlock_queue", "dlock_content_type"
"""Keys of ``delivery_info`` with which the parent passes details of a message to a pool's child."""

CONSUMED, PUBSUB = "dlock_consumed", "dlock_pubsub"
"""The same, only of a message that came through an exchange: the names of the queues that the
worker consumes, if it is not known which one it came from; and whether no queue keeps it."""

WITH_PUBSUB = ("redis", "mongodb")
"""Transports that cannot publish to one queue of a fanout exchange alone."""

_PREFIX = "dlock:"


class CannotRequeue(ImproperlyConfigured):
    """The queue of a message is not known, or nothing can be published to it alone."""


class NoOwnExchange(Exception):
    """The queue has no exchange that sends messages to it alone."""


# -- in the worker's parent ----------------------------------------------------------------


_consumer: weakref.ref[Any] | None = None


def on_worker_ready(sender: Any = None, **_: Any) -> None:
    """Receives ``worker_ready``, and remembers this process's consumer."""
    global _consumer
    _consumer = None if sender is None else weakref.ref(sender)


def consumer() -> Any:
    """Celery's consumer of this process; ``None`` before the worker is ready."""
    return None if _consumer is None else _consumer()


def details_of(message: Any) -> dict[str, Any]:
    """What a delivery needs to know about its message and Celery's ``delivery_info`` lacks.

    Call this when the message arrives: after a lost connection its consumer tag says nothing.
    """
    info = message.delivery_info or {}
    found = _source_of(info) if info.get("exchange") else {}
    return {QUEUE: "", CONTENT_TYPE: message.content_type or "", **found}


def _source_of(info: dict[str, Any]) -> dict[str, Any]:
    """Where a message came from, as far as the worker's parent knows.

    Its settings name neither exchanges of other applications nor queues added at run time.
    """
    receiver: Any = getattr(consumer(), "task_consumer", None)
    if receiver is None:
        return {}
    tag, tags = info.get("consumer_tag"), receiver._active_tags
    # Each queue has its own consumer tag; only AMQP has tags.
    for name, known in list(tags.items()):
        if tag and known == tag:
            return {QUEUE: name}
    queues, transport = receiver.queues, consumer().connection.transport
    if transport.driver_type in WITH_PUBSUB and _is_fanout(info["exchange"], queues):
        return {PUBSUB: True}
    names = sorted(queue.name for queue in queues)
    return {QUEUE: names[0]} if len(names) == 1 else {CONSUMED: names}


# -- in the process that publishes -----------------------------------------------------------


def route(app: Celery, request: Context, connection: Connection, delay: float) -> dict[str, Any]:
    """Arguments of ``send_task`` that send a message to the queue it came from.

    Args:
        delay: Seconds; a whole number if ``delayed_by_broker``.

    Raises:
        CannotRequeue: The message cannot be sent to that queue alone.
    """
    info: dict[str, Any] = dict(request.delivery_info or {})
    exchange, key = str(info.get("exchange") or ""), str(info.get("routing_key") or "")
    if exchange and (info.get(PUBSUB) or _is_pubsub(app, exchange, connection)):
        _refuse_many(exchange, connection)
        return {
            "exchange": exchange,
            "exchange_type": "fanout",
            "routing_key": key,
            "declare": [Exchange(exchange, "fanout")],
            "countdown": delay,
        }
    queue = _own_queue(app, info, connection)
    if delayed_by_broker(app, connection):
        return _through_delays(app, queue, connection, round(delay))
    # In the default exchange the routing key is the queue's name; nothing must be declared.
    to = Queue(queue, Exchange("", "direct"), routing_key=queue, no_declare=True)
    return {"queue": to, "declare": [], "countdown": delay}


def route_through_exchange(
    app: Celery, request: Context, connection: Connection, delay: float
) -> dict[str, Any]:
    """As ``route``, for a broker that refuses messages straight to a queue.

    Raises:
        NoOwnExchange: According to the settings, the queue has no exchange for itself.
        CannotRequeue: As ``route``.
    """
    info: dict[str, Any] = dict(request.delivery_info or {})
    name = _own_queue(app, info, connection)
    queue: Any = dict(app.amqp.queues).get(name)
    exchange = queue.exchange if queue else None
    if not exchange or not exchange.name or delayed_by_broker(app, connection):
        raise NoOwnExchange(name)
    if any(_bound(other, exchange.name) for other in app.amqp.queues.values() if other != queue):
        raise NoOwnExchange(name)
    return {
        "exchange": exchange.name,
        "exchange_type": exchange.type,
        "routing_key": queue.routing_key,
        "declare": [],
        "countdown": delay,
        # If the broker has no such binding, it says so, and does not drop the message.
        "mandatory": True,
    }


def _own_queue(app: Celery, info: dict[str, Any], connection: Connection) -> str:
    exchange, key = str(info.get("exchange") or ""), str(info.get("routing_key") or "")
    queue = (info.get(QUEUE) or _queue_of(app, info, connection)) if exchange else key
    return queue or str(app.amqp.default_queue.name)


def delayed_by_broker(app: Celery, connection: Connection) -> bool:
    """Whether RabbitMQ itself delays messages, as Celery arranges it with quorum queues.

    With such queues Celery cannot raise its prefetch count, so delayed messages in a worker would
    block all others.
    """
    return bool(detect_quorum_queues(app, connection.transport.driver_type)[0])


def content_type_of(request: Context) -> str:
    """The content type of the message as it arrived; empty if not known."""
    return str((request.delivery_info or {}).get(CONTENT_TYPE) or "")


def _is_pubsub(app: Celery, exchange: str, connection: Connection) -> bool:
    fanout = _is_fanout(exchange, app.amqp.queues.values())
    return fanout and connection.transport.driver_type in WITH_PUBSUB


def _is_fanout(exchange: str, queues: Iterable[Queue]) -> bool:
    return any(
        queue.exchange.name == exchange and queue.exchange.type == "fanout"
        for queue in queues
        if queue.exchange
    )


def _refuse_many(exchange: str, connection: Connection) -> None:
    """Raise ``CannotRequeue`` if the exchange has several queues."""
    channel: Any = connection.default_channel
    queues = {queue for _key, _pattern, queue in channel.get_table(exchange)}
    if len(queues) > 1:
        raise CannotRequeue(
            f"It cannot be requeued: it came through the fanout exchange {exchange!r}, which has "
            f"{len(queues)} queues, and {connection.transport.driver_type} cannot publish to one "
            "of them. Set if_contended and if_unavailable to 'wait', 'skip' or 'fail', or publish "
            "the task to a queue"
        )


def _queue_of(app: Celery, info: dict[str, Any], connection: Connection) -> str:
    """The queue of a message without a consumer tag.

    If this worker consumes several of its exchange, it may be the wrong one of them, but it is
    only one, and this worker runs its messages.
    """
    exchange, key = str(info["exchange"]), str(info.get("routing_key") or "")
    if exchange == CELERY_DELAYED_DELIVERY_EXCHANGE:
        word = key.rpartition(".")[2]
        if word.startswith(_PREFIX):
            return unquote(word.removeprefix(_PREFIX))
    consumed = set(info.get(CONSUMED) or app.amqp.queues.consume_from)
    queues = {name: queue for name, queue in app.amqp.queues.items() if _bound(queue, exchange)}
    table = _bindings(exchange, connection)
    matching = (row for row in table if row[0] == key or (row[1] and re.match(row[1], key)))
    for found in (
        {queue for _, _, queue in matching} & consumed,
        {queue for _, _, queue in table} & consumed,
        {name for name in queues if queues[name].routing_key == key} & consumed,
        queues.keys() & consumed,
        queues.keys(),
        info.get(CONSUMED) or (),
    ):
        if found:
            return min(found)
    raise CannotRequeue(
        f"It cannot be requeued: it came through the exchange {exchange!r}, no queue in "
        "task_queues is bound to that, and it is not known which queues the worker consumes"
    )


def _bindings(exchange: str, connection: Connection) -> list[tuple[str, str | None, str]]:
    """Key, pattern and queue of each binding, where kombu itself keeps them; else an empty list."""
    channel: Any = connection.default_channel
    try:
        return list(channel.get_table(exchange))
    except (AttributeError, LookupError, InconsistencyError):
        # AMQP's channels have no such method.
        return []


def _bound(queue: Queue, exchange: str) -> bool:
    names = {queue.exchange.name} if queue.exchange else set()
    names |= {binding.exchange.name for binding in queue.bindings or () if binding.exchange}
    return exchange in names


# -- delayed by RabbitMQ -----------------------------------------------------------------------


def _through_delays(
    app: Celery, queue: str, connection: Connection, seconds: int
) -> dict[str, Any]:
    """Route through Celery's delay exchanges, and from the last one straight to the queue.

    Celery itself routes from there to the message's exchange. But that may be a direct one, which
    does not match the key with its prefix for the delay, or may have several queues.
    """
    key = _PREFIX + _quoted(queue)
    _bind(app, queue, f"#.{key}", connection)
    return {
        "exchange": Exchange(level_name(MAX_LEVEL), "topic"),
        "routing_key": calculate_routing_key(max(1, seconds), key),
        "declare": [],
    }


def _bind(app: Celery, queue: str, key: str, connection: Connection) -> None:
    """Bind the queue to the last delay exchange, which drops messages without a binding.

    Done for every message, because the queue may have been deleted and created again.
    """
    # After an error kombu's pool may return a closed connection; a channel does not reopen it.
    connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
    try:
        _bind_once(queue, key, connection)
    except connection.channel_errors:
        # No worker has declared the delay exchanges on this broker.
        declare_native_delayed_delivery_exchanges_and_queues(
            connection, app.conf.broker_native_delayed_delivery_queue_type
        )
        _bind_once(queue, key, connection)


def _bind_once(queue: str, key: str, connection: Connection) -> None:
    # On its own channel, because an error closes the channel.
    channel: Any
    with connection.channel() as channel:
        channel.queue_bind(queue, CELERY_DELAYED_DELIVERY_EXCHANGE, key)


def _quoted(queue: str) -> str:
    """The queue's name as one word of a routing key; different for every queue."""
    return queue.replace("%", "%25").replace(".", "%2E").replace(":", "%3A")
