"""``lock_across_retries``: the lock of a task between a run and its retry.

``retry()`` publishes its message while the body still runs under the lease. So the owner of the
parked lease, P, is chosen before the body runs, and travels in the message's header::

    run     body calls retry(), which publishes P … the lease passes to P for countdown + grace
    retry   replaces P's lease by its own … body

A parked lease is not renewed. A delivery that names its owner replaces it, in one step of the
backend and only once: a second copy of the retry's message finds the first copy's lease. If the
parked lease has expired or was broken, the retry acquires the lock like any delivery.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from celery.app.task import Context
from celery.exceptions import Retry

from ... import tenancy
from ...core import cleanup
from ...exceptions import LockError
from ...handler import locks
from ...lease import LeaseRequest
from ...log import logger
from ..options import TaskOptions, TaskWithOptions
from ..publishing.header import RequeueHeader
from ..publishing.requeue import LONGEST_DELAY
from ..times import seconds_until
from .context import DeliveryContext
from .locking import DeliveryLock, Guard

GRACE = LONGEST_DELAY
"""Seconds for which a lease stays parked after the countdown, or the lock's TTL if that is longer:
the retry may wait in its queue, and be requeued once."""


def header_of_body(context: DeliveryContext, guard: Guard | None) -> RequeueHeader:
    """The header for a retry that the body publishes."""
    mark = ""
    # In eager mode the retry follows this run at once.
    if context.task.lock_across_retries and isinstance(guard, DeliveryLock) and not context.eager:
        mark = f"{secrets.token_hex(16)}:{guard.name}"
    header = context.header.without_contention()
    return header if header.parked == mark else replace(header, parked=mark)


def park(context: DeliveryContext, guard: Guard | None, retry: Retry) -> bool:
    """Park the lease for the retry; returns ``False`` if the caller has to release it.

    Never raises, because the outcome of the run is decided.
    """
    owner, _ = context.header.parked_as
    if not owner or not isinstance(guard, DeliveryLock):
        return False
    try:
        if not _will_use_parked_lease(context, guard, retry):
            return False
        ttl = _seconds_until(context.task, retry.when) + max(GRACE, guard.ttl)
        guard.pass_to(owner, kind="parked", ttl=ttl)
    except Exception as error:
        # Raised by a project's key function; or the soft time limit, right here.
        logger.warning(
            "Task %s[%s]: the lock is not kept for the retry: %s",
            context.task.name,
            context.request.id,
            error if isinstance(error, LockError) else context.describe(error),
            # A traceback ends with the text of the error.
            exc_info=None if isinstance(error, LockError) or context.is_private else error,
            about=guard,
            task_id=context.request.id,
        )
        return False
    return True


def on_task_revoked(sender: Any, request: Context, **_: Any) -> None:
    """Receives ``task_revoked`` in the worker's parent: the retry was revoked or has expired.

    It never runs, so no delivery releases its parked lease.
    """
    options = getattr(sender, "dlock_options", None)
    owner, name = RequeueHeader.of(request).parked_as
    if owner and isinstance(options, TaskOptions):
        # In the background, because the worker's event loop must not wait.
        cleanup.cancel_later(locks[options.lock["using"]], LeaseRequest(name, owner, GRACE))


def _will_use_parked_lease(context: DeliveryContext, lock: DeliveryLock, retry: Retry) -> bool:
    """Whether the retry was published, carries the parked owner, and needs this same lock."""
    message: Any = getattr(retry, "sig", None)
    key = context.options.lock_key
    # ``Retry`` raised by hand publishes no message, so no retry would use the lease.
    if message is None or key is None:
        return False
    carried = Context({"headers": message.options.get("headers")})
    if RequeueHeader.of(carried).parked != context.header.parked:
        return False
    # ``retry(args=...)`` may need another lock.
    return tenancy.full(key(tuple(message.args), dict(message.kwargs))) == lock.name


def _seconds_until(task: TaskWithOptions, when: Any) -> float:
    """Seconds from now until ``when``, which ``Retry`` has in any of Celery's forms."""
    return max(0.0, seconds_until(task.app, when)) if when else 0.0
