"""The lock of a task between two of its runs: parked by the one, taken up by the next.

``retry()`` publishes its message while the body still runs under the lease. So the owner that
the lease is to have meanwhile is drawn before the body, and travels in the message's trail::

    body    retry() publishes, naming P … record waits, lease passes to P for countdown + grace
    retry                                    … takes P's place with an owner of its own, body …

Nobody renews a parked lease. Whoever names its owner takes its place, in one step of the
backend, once: a second copy of the retry's message meets the first one's lease. A retry that
finds nothing parked, because it lapsed or was broken, acquires as any delivery does.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import Retry

from .. import undo
from ..exceptions import LockError
from ..handler import locks
from ..lease import LeaseRequest
from .contention import DeliveryLock
from .moments import seconds_until
from .options import TaskOptions
from .requeue import LONGEST_DELAY, Trail

if TYPE_CHECKING:
    from .delivery import Delivery
    from .task import LockedTask

__all__ = ["GRACE", "park", "revoked", "trail_of_body"]

logger = logging.getLogger("django_dlock")

GRACE = LONGEST_DELAY
"""Seconds, or the lock's TTL if that is longer, for which a lease stays parked after the
countdown: the retry waits in its queue, and may be put back once."""


def trail_of_body(delivery: Delivery) -> Trail:
    """What a retry that the body publishes shall carry."""
    lock, mark = delivery.hold, ""
    # In eager mode the retry runs when this run has ended, and nobody comes in between.
    if delivery.options.across_retries and isinstance(lock, DeliveryLock) and not delivery.eager:
        mark = f"{secrets.token_hex(16)}:{lock.name}"
    trail = delivery.trail.rested()
    return trail if trail.parked == mark else replace(trail, parked=mark)


def park(delivery: Delivery, retry: Retry) -> bool:
    """Let the lease wait for the retry; false where it is still to be released.

    Never raises: the run is decided.
    """
    lock, (owner, _) = delivery.hold, delivery.trail.parked_as
    if not owner or not isinstance(lock, DeliveryLock):
        return False
    try:
        if not _comes_for(delivery, lock, retry):
            return False
        ttl = _seconds_until(delivery.task, retry.when) + max(GRACE, lock.ttl)
        lock.pass_to(owner, kind="parked", ttl=ttl)
    except Exception as error:
        # Project code that makes keys; or the soft time limit, at this very moment.
        logger.warning(
            "Task %s[%s]: its lock is not kept until its retry: %s",
            delivery.task.name,
            delivery.request.id,
            error,
            exc_info=None if isinstance(error, LockError) else error,
        )
        return False
    return True


def revoked(sender: Any, request: Context, **_: Any) -> None:
    """Receives ``task_revoked`` in the worker's parent: the retry was revoked, or has expired.

    It will never run, and no delivery says so.
    """
    options = getattr(sender, "dlock_options", None)
    owner, name = Trail.of(request).parked_as
    if owner and isinstance(options, TaskOptions):
        # In the background: this is the worker's loop.
        undo.schedule(locks[options.lock["using"]], LeaseRequest(name, owner, GRACE))


def _comes_for(delivery: Delivery, lock: DeliveryLock, retry: Retry) -> bool:
    """Whether the retry was published, names the owner, and will want this very lock."""
    message: Any = getattr(retry, "sig", None)
    key = delivery.options.lock_key
    # Without a message it was raised by hand: nobody would ever come.
    if message is None or key is None:
        return False
    headers = Context({"headers": message.options.get("headers")})
    if Trail.of(headers).parked != delivery.trail.parked:
        return False
    # ``retry(args=...)`` may ask for another one.
    return key(tuple(message.args), dict(message.kwargs)) == lock.name


def _seconds_until(task: LockedTask, when: Any) -> float:
    """From now until the time of a retry: seconds, a moment, its text, or ``None``."""
    return max(0.0, seconds_until(task.app, when)) if when else 0.0
