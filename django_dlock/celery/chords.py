"""What a member of a chord has to know of its chord, where Celery's Redis backend counts it.

Before 5.7 that backend does not see that a member comes again, and since then it sees it, but
lets one worker claim to send the body. Both are kept in keys beside those of the results.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery import Task, states
from celery.app.task import Context

from .requeue import PutBack

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = ["ChordClaimed", "await_claim", "counted_result"]

logger = logging.getLogger("django_dlock")

DONE = (b"done", "done")


class ChordClaimed(Exception):
    """Another delivery is sending the chord's body, or died while it did."""


def await_claim(delivery: Delivery) -> None:
    """Put a member back while somebody sends the body of its chord, or has died while they did.

    A worker claims that once all members are counted. So this one is, too, and comes again. If
    the claimant is dead, a repeat that ends before the claim does changes nothing, and nobody is
    left to send the body.

    Raises:
        PutBack: Claimed; or the result backend does not answer.
    """
    request, backend = delivery.request, _counting(delivery.task, delivery.request)
    if backend is None or not _claims(backend):
        return
    try:
        claim = backend.get(backend.get_key_for_group(request.group, ".c"))
    except backend.connection_errors as error:
        raise PutBack(error, delivery.trail) from error
    if claim and claim not in DONE:
        reason = ChordClaimed(f"The body of chord {request.group} is being sent")
        # A claim lasts for seconds: looked at again every second or two.
        raise PutBack(reason, replace(delivery.trail, count=min(delivery.trail.count, 2)))


def counted_result(task: Task[Any, Any], request: Context, result: Any) -> Any:
    """The result with which this member was counted before, where it was; else ``result``.

    Another result would be counted beside the first one, and the body sent with both of them
    and without that of another member.
    """
    backend = _counting(task, request)
    if backend is None or _claims(backend) or not backend._chord_zset:
        return result
    place = "+inf" if request.group_index is None else request.group_index
    counted = backend.get_key_for_group(request.group, ".j")
    try:
        members = backend.client.zrangebyscore(counted, place, place)
    except backend.connection_errors as error:
        # The work is done. What Celery does next with the result meets the same outage.
        logger.warning("Chord %s: who is counted cannot be asked: %s", request.group, error)
        return result
    for member in members:
        _, task_id, state, first = backend.decode(member)
        if task_id == request.id and state == states.SUCCESS:
            return first
    return result


def _counting(task: Task[Any, Any], request: Context) -> Any:
    """The Redis backend that counts the request among the members of a chord, if one does."""
    if request.is_eager or not (request.chord and request.group):
        return None
    return task.backend if hasattr(type(task.backend), "_chord_zset") else None


def _claims(backend: Any) -> bool:
    """Whether the backend is of a Celery since 5.7."""
    return hasattr(type(backend), "_chord_cleanup_script")
