"""Runs the task of a record again, for an operator.

The record is deleted, and its message is written as a follow-up with a new task id, in one
transaction. So nothing is lost if the process dies before the message is published::

    operator   delete record, write row … COMMIT … publish → confirmed → row marked
                                               ↑ if the process dies here,
                                                 publish_pending_followups publishes it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery.app import app_or_default
from celery.app.task import Context
from celery.utils import uuid
from django.db import transaction
from kombu.utils import json

from ...databases.time import Now
from ...models import FollowUp, IdempotencyRecord
from ...records import retention
from ..options import TaskWithOptions
from . import copies, follow_ups
from .chosen_words import chosen_words
from .destination import QUEUE
from .follow_ups import Unpublished
from .header import carried

__all__ = [
    "MAX_MESSAGE",
    "Unpublished",
    "Unreadable",
    "arguments_of",
    "encode",
    "forget_and_write",
    "publish",
]

MAX_MESSAGE = 16 * 1024
"""Characters of a message that is stored with each claim; longer ones are not stored."""


def encode(
    task: TaskWithOptions, request: Context, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """The message of a delivery as text for the record; never raises.

    Returns:
        ``None`` if the task does not want it stored, or if arguments and headers are too long or
        would not come back from JSON unchanged.
    """
    if not task.store_arguments:
        return None
    signature: dict[str, Any] = {
        "task": task.name,
        "args": list(args),
        "kwargs": dict(kwargs),
        "options": {**_destination(request), **chosen_words(request, args, kwargs)},
        "subtask_type": None,
        "immutable": False,
    }
    try:
        if headers := carried(request):
            signature["options"] = {**signature["options"], "headers": headers}
        text: str = json.dumps(signature)
        # Other serializers allow what JSON does not, such as numbers as keys.
        same = bool(json.loads(text) == signature)
    except Exception:  # noqa: BLE001 - whatever the types of arguments raise
        return None
    return text if same and len(text) <= MAX_MESSAGE else None


def _destination(request: Context) -> dict[str, Any]:
    """The queue and the priority of a message, as options of ``apply_async``."""
    info: Mapping[str, Any] = request.delivery_info or {}
    if queue := info.get(QUEUE):
        # The exchange may have several queues.
        found = {"exchange": "", "routing_key": queue}
    else:
        found = {name: info.get(name) for name in ("exchange", "routing_key")}
    found["priority"] = info.get("priority")
    # Eager tasks have none of them.
    return {name: value for name, value in found.items() if value is not None}


class Unreadable(ValueError):
    """The message of a record is not one that ``encode`` has made."""


_PARTS: Mapping[str, type[Any]] = {"task": str, "args": list, "kwargs": dict, "options": dict}


def _signature(message: str) -> dict[str, Any]:
    try:
        found = json.loads(message)
    except Exception as error:  # noqa: BLE001 - whatever Celery's JSON makes of a text
        # Not the error itself, which may quote it.
        raise Unreadable(type(error).__name__) from None
    if not isinstance(found, dict):
        raise Unreadable(f"it is a {type(found).__name__}")
    for part, kind in _PARTS.items():
        if not isinstance(found.get(part), kind):
            raise Unreadable(f"its part {part!r} is missing or wrong")
    return found


def arguments_of(message: str) -> tuple[Any, Any]:
    """The positional and the named arguments of a stored message.

    Raises:
        Unreadable: Somebody else has written it.
    """
    signature = _signature(message)
    return signature["args"], signature["kwargs"]


def forget_and_write(record: IdempotencyRecord) -> FollowUp | None:
    """Delete the record, and write its message as a pending follow-up; then call ``publish``.

    Returns:
        ``None`` if the record has changed since it was read; then nothing was written.

    Raises:
        Unreadable: Nothing was written, because nobody knows what would run.
    """
    using = record._state.db or "default"
    signature = _signature(record.message or "")
    signature["options"]["task_id"] = uuid()
    copies.mark(signature)
    kept = record.expires_at - (record.finished_at or record.started_at)
    with transaction.atomic(using=using):
        if not retention.delete(record.as_it_was()):
            return None
        return FollowUp.objects.using(using).create(
            record_id=record.pk,
            task=signature["task"][:255],
            task_id=signature["options"]["task_id"],
            message=json.dumps(signature),
            created_at=Now(),
            expires_at=Now() + kept,
        )


def publish(follow_up: FollowUp) -> bool:
    """Publish the message, after the commit; returns whether the broker has confirmed it.

    Raises:
        Unpublished: The broker did not accept it; it is pending.
    """
    using = follow_up._state.db or "default"
    return bool(follow_ups.publish(app_or_default(), [follow_up], using))
