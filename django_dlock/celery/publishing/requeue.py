"""Requeues a message: publishes it again with a delay, then ends the old delivery.

It does not use ``Task.retry``, which counts as a retry of the task, calls its hooks and may run
out of retries; nor, if possible, ``Reject(requeue=True)``, which redelivers without a delay.
"""

from __future__ import annotations

import logging
import random
import time
import weakref
from dataclasses import asdict, replace
from typing import Any, Literal, NoReturn, TypeAlias

from amqp import ChannelError
from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from kombu import serialization
from kombu.exceptions import EncodeError
from kombu.utils.encoding import safe_repr

from ... import clock, signals
from ...core import dispatch
from ...exceptions import LockNotAcquired
from ...lock import Lock
from ...log import logger
from .. import results, shutdown
from ..times import time_limit
from . import destination
from .broker import confirming, unacknowledged_for, visibility_timeout, write_connection
from .chosen_words import WORDS
from .destination import CannotRequeue, NoOwnExchange
from .header import HEADER, LATEST, RequeueHeader, described, headers_of, malformed
from .refusal import MISSING, GivenBack, is_refusal

FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
REJECT_PAUSE = 1.0
"""Seconds to wait before a message that could not be published is given back to the broker."""

KILL_MARGIN = 1.0
"""Seconds before the hard time limit in which the worker may kill the process at any moment."""

PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts to publish, less some jitter; the last pause is repeated."""

LONGEST_ATTEMPT = 10.0
"""Seconds after which an attempt without connection or confirmation has failed."""

Way: TypeAlias = Literal["queue", "exchange"]
"""Straight to the message's queue, or through that queue's own exchange."""

_exchange_first: weakref.WeakSet[Celery] = weakref.WeakSet()
"""Apps whose broker has refused to publish straight to a queue."""

OF_THE_DELIVERY = frozenset(
    {
        *("delivery_info", "delivery_tag", "body_encoding", "priority"),
        *("content_type", "content_encoding", "application_headers", "headers", "expiration"),
        # RabbitMQ compares the user with that of the connection.
        *("user_id", "cluster_id"),
        # SQS drops a second message with the same id.
        "MessageDeduplicationId",
    }
)
"""Properties that belong to one delivery, or that are set anew; they are not copied."""


class Requeue(Exception):
    """This delivery cannot run now; its message is to be published again.

    Args:
        reason: The error that says why; the result's state RETRY shows it.
        header: The header of the new message.

    Attributes:
        not_acquired: See ``DeliveryContext``.
    """

    not_acquired = ""

    def __init__(self, reason: Exception, header: RequeueHeader) -> None:
        super().__init__(reason, header)
        self.reason = reason
        self.header = header


class Republished(Ignore):
    """The delivery has ended, and its message was published again."""


def requeue(
    task: Task[Any, Any], request: Context, message: tuple[Any, Any], cause: Requeue, began: float
) -> NoReturn:
    """Publish the request's message again, to be delivered later, and end this delivery.

    Args:
        message: Its arguments and keyword arguments.
        began: When the delivery started, on ``clock.now()``.

    Raises:
        Republished: The message was published; Celery acknowledges the old one.
        Reject: It could not be published; Celery gives the old message back to the broker.
        GivenBack: This worker may not publish, so its parent gives the message back later.
        CannotRequeue: Its queue is not known; the task fails.
        Exception: What publishing raised, if the message was acknowledged early; the task fails.
    """
    attempts = _PublishAttempts(task, request, began)
    while (delay := _try_to_publish(task, request, message, cause, attempts)) is None:
        pass
    contended = isinstance(cause.reason, LockNotAcquired)
    try:
        _tell(task, request, cause)
        logger.log(
            # Contention is expected; an outage must be visible.
            logging.INFO if contended else logging.WARNING,
            "Task %s[%s] is requeued with a delay of %.1f s: %s",
            task.name,
            request.id,
            delay,
            cause.reason,
            task_id=request.id,
            reason="contended" if contended else None,
        )
    except SoftTimeLimitExceeded:
        # It must not fail a task that was already published again.
        pass
    raise Republished(f"requeued: {cause.reason}") from cause.reason


def _tell(task: Task[Any, Any], request: Context, cause: Requeue) -> None:
    # A run in progress that the record names refuses no lock.
    without = "in_progress" if isinstance(cause.reason, LockNotAcquired) else "other"
    why = cause.not_acquired or without
    dispatch.send(signals.requeued, Lock, task=task.name, task_id=request.id, reason=why)


def _try_to_publish(
    task: Task[Any, Any],
    request: Context,
    message: tuple[Any, Any],
    cause: Requeue,
    attempts: _PublishAttempts,
) -> float | None:
    """Publish; returns the delay, or ``None`` if the caller should try again.

    Raises:
        Reject: Another attempt makes no sense now.
        CannotRequeue: There is no way to publish to the message's queue.
    """
    published: float | None = None
    try:
        with confirming(task.app) as publishing:
            tries = cause.header.tries
            delay, route = _destination(task, request, tries, publishing, attempts.ways[0])
            if not attempts.pauses:
                _store_retry(task, request, cause.reason, attempts.began)
            options = {**_message_options(task, request, cause.header), **route, **publishing}
            if attempts.has_any:
                # Celery's own attempts may take too long.
                options["retry"] = False
            args, kwargs = message
            task.app.send_task(task.name, args, kwargs, **options)
            published = delay
    except CannotRequeue as refused:
        logger.error("Task %s[%s]: %s", task.name, request.id, refused, task_id=request.id)
        raise refused from cause.reason
    except Exception as error:
        # Once it is published, an error such as the soft time limit must not fail the task.
        if published is not None:
            return published
        if not task.acks_late:
            # The message was acknowledged already and cannot be given back; let the task fail.
            raise
        if attempts.refused(error):
            if not attempts.ways:
                _give_back_later(task, request, cause, attempts.refusal or error)
            # The other way.
            return None
        logger.warning(
            "Task %s[%s] could not be requeued",
            task.name,
            request.id,
            exc_info=None if attempts.pauses else error,
            task_id=request.id,
        )
        if isinstance(error, EncodeError | SoftTimeLimitExceeded) or not attempts.wait():
            give_back(error)
    return published


class _PublishAttempts:
    """Decides how long a delivery tries to publish, before it gives its own message back.

    Some brokers drop a message that was given back too often (``x-delivery-limit`` of a quorum
    queue, 20 by default, or the redrive policy of SQS). So the message is kept as long as
    possible while the broker accepts no messages.
    """

    def __init__(self, task: Task[Any, Any], request: Context, began: float) -> None:
        self._app, self.began, self.pauses = task.app, began, 0
        # Only if the broker refuses the first way is the second one tried.
        self.ways: list[Way] = ["queue", "exchange"]
        if task.app in _exchange_first:
            self.ways.reverse()
        self.refusal: Exception | None = None
        lasts = unacknowledged_for(task.app)
        self.has_any, self._until = lasts > 0, began + lasts / 2
        if limit := time_limit(task, request):
            self._until = min(self._until, began + limit - KILL_MARGIN - LONGEST_ATTEMPT)

    def refused(self, error: Exception) -> bool:
        """Whether the broker has refused the message, so that only another way may do."""
        way = self.ways[0]
        refused = is_refusal(error)
        if way == "exchange":
            # It may also have no such exchange, or no queue may be bound to that.
            refused = refused or isinstance(error, NoOwnExchange | ChannelError)
        if refused:
            if way == "queue":
                self.refusal = error
                _exchange_first.add(self._app)
            else:
                _exchange_first.discard(self._app)
            del self.ways[0]
        return refused

    def wait(self) -> bool:
        """Sleep until the next attempt; returns ``False`` if there is none."""
        pause = random.uniform(0.5, 1.0) * PAUSES[min(self.pauses, len(PAUSES) - 1)]
        self.pauses += 1
        if clock.now() + pause > self._until:
            return False
        return not shutdown.wait(pause)


def give_back(error: Exception) -> NoReturn:
    """End this delivery and give its message back to the broker; no new one could be published."""
    # The broker redelivers it at once, perhaps into the same outage.
    time.sleep(random.uniform(0.5, 1.0) * REJECT_PAUSE)
    # As text: if a pool's child cannot send the reason to the worker, the message is
    # acknowledged.
    raise Reject(safe_repr(error), requeue=True) from error


def _give_back_later(
    task: Task[Any, Any], request: Context, cause: Requeue, refusal: Exception
) -> NoReturn:
    """End this delivery; the worker's parent gives its message back after the usual back-off.

    Each time counts towards the limit of a quorum queue (``x-delivery-limit``, 20 by default),
    after which RabbitMQ drops the message. So there the pauses go on growing.
    """
    header = replace(cause.header, count=cause.header.count + 1)
    tries = cause.header.tries
    times = headers_of(request).get("x-delivery-count")
    if isinstance(times, int):
        delay = _backed_off(max(tries, times), unacknowledged_for(task.app) / 2)
    else:
        delay = _delay(task, tries)
    try:
        _tell(task, request, cause)
        logger.warning(
            "Task %s[%s] is given back to the broker in %.1f s (%s), because the broker does not "
            "let this worker publish: %s. %s",
            task.name,
            request.id,
            delay,
            cause.reason,
            refusal,
            MISSING,
            task_id=request.id,
        )
    except SoftTimeLimitExceeded:
        # It must not fail a task that has not run.
        pass
    raise GivenBack(safe_repr(refusal), True, delay, asdict(header)) from cause.reason


def _delay(task: Task[Any, Any], tries: int) -> float:
    """Seconds, exponential with jitter; always well below the broker's visibility timeout."""
    return _backed_off(tries, min(LONGEST_DELAY, visibility_timeout(task.app) / 4))


def _backed_off(tries: int, longest: float) -> float:
    return random.uniform(0.5, 1.0) * min(longest, FIRST_DELAY * 2.0 ** min(tries, 16))


def _destination(
    task: Task[Any, Any], request: Context, tries: int, publishing: dict[str, Any], way: Way
) -> tuple[float, dict[str, Any]]:
    """The delay, and the arguments of ``send_task`` that send the message to its queue."""
    producer = publishing.get("producer")
    connection = producer.connection if producer else write_connection(task.app)
    delay = _delay(task, tries)
    if destination.delayed_by_broker(task.app, connection):
        # RabbitMQ counts in whole seconds.
        delay = max(1.0, round(delay))
    if way == "exchange":
        return delay, destination.route_through_exchange(task.app, request, connection, delay)
    return delay, destination.route(task.app, request, connection, delay)


class _KeepDestination:
    """A router that does not change the destination."""

    def route(self, options: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return options


def _store_retry(task: Task[Any, Any], request: Context, reason: Exception, began: float) -> None:
    # Called before publishing: afterwards this could overwrite what the new delivery stores.
    if results.ignores_result(task, request):
        return
    limit = time_limit(task, request)
    if limit and clock.now() - began > limit - KILL_MARGIN:
        # The worker is about to store FAILURE, acknowledge the message and kill this process,
        # perhaps before it has published. RETRY must not overwrite that failure.
        return
    try:
        task.backend.mark_as_retry(request.id or "", reason, request=request)
    except Exception as error:  # noqa: BLE001 - whatever result backends raise
        # The state is only information; do not lose the message because of it.
        logger.warning(
            "State RETRY of task %s[%s] not stored: %s",
            task.name,
            request.id,
            error,
            task_id=request.id,
        )


def _message_options(
    task: Task[Any, Any], request: Context, header: RequeueHeader
) -> dict[str, Any]:
    """Options that make the new message equal to the old one, but for the header's count."""
    known = vars(request)
    options = request.as_execution_options()
    headers = options.get("headers") or {}
    info: dict[str, Any] = dict(request.delivery_info or {})
    properties = dict(request.properties or {})
    expiration = properties.get("expiration")
    options.update(
        router=_KeepDestination(),
        # These headers replace what ``send_task`` would set: this task as its own parent, and
        # the full text of arguments that the publisher may have hidden.
        headers={
            **headers,
            **{key: known[key] for key in ("parent_id", *WORDS) if key in known},
            HEADER: {**asdict(header), "count": header.count + 1},
        },
        task_type=task,
        add_to_parent=False,
        ignore_result=known.get("ignore_result"),
        serializer=_serializer(destination.content_type_of(request)) or task.serializer,
        compression=known.get("compression"),
        priority=info.get("priority"),
        **{
            key: value
            for key, value in properties.items()
            if key not in OF_THE_DELIVERY and key not in options and value is not None
        },
    )
    if expiration is not None and options.get("expires") is None:
        # If the task itself expires, ``send_task`` sets it. The property is in milliseconds, the
        # option in seconds.
        seconds = _seconds(expiration)
        if seconds is None:
            malformed(request, "expiration", f"it is {described(expiration)}")
        else:
            options["expiration"] = seconds
    return {key: value for key, value in options.items() if value is not None}


def _seconds(milliseconds: Any) -> float | None:
    """The time of a property that whoever publishes may write; ``None`` if it is none."""
    try:
        seconds = float(milliseconds) / 1000
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < LATEST else None


def _serializer(content_type: str) -> str | None:
    """Kombu's name of the serializer that the message was written with."""
    registry: Any = serialization.registry  # type: ignore[attr-defined]
    name = registry.type_to_name.get(content_type)
    return None if name is None else str(name)
