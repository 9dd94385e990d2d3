"""Puts a message back for later: the same message, published again, then the old one ended.

Not ``Task.retry``: that counts a retry of the task, fires its hooks, and may be out of retries.
Not ``Reject(requeue=True)`` either, where it can be helped: that comes back at once.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from celery import Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from kombu.utils.encoding import safe_repr

from ..exceptions import LockNotAcquired

__all__ = ["HEADER", "PutBack", "Trail", "put_back"]

logger = logging.getLogger("django_dlock")

HEADER = "django_dlock"
"""The header in which a message carries its ``Trail``."""

FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
REJECT_PAUSE = 1.0
"""Seconds of rest before a message goes back that could not be published either."""

DEFAULT_VISIBILITY_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class Trail:
    """How often a message was put back since its task last ran, and since when.

    Attributes:
        since: When contention first put it back, on the clock of the lock's backend; ``None``
            where only outages did, of which no such clock tells.
        overruns: How many runs ended with ``max_hold``; not forgotten when the task runs again.
    """

    count: int = 0
    since: float | None = None
    overruns: int = 0

    @classmethod
    def of(cls, request: Context) -> Trail:
        """What the request's message says; a damaged header reads as a new message."""
        found: Any = (request.headers or {}).get(HEADER)
        try:
            since = found["since"]
            return cls(
                int(found["count"]),
                None if since is None else float(since),
                int(found.get("overruns", 0)),
            )
        except (TypeError, KeyError, ValueError):
            return cls()


class PutBack(Exception):
    """The delivery in hand cannot be worked off now.

    Args:
        reason: The error that says why; it becomes the reason of the result's state RETRY.
        trail: The message's trail so far.
    """

    def __init__(self, reason: Exception, trail: Trail) -> None:
        super().__init__(reason, trail)
        self.reason = reason
        self.trail = trail


def put_back(
    task: Task[Any, Any], request: Context, args: Any, kwargs: Any, back: PutBack
) -> NoReturn:
    """Publish the request's message again, to be delivered later, and end this delivery.

    Raises:
        Ignore: Published; the old message is acknowledged.
        Reject: Not published; the old message goes back.
    """
    delay = _delay(task, back.trail.count)
    _store_retry(task, request, back.reason)
    try:
        options = _options(task, request, back.trail)
        task.app.send_task(task.name, args, kwargs, countdown=delay, **options)
    except Exception as error:
        if not task.acks_late:
            # There is no message left to go back; the failure must at least be seen.
            raise
        logger.exception("Task %s[%s] could not be put back", task.name, request.id)
        # It comes back at once, and perhaps to find nothing changed.
        time.sleep(random.uniform(0.5, 1.0) * REJECT_PAUSE)
        # As text: a pool's child must be able to send it to the worker, or the message is
        # acknowledged.
        raise Reject(safe_repr(error), requeue=True) from error
    logger.log(
        # Contention is expected; an outage that lasts must be seen.
        logging.INFO if isinstance(back.reason, LockNotAcquired) else logging.WARNING,
        "Task %s[%s] is put back for %.1f s: %s",
        task.name,
        request.id,
        delay,
        back.reason,
    )
    raise Ignore(f"put back: {back.reason}") from back.reason


def _delay(task: Task[Any, Any], count: int) -> float:
    """Seconds, exponential with jitter; far below what makes the broker deliver twice."""
    options = task.app.conf.broker_transport_options or {}
    visibility = float(options.get("visibility_timeout") or DEFAULT_VISIBILITY_TIMEOUT)
    longest = min(LONGEST_DELAY, visibility / 4)
    return random.uniform(0.5, 1.0) * min(longest, FIRST_DELAY * 2.0 ** min(count, 16))


def _store_retry(task: Task[Any, Any], request: Context, reason: Exception) -> None:
    # Before publishing: afterwards it could overwrite what the new delivery stored.
    ignored = vars(request).get("ignore_result")
    if task.ignore_result if ignored is None else ignored:
        return
    try:
        task.backend.mark_as_retry(request.id or "", reason, request=request)
    except Exception as error:  # noqa: BLE001 - whatever result backends raise
        # Nobody's work depends on it, and the message must not be lost for it.
        logger.warning("State RETRY of task %s[%s] not stored: %s", task.name, request.id, error)


def _options(task: Task[Any, Any], request: Context, trail: Trail) -> dict[str, Any]:
    """All that makes the new message the same as the old one, and its trail one longer."""
    known = vars(request)
    options = request.as_execution_options()
    headers = options.get("headers") or {}
    properties = request.properties or {}
    options.update(
        # Headers go over what ``send_task`` would put there: this task as its own parent, and
        # its own rendering of arguments that somebody may have chosen to hide.
        headers={
            **headers,
            **{key: known[key] for key in ("parent_id", "argsrepr", "kwargsrepr") if key in known},
            HEADER: {**asdict(trail), "count": trail.count + 1},
        },
        task_type=task,
        add_to_parent=False,
        ignore_result=known.get("ignore_result"),
        serializer=task.serializer,
        **{
            key: properties[key]
            for key in ("correlation_id", "delivery_mode")
            if properties.get(key) is not None
        },
        **_route(request),
    )
    return options


def _route(request: Context) -> dict[str, Any]:
    """Where the message came from, and with what priority."""
    info: dict[str, Any] = dict(request.delivery_info or {})
    route: dict[str, Any] = {}
    if info.get("priority") is not None:
        route["priority"] = info["priority"]
    if info.get("exchange"):
        route.update(exchange=info["exchange"], routing_key=info.get("routing_key"))
    elif info.get("routing_key"):
        # The anonymous exchange: the key is the queue's name.
        route["queue"] = info["routing_key"]
    return route
