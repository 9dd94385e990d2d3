"""Publishes a task unless it is pending already (``unique_until``).

    publisher                     backend                    worker
    reserve ───────────────────▶  30 s, drops no duplicates
    publish ──────────────────────────────────────────────▶  message
    confirm ───────────────────▶  unique_ttl, drops duplicates
                                  free  ◀──────────────────  release

In doubt a task is published: if the reservation that it finds is not confirmed, or the backend
does not answer. Such a message has no reservation; at the worker, lock and record handle it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from celery.utils import uuid

from ... import clock, tenancy
from ...core import transactions
from ...exceptions import BackendUnavailable
from ...lease import Contention
from ...log import logger
from ...text.names import MAX_NAME, fit
from ..options import TaskWithOptions, UniqueOptions
from ..times import seconds_until
from .broker import confirming, write_connection
from .copies import is_marked
from .header import HEADER, RequeueHeader, without_ours
from .reservation import Reservation, pending_task

POSITIONAL = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")
"""Arguments of ``apply_async`` that may be positional."""

OF_A_CANVAS = (
    *("link", "link_error", "chain", "chord", "group_id", "group_index"),
    *("root_id", "parent_id", "reply_to"),
)
"""Arguments of ``apply_async`` that a canvas sets. Such a task is always published, because the
canvas waits for its id, or something follows it."""

Call = dict[str, Any]
Send = Callable[..., Any]


def publish(task: TaskWithOptions, unique: UniqueOptions, send: Send, call: Call) -> Any:
    """Publish a call, or return the result of the task that is already pending.

    Args:
        send: Celery's ``apply_async``.
        call: Its arguments, by name.

    Raises:
        TypeError: No key can be made from the arguments.
        Exception: What publishing raises; the reservation is released then.
    """
    inside = _inside(task)
    given = call.get("task_id")
    if call.get("retries") or (inside and given == inside):
        # ``retry()`` or ``replace()``: the same task, not a duplicate of itself.
        return send_safely(task, send, _retried(task, unique, call))
    headers, outbox = without_ours(call.get("headers")), is_marked(call.get("headers"))
    if outbox:
        headers[HEADER] = {"outbox": outbox}
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
        if met is not None and reservation.is_over(met):
            met = reservation.reserve(task.name, replaces=met.owner)
    except BackendUnavailable as error:
        logger.warning(
            "Task %s is published without a reservation: %s",
            task.name,
            error,
            about=reservation,
        )
        return send(**call)
    if met is not None:
        pending = _dropped_for(unique, call, met)
        if pending and pending not in (inside, given):
            logger.info(
                "Task %s is pending already, as %s: not published",
                task.name,
                pending,
                about=reservation,
            )
            return _result(task, call, pending)
        return send(**call)
    headers[HEADER] = asdict(RequeueHeader(reserved=reservation.mark, outbox=outbox))
    try:
        result = send_safely(task, send, call)
    except BaseException:
        reservation.release_now_or_later()
        raise
    _confirm(task, replace(reservation, ttl=began + life - clock.now()))
    return result


def _dropped_for(unique: UniqueOptions, call: Call, met: Contention) -> str:
    """The id of the pending task for which the call is dropped; empty if it is published."""
    if any(call.get(argument) for argument in OF_A_CANVAS):
        return ""
    if unique.until == "start" and transactions.any_open():
        # The pending task may begin before our commit, and not see what we have written.
        return ""
    return pending_task(met)


def send_safely(task: TaskWithOptions, send: Send, call: Call) -> Any:
    """Publish, and wait until the broker has the message.

    Before that, no duplicate may be dropped, and a retry's old message must not be acknowledged.
    """
    own = write_connection(task.app).as_uri()
    producer = call.get("producer")
    if call.get("connection") or (producer and producer.connection.as_uri() != own):
        # The caller publishes to another broker; leave that to the caller.
        return send(**call)
    with confirming(task.app) as options:
        return send(**{**call, **options})


def _confirm(task: TaskWithOptions, reservation: Reservation) -> None:
    if reservation.ttl <= 0:
        return
    try:
        outcome = reservation.confirm()
    except BackendUnavailable as error:
        logger.warning(
            "Task %s: its reservation may not be confirmed: %s",
            task.name,
            error,
            about=reservation,
        )
        return
    if outcome not in ("renewed", "released"):
        # ``released`` is fine: a fast worker has finished the task already.
        logger.warning(
            "Task %s: its reservation could not be confirmed: %s",
            task.name,
            outcome,
            about=reservation,
            reason=outcome,
        )


def _retried(task: TaskWithOptions, unique: UniqueOptions, call: Call) -> Call:
    """The call of a retry; it keeps the reservation, unless its arguments have another key."""
    headers = call.get("headers") or {}
    header = headers.get(HEADER)
    if not isinstance(header, Mapping):
        return call
    reservation = Reservation.read(task, header.get("reserved"), call.get("task_id"))
    if reservation is None or reservation.name == _name(task, unique, call):
        return call
    reservation.release_now_or_later()
    return {**call, "headers": {**headers, HEADER: {**header, "reserved": ""}}}


def _name(task: TaskWithOptions, unique: UniqueOptions, call: Call) -> str:
    """The reservation's name for the arguments of a call."""
    args, kwargs = call.get("args") or (), call.get("kwargs") or {}
    dump = getattr(task, "_dump_pydantic_arguments", None)
    if dump is not None:
        # As the worker will get them: Celery turns Pydantic models into dictionaries.
        args, kwargs = dump(args, kwargs)
    # Escaped, so that task "a" with key "b:1" differs from task "a:b" with key "1".
    name = task.name.replace("%", "%25").replace(":", "%3A")
    return tenancy.full(fit(f"unique:{name}:{unique.key(args, kwargs)}", MAX_NAME))


def _life(task: TaskWithOptions, unique: UniqueOptions, call: Call) -> float:
    """Seconds from now for which the reservation of a call drops duplicates."""
    life = unique.ttl
    if call.get("countdown") or call.get("eta"):
        life += max(0.0, seconds_until(task.app, call.get("countdown") or call["eta"]))
    expires = call.get("expires", task.expires)
    # A message that has expired never runs, so the reservation ends with it.
    return life if expires is None else min(life, seconds_until(task.app, expires))


def _inside(task: TaskWithOptions) -> str | None:
    """The id of the running task that publishes; ``None`` outside a task."""
    running = task.app.current_worker_task
    return running.request.id if running else None


def _result(task: TaskWithOptions, call: Call, task_id: str) -> Any:
    """What publishing would have returned, but with the id ``task_id``."""
    result = task.AsyncResult(task_id)
    result.ignored = call.get("ignore_result", task.ignore_result)
    running = task.app.current_worker_task
    if running and call.get("add_to_parent", True):
        running.add_trail(result)
    return result
