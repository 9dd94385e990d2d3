"""When the broker delivers the message of an interrupted run again, as far as anybody can know."""

from __future__ import annotations

import datetime as dt
from typing import Literal, NamedTuple

from celery import Celery
from celery.app import app_or_default
from kombu.utils import json

from ...models import IdempotencyRecord
from .broker import VISIBILITY_TIMEOUTS, forgets_what_it_delivers, read_transport

AMQP = ("amqp", "amqps", "pyamqp", "librabbitmq")


class Redelivery(NamedTuple):
    """When a message comes again.

    Attributes:
        when: ``timed``: at ``at``, if a worker is running; ``at_once``: when the broker notices
            that the connection of the worker is gone; ``never``; or ``unknown``.
        transport: Of the broker; empty if there is none, or if it is not configured here.
    """

    when: Literal["timed", "at_once", "never", "unknown"]
    transport: str = ""
    at: dt.datetime | None = None


def redelivery_of(record: IdempotencyRecord, app: Celery | None = None) -> Redelivery:
    """When the message of the record's latest run comes again, if the run is dead.

    Args:
        app: Whose broker it is; the current app by default.
    """
    if not record.task_id or _is_eager(record):
        # A request, or a task in the process of its caller: there is no message.
        return Redelivery("never")
    app = app_or_default(app)
    transport = read_transport(app)
    if transport in AMQP:
        return Redelivery("at_once", transport)
    if transport in VISIBILITY_TIMEOUTS:
        options = app.conf.broker_transport_options or {}
        seconds = options.get("visibility_timeout") or VISIBILITY_TIMEOUTS[transport]
        try:
            # The worker got the message before the run began, so this is the latest.
            at = record.started_at + dt.timedelta(seconds=float(seconds))
        except OverflowError:
            # A row that somebody else has written.
            return Redelivery("unknown", transport)
        return Redelivery("timed", transport, at)
    if transport and forgets_what_it_delivers(transport):
        return Redelivery("never", transport)
    return Redelivery("unknown", transport)


def _is_eager(record: IdempotencyRecord) -> bool:
    """Whether the run had no message; a list does not read the stored one, which is long."""
    if "message" in record.get_deferred_fields() or record.message is None:
        return False
    try:
        return "routing_key" not in json.loads(record.message)["options"]
    except Exception:  # noqa: BLE001 - written by somebody else
        return False
