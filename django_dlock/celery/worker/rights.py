"""Tells when a worker starts that its broker does not let it publish."""

from __future__ import annotations

import uuid
from typing import Any

from celery import Celery
from kombu import Producer
from kombu.transport.native_delayed_delivery import (
    MAX_LEVEL,
    calculate_routing_key,
    level_name,
)

from ...log import logger
from ..options import TaskWithOptions
from ..publishing.broker import CONFIRM_TIMEOUT
from ..publishing.destination import delayed_by_broker
from ..publishing.refusal import MISSING, is_refusal


def log_missing(sender: Any = None, **_: Any) -> None:
    """Receives ``worker_ready``; logs one line if the worker may not requeue messages."""
    app: Celery | None = getattr(sender, "app", None)
    if app is None or not any(isinstance(task, TaskWithOptions) for task in app.tasks.values()):
        return
    try:
        _publish_nowhere(app)
    except Exception as error:  # noqa: BLE001 - whatever transports raise
        if is_refusal(error):
            logger.error(
                "The broker does not let this worker publish: %s. %s; until then, tasks that "
                "cannot run now are given back to it instead of being requeued",
                error,
                MISSING,
            )


def _publish_nowhere(app: Celery) -> None:
    """Publish a message that reaches no queue, and wait for the answer."""
    with app.connection_for_write(transport_options={"confirm_publish": True}) as connection:
        if connection.transport.driver_type != "amqp":
            return
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=5)
        exchange, key = "", f"dlock-{uuid.uuid4()}"
        if delayed_by_broker(app, connection):
            exchange, key = level_name(MAX_LEVEL), calculate_routing_key(0, key)
        producer = Producer(connection.default_channel)
        producer.publish("", exchange=exchange, routing_key=key, confirm_timeout=CONFIRM_TIMEOUT)
