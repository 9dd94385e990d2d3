"""Publishes a task unless it is pending already (``unique_until``).

    publisher                     backend                    worker
    reserve ───────────────────▶  30 s, drops nobody
    publish ──────────────────────────────────────────────▶  message
    confirm ───────────────────▶  unique_ttl, drops others
                                  free  ◀──────────────────  give back

Whatever is in doubt is published: by a publisher that meets a reservation which is not confirmed,
or gets no answer. Such a message has no reservation of its own, and lock and record decide about
it at the worker.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from celery.utils import uuid

from .. import clock, transactions
from ..exceptions import BackendUnavailable
from ..keys import MAX_NAME, fit
from ..lease import Contention
from .moments import seconds_until
from .options import UniqueOptions
from .requeue import HEADER, Trail, confirming, write_connection
from .reservation import Reservation, pending_task

if TYPE_CHECKING:
    from .task import LockedTask

__all__ = ["POSITIONAL", "publish", "send_safely"]

logger = logging.getLogger("django_dlock")

POSITIONAL = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")
"""Arguments of ``apply_async`` that need not be named."""

OF_A_CANVAS = (
    *("link", "link_error", "chain", "chord", "group_id", "group_index"),
    *("root_id", "parent_id", "reply_to"),
)
"""Arguments of ``apply_async`` that a canvas sets. Somebody waits for such a task, under the id
that it was given, or has it do something afterwards."""

Call = dict[str, Any]
Send = Callable[..., Any]


def publish(task: LockedTask, unique: UniqueOptions, send: Send, call: Call) -> Any:
    """Publish a call, or give the result of the task that is pending.

    Args:
        send: Celery's ``apply_async``.
        call: Its arguments, by name.

    Raises:
        TypeError: The arguments make no key.
        Exception: Whatever publishing raises; nothing stays reserved then.
    """
    inside = _inside(task)
    given = call.get("task_id")
    if call.get("retries") or (inside and given == inside):
        # ``retry()`` or ``replace()``: the task itself, which is not to meet itself.
        return send_safely(task, send, _retried(task, unique, call))
    headers = {key: value for key, value in (call.get("headers") or {}).items() if key != HEADER}
    call = {**call, "headers": headers, "task_id": given or uuid()}
    began, life = clock.now(), _life(task, unique, call)
    if life <= 0:
        # It expires at once.
        return send(**call)
    reservation = Reservation(
        task.dlock_options.lock["using"],
        _name(task, unique, call),
        secrets.token_hex(16),
        call["task_id"],
        life,
    )
    try:
        met = reservation.reserve(task.name)
    except BackendUnavailable as error:
        logger.warning("Task %s is published without a reservation: %s", task.name, error)
        return send(**call)
    if met is not None:
        pending = _dropped_for(unique, call, met)
        if pending and pending not in (inside, given):
            logger.info("Task %s is pending already, as %s: not published", task.name, pending)
            return _result(task, call, pending)
        return send(**call)
    headers[HEADER] = asdict(Trail(reserved=reservation.mark))
    try:
        result = send_safely(task, send, call)
    except BaseException:
        reservation.give_back()
        raise
    _confirm(task, replace(reservation, ttl=began + life - clock.now()))
    return result


def _dropped_for(unique: UniqueOptions, call: Call, met: Contention) -> str:
    """The id of the task for which a call is not published; empty where it is all the same."""
    if any(call.get(argument) for argument in OF_A_CANVAS):
        return ""
    if unique.until == "start" and transactions.any_open():
        # The pending task may begin before the commit, and see nothing of what it is about.
        return ""
    return pending_task(met)


def send_safely(task: LockedTask, send: Send, call: Call) -> Any:
    """Publish; when this returns the broker has the message.

    Only then may others be dropped for it, or the message be acknowledged whose retry it is.
    """
    own = write_connection(task.app).as_uri()
    producer = call.get("producer")
    if call.get("connection") or (producer and producer.connection.as_uri() != own):
        # To another broker, and as the caller knows it.
        return send(**call)
    with confirming(task.app) as options:
        return send(**{**call, **options})


def _confirm(task: LockedTask, reservation: Reservation) -> None:
    if reservation.ttl <= 0:
        return
    try:
        fate = reservation.confirm()
    except BackendUnavailable as error:
        logger.warning("Task %s: its reservation may not be confirmed: %s", task.name, error)
        return
    if fate not in ("renewed", "released"):
        # Given back already by a fast worker is as it should be.
        logger.warning("Task %s: its reservation could not be confirmed: %s", task.name, fate)


def _retried(task: LockedTask, unique: UniqueOptions, call: Call) -> Call:
    """The call of a retry. It carries the reservation on, unless its arguments make another key."""
    headers = call.get("headers") or {}
    trail = headers.get(HEADER)
    if not isinstance(trail, Mapping):
        return call
    reservation = Reservation.read(task, trail.get("reserved"), call.get("task_id"))
    if reservation is None or reservation.name == _name(task, unique, call):
        return call
    reservation.give_back()
    return {**call, "headers": {**headers, HEADER: {**trail, "reserved": ""}}}


def _name(task: LockedTask, unique: UniqueOptions, call: Call) -> str:
    """The reservation's name for the arguments of a call."""
    args, kwargs = call.get("args") or (), call.get("kwargs") or {}
    dump = getattr(task, "_dump_pydantic_arguments", None)
    if dump is not None:
        # What becomes of models on their way through the queue.
        args, kwargs = dump(args, kwargs)
    # Where the task's name ends must be plain: "a" with "b:1" is not "a:b" with "1".
    name = task.name.replace("%", "%25").replace(":", "%3A")
    return fit(f"unique:{name}:{unique.key(args, kwargs)}", MAX_NAME)


def _life(task: LockedTask, unique: UniqueOptions, call: Call) -> float:
    """Seconds from now for which the reservation of a call may drop others."""
    life = unique.ttl
    if call.get("countdown") or call.get("eta"):
        life += max(0.0, seconds_until(task.app, call.get("countdown") or call["eta"]))
    expires = call.get("expires", task.expires)
    # Not for longer than there is a message to be run.
    return life if expires is None else min(life, seconds_until(task.app, expires))


def _inside(task: LockedTask) -> str | None:
    """The id of the task whose body publishes."""
    running = task.app.current_worker_task
    return running.request.id if running else None


def _result(task: LockedTask, call: Call, task_id: str) -> Any:
    """What publishing would have given, for another task id."""
    result = task.AsyncResult(task_id)
    result.ignored = call.get("ignore_result", task.ignore_result)
    running = task.app.current_worker_task
    if running and call.get("add_to_parent", True):
        running.add_trail(result)
    return result
