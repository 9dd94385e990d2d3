"""The broker that messages are published to: its timeouts, outages and confirmations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import Connection, pools
from kombu.exceptions import OperationalError
from kombu.transport import resolve_transport, virtual

OUTAGES = (OperationalError, OSError)
"""Errors of publishing that are due to the broker; kombu's transport of the broker adds its own."""

CONFIRM_TIMEOUT = 5.0
"""Seconds for an AMQP broker to confirm a message; after that Celery tries again."""

VISIBILITY_TIMEOUTS = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
"""Kombu's default visibility timeouts in seconds, by the scheme of the broker's URL."""

LONGEST_VISIBILITY_TIMEOUT = max(VISIBILITY_TIMEOUTS.values())

CONSUMER_TIMEOUT = 1800.0
"""Seconds after which RabbitMQ requeues unacknowledged messages, by default."""

COUNTS_DELIVERIES = {"amqp": CONSUMER_TIMEOUT, "sqs": VISIBILITY_TIMEOUTS["sqs"]}
"""Brokers that may drop a message after too many deliveries, and the longest delivery in seconds:
RabbitMQ's ``consumer_timeout``, or the visibility timeout."""


def unacknowledged_for(app: Celery) -> float:
    """Seconds for which a worker may keep a message; 0 if the broker does not count deliveries."""
    transport = write_connection(app).transport.driver_type
    if transport not in COUNTS_DELIVERIES:
        return 0.0
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout") or COUNTS_DELIVERIES[transport])


def is_outage(app: Celery, error: object) -> bool:
    """Whether publishing failed because of the broker, and not because of the message."""
    return isinstance(error, (*OUTAGES, *write_connection(app).connection_errors))


def forgets_what_it_delivers(transport: str) -> bool:
    """Whether a broker deletes a message when a worker receives it.

    This is true of those of kombu's transports that do not pass acknowledgements on. A worker that
    shuts down returns its unfinished messages, but a killed worker cannot.

    Args:
        transport: Its name in the broker's URL.
    """
    try:
        channel: Any = resolve_transport(transport).Channel  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001 - whatever a transport without its library raises
        # A worker would not start.
        return False
    ours = virtual.Channel
    return (
        issubclass(channel, ours)
        and channel.QoS is ours.QoS
        and channel.basic_ack is ours.basic_ack
    )


def read_transport(app: Celery) -> str:
    """The scheme of the URL that workers read from, such as ``redis``; empty if none is set.

    If several URLs are set, of the first one: the others are alternatives to it.
    """
    read = app.conf.broker_read_url or ""
    url = str(read if isinstance(read, str) else next(iter(read), ""))
    return url.partition(":")[0].partition("+")[0]


def write_connection(app: Celery) -> Connection:
    """The app's connection for publishing; used for information only.

    It is shared, because kombu opens a file for each new connection object of Redis.
    """
    found: Connection = app.producer_pool.connections.connection
    return found


@contextmanager
def confirming(app: Celery) -> Iterator[dict[str, Any]]:
    """Arguments for ``send_task``, so that it returns only once the broker has the message.

    By default AMQP does not confirm a publish. If the connection broke, the new message would be
    lost, although the old one is acknowledged on another connection.
    """
    if write_connection(app).transport.driver_type != "amqp":
        yield {}
        return
    connection = app.connection_for_write(transport_options={"confirm_publish": True})
    with pools.producers[connection].acquire(block=True) as producer:
        # After an error kombu replaces the connection, so a late confirmation is never taken
        # for that of the next message.
        yield {"producer": producer, "confirm_timeout": CONFIRM_TIMEOUT}


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker redelivers an unacknowledged message, at the longest."""
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout") or LONGEST_VISIBILITY_TIMEOUT)
