"""Messages that a run publishes after it has been recorded.

With ``transaction.on_commit()`` a message is lost if the worker dies between COMMIT and the hook:
the redelivery finds the work done and publishes nothing. So the message, with its future task id,
is written as a row in the transaction of the record::

    body   send() → row … COMMIT … lock released … publish → confirmed → row marked
                               ↑ if the worker dies here, a redelivery or the management command
                                 publishes it

So it is published at least once, and always with the same id.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any

from celery import Celery, current_task
from celery.app import app_or_default
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult
from celery.utils import uuid
from django.db import Error, connections, transaction
from kombu.utils import json

from ... import tenancy
from ...databases import errors as database_errors
from ...databases.time import Now
from ...log import logger
from ...models import FollowUp
from ...records.retention import in_batches
from .. import results
from ..options import TaskWithOptions
from ..times import seconds_until
from .broker import confirming, is_outage
from .copies import mark
from .header import carried, scope_of, without_ours

MAX_MESSAGE = 256 * 1024
"""Characters of a recorded message; put more data into a table or file of your own."""

BATCH = 100


class Unpublished(Exception):
    """The broker did not accept all messages; the rest is published later."""


class FollowUps:
    """The follow-ups of one run.

    Args:
        record: Id of the record, in the database ``using``.
        ttl: How long they are kept after they were published.
        atomic: Whether the body is part of the record's transaction.
        over: The run has ended in an earlier delivery; its follow-ups may still be pending.

    Attributes:
        using: The database of the record.
        replaced: Whether the run has called ``replace()``.
    """

    def __init__(
        self,
        task: TaskWithOptions,
        using: str,
        record: int,
        *,
        ttl: dt.timedelta,
        atomic: bool,
        over: bool = False,
    ) -> None:
        self._task, self.using, self._record = task, using, record
        self._ttl, self._atomic = ttl, atomic
        # Of the body's thread; other threads have other connections and transactions.
        self._connection = connections[using]
        self._replacement = ""
        self._open, self._written = not over, over
        self.replaced = False

    @property
    def accepts(self) -> bool:
        """Whether a message that is sent now is part of the run's transaction."""
        ours = connections[self.using] is self._connection
        return self._open and self._atomic and ours

    def send(self, signature: Signature) -> AsyncResult[Any]:
        """Write a message; it is published once the run is committed.

        Raises:
            RuntimeError: There is no transaction of a record to write it in.
            TypeError: It is a canvas, or cannot be written as JSON.
            ValueError: It is too large.
        """
        if not self.accepts:
            raise RuntimeError(
                f"current_run.send() of task {self._task.name!r} needs an idempotency_key and "
                "atomic=True, and must be called in the body, on its thread; otherwise use delay()"
            )
        if not isinstance(signature, Signature) or signature.get("subtask_type"):
            kind = getattr(signature, "subtask_type", None) or type(signature).__name__
            raise TypeError(
                f"current_run.send() takes the signature of one task, not a {kind}: send a "
                "task that starts the canvas"
            )
        signature = self._absolute(signature)
        self._write(_encode(signature), str(signature.task), signature.options["task_id"])
        result = self._task.app.AsyncResult(signature.options["task_id"])
        self._task.add_trail(result)
        return result

    def replace(self, signature: Signature) -> bool:
        """Record a frozen replacement; ``False`` if the caller must publish it at once."""
        self.replaced = True
        if not self._open:
            return False
        try:
            self._replacement = _encode(self._absolute(signature))
        except (TypeError, ValueError) as error:
            logger.info(
                "Task %s: its replacement is not recorded: %s",
                self._task.name,
                error,
                task_id=self._task.request.id,
            )
            return False
        return True

    def close(self) -> None:
        """End of the body: write the replacement, if any, and accept no more messages."""
        self._open = False
        if self._replacement:
            request = self._task.request
            self._write(self._replacement, f"replacement of {self._task.name}", str(request.id))

    def publish(self) -> None:
        """Publish what was written; call this after the commit.

        Raises:
            Unpublished: The broker did not accept all.
        """
        if not self._written:
            return
        app, using, record = self._task.app, self.using, self._record
        # This runs at once, unless an eager task is in its caller's transaction.
        transaction.on_commit(
            lambda: publish(app, pending(using, record=record), using),
            using,
            robust=self._connection.in_atomic_block,
        )

    def _absolute(self, signature: Signature) -> Signature:
        """A copy with absolute ids, times and headers, to be published later and elsewhere."""
        app, request = self._task.app, self._task.request
        signature = signature.clone()
        options = signature.options
        # What libraries would write there depends on who is active where it is published.
        if headers := carried(request):
            options["headers"] = {**headers, **without_ours(options.get("headers"))}
        if signature.get("subtask_type"):
            # A replacement: Celery has already frozen it.
            return signature
        options.setdefault("task_id", uuid())
        options.setdefault("root_id", request.root_id or request.id)
        options.setdefault("parent_id", request.id)
        countdown = options.pop("countdown", None)
        if countdown is not None:
            options["eta"] = app.now() + dt.timedelta(seconds=countdown)
        if isinstance(options.get("expires"), int | float):
            left = seconds_until(app, options["expires"])
            options["expires"] = app.now() + dt.timedelta(seconds=left)
        return signature

    def _write(self, message: str, task: str, task_id: str) -> None:
        FollowUp.objects.using(self.using).create(
            record_id=self._record,
            task=task[:255],
            task_id=task_id,
            message=message,
            created_at=Now(),
            expires_at=Now() + self._ttl,
        )
        self._written = True


def of_current_body() -> FollowUps | None:
    """The follow-ups of the running task, if it can record messages now."""
    run = getattr(current_task, "current_run", None)
    found: FollowUps | None = getattr(run, "follow_ups", None)
    return found if found is not None and found.accepts else None


def pending(
    using: str,
    *,
    record: int | None = None,
    ids: list[int] | None = None,
    older_than: dt.timedelta | None = None,
) -> Iterator[FollowUp]:
    """Unconfirmed messages in the order in which they were written; read in batches."""
    found = FollowUp.objects.using(using).filter(published_at__isnull=True)
    if record is not None:
        found = found.filter(record=record)
    if ids is not None:
        found = found.filter(pk__in=ids)
    if older_than is not None:
        found = found.filter(created_at__lt=Now() - older_than)
    for batch in in_batches(found, BATCH):
        for number, follow_up in enumerate(batch):
            # While those before it were published, its record may have been forgotten.
            if not number or found.filter(pk=follow_up.pk).exists():
                yield follow_up


def publish(app: Celery, messages: Iterable[FollowUp], using: str) -> int:
    """Publish messages, mark those that the broker confirms, and return their number.

    A message that can never be published is logged and stays pending.

    Raises:
        Unpublished: The broker did not accept the rest.
    """
    return sum(_publish(app, follow_up, using) for follow_up in messages)


def publish_all(using: str, *, older_than: dt.timedelta) -> int:
    """Publish all pending messages of a database with the current app; returns their number.

    Raises:
        Unpublished: The broker did not accept the rest.
    """
    return publish(app_or_default(), pending(using, older_than=older_than), using)


def publish_chosen(using: str, ids: Iterable[int]) -> Iterator[FollowUp]:
    """Publish those of the messages that are pending; yields each one that was published.

    Raises:
        Unpublished: The broker did not accept the rest.
    """
    app, chosen = app_or_default(), pending(using, ids=list(ids))
    yield from (follow_up for follow_up in chosen if _publish(app, follow_up, using))


def _publish(app: Celery, follow_up: FollowUp, using: str) -> bool:
    try:
        # With ``maybe_signature``, the tasks of a canvas would have no app.
        signature: Any = Signature.from_dict(json.loads(follow_up.message), app=app)
        # Its own tenant counts, and not who is active here.
        with tenancy.override(scope_of(signature.options.get("headers"))):
            if signature.get("subtask_type"):
                signature.apply_async()
            else:
                with confirming(app) as options:
                    signature.apply_async(add_to_parent=False, **options)
    except Exception as error:
        _mark(follow_up, using, error=results.describe(error))
        away = is_outage(app, error) or database_errors.is_away_or_busy(error)
        if away or isinstance(error, SoftTimeLimitExceeded):
            raise Unpublished(f"{follow_up} is not published: {error}") from error
        logger.exception(
            "Outbox message %s cannot be published", follow_up, task_id=follow_up.task_id
        )
        return False
    # The broker has the arguments now; keep no copy of them.
    _mark(follow_up, using, error="", message="", published_at=Now())
    return True


def _mark(follow_up: FollowUp, using: str, **facts: Any) -> None:
    mine = FollowUp.objects.using(using).filter(pk=follow_up.pk, published_at__isnull=True)
    try:
        mine.update(**facts)
    except Error as error:
        # It will be published again, with the same id.
        logger.warning(
            "Outbox message %s: its state was not written: %s",
            follow_up,
            error,
            task_id=follow_up.task_id,
        )


def _encode(signature: Signature) -> str:
    """The signature as text.

    Raises:
        TypeError, ValueError: It cannot be written as JSON, or is too large.
    """
    mark(signature)
    try:
        text: str = json.dumps(signature)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the message of task {signature.task!r} cannot be recorded: {error}"
        ) from error
    if len(text) > MAX_MESSAGE:
        raise ValueError(
            f"the message of task {signature.task!r} has {len(text)} characters as JSON, and "
            f"{MAX_MESSAGE} can be recorded: pass a key of a row or file instead"
        )
    return text
