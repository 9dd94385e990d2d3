"""Members of a chord that are delivered more than once, if Celery's Redis backend counts them.

Before Celery 5.7, that backend counts a repeated member twice. Since 5.7 it does not; instead, a
worker claims the body before it sends it. Counts and claims are keys beside those of the results.
"""

from __future__ import annotations

from typing import Any

from celery import Task, states
from celery.app.task import Context

from ...log import logger

DONE = (b"done", "done")


class ChordClaimed(Exception):
    """Another delivery is sending the chord's body, or died while it was doing so."""


def obstacle(task: Task[Any, Any], request: Context) -> Exception | None:
    """The reason why a member of a chord must not run now; ``None`` if it may.

    After all members are counted, one worker claims the right to send the body. If there is a
    claim, this member was counted before, so this delivery is a repeat. It must wait until the
    claim is gone: if the claimant is dead and the repeat ends earlier, the body is never sent.

    Returns:
        ``ChordClaimed``, or an error of the result backend if it does not answer.
    """
    backend = None
    try:
        backend = _counting(task, request)
        if backend is None or not _claims(backend):
            return None
        claim = backend.get(backend.get_key_for_group(request.group, ".c"))
    except Exception as error:
        if isinstance(error, getattr(backend, "connection_errors", ())):
            return error
        logger.warning(
            "Chord %s: cannot read whether its body is being sent",
            request.group,
            exc_info=True,
            task_id=request.id,
        )
        return None
    if claim and claim not in DONE:
        return ChordClaimed(f"The body of chord {request.group} is being sent")
    return None


def counted_result(task: Task[Any, Any], request: Context, result: Any) -> Any:
    """The result with which this member was counted before; ``result`` if it was not.

    A different result would be counted as another member, so the body would get two results of
    this member and none of another one. Never raises, because the work is done.
    """
    try:
        return _counted(task, request, result)
    except Exception:
        # If this is an outage, Celery meets it, too, when it stores the result.
        logger.warning(
            "Chord %s: cannot read which members are counted",
            request.group,
            exc_info=True,
            task_id=request.id,
        )
        return result


def _counted(task: Task[Any, Any], request: Context, result: Any) -> Any:
    backend = _counting(task, request)
    if backend is None or _claims(backend) or not backend._chord_zset:
        return result
    index = "+inf" if request.group_index is None else request.group_index
    counted = backend.get_key_for_group(request.group, ".j")
    for member in backend.client.zrangebyscore(counted, index, index):
        _, task_id, state, first = backend.decode(member)
        if task_id == request.id and state == states.SUCCESS:
            return first
    return result


def _counting(task: Task[Any, Any], request: Context) -> Any:
    """The Redis backend that counts the request as a member of a chord; else ``None``."""
    if request.is_eager or not (request.chord and request.group):
        return None
    return task.backend if hasattr(type(task.backend), "_chord_zset") else None


def _claims(backend: Any) -> bool:
    """Whether the backend is from Celery 5.7 or newer."""
    return hasattr(type(backend), "_chord_cleanup_script")
