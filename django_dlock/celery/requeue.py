"""Puts a message back for later: the same message, published again, then the old one ended.

Not ``Task.retry``: that counts a retry of the task, fires its hooks, and may be out of retries.
Not ``Reject(requeue=True)`` either, where it can be helped: that comes back at once.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Connection, Exchange, Queue, pools
from kombu.exceptions import OperationalError
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_NUMBER_OF_BITS_TO_USE,
)
from kombu.utils.encoding import safe_repr

from .. import clock
from ..exceptions import LockNotAcquired

__all__ = [
    "HEADER",
    "PutBack",
    "Trail",
    "confirming",
    "go_back",
    "is_outage",
    "put_back",
    "write_connection",
]

logger = logging.getLogger("django_dlock")

HEADER = "django_dlock"
"""The header in which a message carries its ``Trail``."""

FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
REJECT_PAUSE = 1.0
"""Seconds of rest before a message goes back that could not be published either."""

CONFIRM_TIMEOUT = 5.0
"""Seconds for an AMQP broker to confirm that it has the message; Celery tries some times more."""

KILL_MARGIN = 1.0
"""Seconds before the hard time limit from which on it may strike at any moment."""

DEFAULT_VISIBILITY_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class Trail:
    """What a message carries from delivery to delivery.

    Attributes:
        count: How often it was put back since its task last ran.
        since: When contention first put it back, on the clock of the lock's backend; ``None``
            where only outages did, of which no such clock tells.
        overruns: How many runs ended with ``max_hold``; not forgotten when the task runs again.
        parked: The lease that was parked for it, or may have been, as ``owner:name``; else empty.
        reserved: The reservation made when it was published (``Reservation.mark``); else empty.
    """

    count: int = 0
    since: float | None = None
    overruns: int = 0
    parked: str = ""
    reserved: str = ""

    @classmethod
    def of(cls, request: Context) -> Trail:
        """What the request's message says; a damaged header reads as a new message."""
        found: Any = (request.headers or {}).get(HEADER)
        if found is None:
            return _NEW
        try:
            since = found["since"]
            return cls(
                int(found["count"]),
                None if since is None else float(since),
                int(found.get("overruns", 0)),
                str(found.get("parked", "")),
                str(found.get("reserved", "")),
            )
        except (TypeError, KeyError, ValueError):
            return _NEW

    @property
    def parked_as(self) -> tuple[str, str]:
        """Owner and name of the parked lease; both empty where there is none."""
        owner, _, name = self.parked.partition(":")
        return owner, name

    def rested(self) -> Trail:
        """The trail once its task runs: contention is over, the rest goes on."""
        if not self.count and self.since is None:
            return self
        return replace(self, count=0, since=None)

    def write(self, request: Context) -> None:
        """Let a retry, which the running task publishes, carry this trail."""
        headers = dict(request.headers or {})
        headers.pop(HEADER, None)
        if self != _NEW:
            headers[HEADER] = asdict(self)
        request.headers = headers


_NEW = Trail()


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
    task: Task[Any, Any], request: Context, message: tuple[Any, Any], back: PutBack, began: float
) -> NoReturn:
    """Publish the request's message again, to be delivered later, and end this delivery.

    Args:
        message: Its arguments and keyword arguments.
        began: When the delivery did, on our clock.

    Raises:
        Ignore: Published; the old message is acknowledged.
        Reject: Not published; the old message goes back.
    """
    args, kwargs = message
    delay = _delay(task, back.trail.count)
    _store_retry(task, request, back.reason, began)
    published = False
    try:
        options = _options(task, request, back.trail)
        with confirming(task.app) as publishing:
            task.app.send_task(task.name, args, kwargs, countdown=delay, **options, **publishing)
            published = True
        logger.log(
            # Contention is expected; an outage that lasts must be seen.
            logging.INFO if isinstance(back.reason, LockNotAcquired) else logging.WARNING,
            "Task %s[%s] is put back for %.1f s: %s",
            task.name,
            request.id,
            delay,
            back.reason,
        )
    except Exception as error:
        # Once it is, the soft time limit, say, makes no failure of a task that comes again.
        if not published:
            if not task.acks_late:
                # There is no message left to go back; the failure must at least be seen.
                raise
            logger.exception("Task %s[%s] could not be put back", task.name, request.id)
            go_back(error)
    raise Ignore(f"put back: {back.reason}") from back.reason


def go_back(error: Exception) -> NoReturn:
    """End this delivery with its own message, where another could not be published."""
    # It comes back at once, and perhaps to find nothing changed.
    time.sleep(random.uniform(0.5, 1.0) * REJECT_PAUSE)
    # As text: a pool's child must be able to send it to the worker, or the message is
    # acknowledged.
    raise Reject(safe_repr(error), requeue=True) from error


def is_outage(app: Celery, error: object) -> bool:
    """Whether publishing failed because of the broker, and not because of the message."""
    return isinstance(error, (OperationalError, OSError, *write_connection(app).connection_errors))


def write_connection(app: Celery) -> Connection:
    """What can tell of the broker that is published to.

    The app's own, for kombu opens a file for each one that tells of a Redis.
    """
    found: Connection = app.producer_pool.connections.connection
    return found


@contextmanager
def confirming(app: Celery) -> Iterator[dict[str, Any]]:
    """Arguments for ``send_task``, with which its return means that the broker has the message.

    By default nothing answers a publish on AMQP: what a connection swallows as it breaks would
    be lost, for the old message is acknowledged on another one.
    """
    if write_connection(app).transport.driver_type != "amqp":
        yield {}
        return
    connection = app.connection_for_write(transport_options={"confirm_publish": True})
    with pools.producers[connection].acquire(block=True) as producer:
        # After an error kombu replaces its connection, so that a confirmation that comes late
        # does not pass for that of the next message.
        yield {"producer": producer, "confirm_timeout": CONFIRM_TIMEOUT}


def _delay(task: Task[Any, Any], count: int) -> float:
    """Seconds, exponential with jitter; far below what makes the broker deliver twice."""
    options = task.app.conf.broker_transport_options or {}
    visibility = float(options.get("visibility_timeout") or DEFAULT_VISIBILITY_TIMEOUT)
    longest = min(LONGEST_DELAY, visibility / 4)
    delay = random.uniform(0.5, 1.0) * min(longest, FIRST_DELAY * 2.0 ** min(count, 16))
    # RabbitMQ counts in whole seconds.
    return max(1.0, round(delay)) if _broker_delays(task.app) else delay


def _broker_delays(app: Celery) -> bool:
    """Whether RabbitMQ itself keeps what waits, as it does where there are quorum queues."""
    return bool(detect_quorum_queues(app, write_connection(app).transport.driver_type)[0])


def _store_retry(task: Task[Any, Any], request: Context, reason: Exception, began: float) -> None:
    # Before publishing: afterwards it could overwrite what the new delivery stored.
    ignored = vars(request).get("ignore_result")
    if task.ignore_result if ignored is None else ignored:
        return
    limit = (request.timelimit or (None, None))[0] or task.time_limit
    if limit and clock.now() - began > limit - KILL_MARGIN:
        # The worker is about to say FAILURE, to acknowledge the message, and to kill this
        # process, perhaps before it has published. Nobody would hear of a failure overwritten.
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
        **_route(task.app, request),
    )
    return options


def _route(app: Celery, request: Context) -> dict[str, Any]:
    """Where the message came from, and with what priority."""
    info: dict[str, Any] = dict(request.delivery_info or {})
    route: dict[str, Any] = {}
    if info.get("priority") is not None:
        route["priority"] = info["priority"]
    exchange, key = str(info.get("exchange") or ""), str(info.get("routing_key") or "")
    if exchange:
        if exchange == CELERY_DELAYED_DELIVERY_EXCHANGE:
            # RabbitMQ has kept it: before the key stands how long. Older versions of kombu do
            # not take that away, and write another one before it.
            key = key[2 * MAX_NUMBER_OF_BITS_TO_USE :]
        route.update(exchange=exchange, routing_key=key)
        if _broker_delays(app):
            route.update(_queue(app, exchange, key))
    elif key:
        # The anonymous exchange: the key is the queue's name.
        route["queue"] = key
    return route


def _queue(app: Celery, exchange: str, key: str) -> dict[str, Queue]:
    """What tells Celery of exchange and key where the broker delays.

    It looks for them at the queue, and takes the default one, and its key, where none is given.
    """
    if exchange == CELERY_DELAYED_DELIVERY_EXCHANGE:
        return {"queue": Queue(exchange=Exchange(exchange, "topic"), routing_key=key)}
    for queue in app.amqp.queues.values():
        if queue.exchange.name == exchange:
            if queue.exchange.type == "direct":
                # Not delayed by the broker, but declared.
                return {"queue": queue}
            return {"queue": Queue(exchange=queue.exchange, routing_key=key)}
    return {}
