"""Calls signal receivers and ``on_lost``, writes log lines and counts, on threads of its own.

User code must not run on the renewal thread, and a receiver that hangs must not stop renewals,
releases, or other reports. So each kind of report has a queue with a thread; see ``event_queue``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.dispatch import Signal

from ..log import logger
from .event_call import key_of
from .event_queue import EventQueue
from .supervisor import LOG_HANDLER, PATIENCE_AT_EXIT, Supervisor

__all__ = [
    "PATIENCE_AT_EXIT",
    "assign",
    "call_on_lost",
    "call_receivers_at_once",
    "drain",
    "flush",
    "has_receivers",
    "is_stranded",
    "late_releases",
    "log_error",
    "log_warning",
    "log_warning_later",
    "metrics",
    "nudge",
    "prepare",
    "rows",
    "send",
    "settle",
    "spans",
    "take_part_in_forks",
]

ON_LOST_WAITS = 0.5
"""Seconds for which the ``on_lost`` of one lock waits for that of another."""
ON_LOST_AT_ONCE = 4
"""Calls of one ``on_lost`` function that may hang before its next ones wait for them."""

_supervisor = Supervisor()

spans = EventQueue(_supervisor, "dlock-spans")
"""Makes spans: an exporter may block."""
metrics = EventQueue(_supervisor, "dlock-metrics")
"""Counts: an exporter may block."""
_on_lost = EventQueue(
    _supervisor,
    "dlock-on-lost",
    calls_users=True,
    given_up_after=ON_LOST_WAITS,
    most_at_once=ON_LOST_AT_ONCE,
    uses_databases=True,
)
# One after another, and not at the same time, because receivers of several signals may rely on the
# order of the events.
_receivers = EventQueue(_supervisor, "dlock-receivers", calls_users=True, uses_databases=True)
late_releases = EventQueue(_supervisor, "dlock-late-releases")
"""Releases that a transaction has left behind."""
rows = EventQueue(
    _supervisor,
    "dlock-lock-events",
    uses_databases=True,
    undone="%s was not written before the process ended",
)
"""Writes rows. While one call hangs, the next ones wait, so that no further connection hangs."""

_queues: dict[int, EventQueue | None] = {}
"""The package's own receivers, and where they are called; ``None``: at once."""

drain = _supervisor.drain
flush = _supervisor.flush
settle = _supervisor.settle
prepare = _supervisor.prepare
take_part_in_forks = _supervisor.take_part_in_forks


def is_stranded() -> bool:
    """Whether calls wait and no thread can start, because the interpreter ends."""
    return _supervisor.is_stranded


def nudge() -> None:
    """Wake the threads for what was only ``put`` into their queues."""
    for queue in _supervisor.queues:
        queue.nudge()


# -- log lines -------------------------------------------------------------------------


def log_warning(message: str, *args: Any, **facts: Any) -> None:
    """Log on another thread, because a project's log handlers may hang, too."""
    _supervisor.tell(logging.WARNING, message, *args, **facts)


def log_warning_later(message: str, *args: Any, **facts: Any) -> None:
    """As ``log_warning``, with the next line or the watchdog's next turn; starts no thread.

    For code that runs during garbage collection, where starting a thread would let others run.
    """
    line = logger.line(logging.WARNING, message, *args, **facts)
    _supervisor.logs.put(lambda: logger.write(line), LOG_HANDLER)


def log_error(error: BaseException, message: str, *args: Any, **facts: Any) -> None:
    """Log an error that should not happen, with its traceback."""
    _supervisor.tell(logging.ERROR, message, *args, exc_info=error, **facts)


# -- functions of the project ----------------------------------------------------------


def call_on_lost(on_lost: Callable[..., object], call: Callable[[], object]) -> None:
    """Make the call of an ``on_lost`` function."""
    _on_lost.post(call, on_lost, key_of(on_lost))


def has_receivers(signal: Signal, sender: type) -> bool:
    """Whether the signal has receivers; very cheap if it has none."""
    return bool(signal.receivers) and signal.has_listeners(sender)


def send(signal: Signal, sender: type, **facts: Any) -> None:
    """Call the receivers of a signal, each in its queue."""
    if not signal.receivers:
        return
    # Not ``send_robust``, which says nothing of the receiver that hangs.
    live: Any = signal._live_receivers
    plain, coroutines = live(sender)
    for receiver in plain:
        call = partial(_receive, receiver, False, signal, sender, facts)
        queue = _queues.get(id(getattr(receiver, "__func__", receiver)), _receivers)
        if queue is None:
            call()
        else:
            queue.post(call, receiver, _key_of_receiver(receiver))
    for receiver in coroutines:
        call = partial(_receive, receiver, True, signal, sender, facts)
        _receivers.post(call, receiver, _key_of_receiver(receiver))


def assign(receiver: Callable[..., object], queue: EventQueue) -> None:
    """Let one of the package's own receivers be called in this queue.

    Args:
        receiver: A function that lives as long as the process; of a method, its function.
    """
    _queues[id(receiver)] = queue


def call_receivers_at_once(*receivers: Callable[..., object]) -> None:
    """Let ``send`` call these of the package's own receivers, which only post to a queue."""
    for receiver in receivers:
        _queues[id(receiver)] = None


def _key_of_receiver(receiver: Any) -> tuple[int, int]:
    # A method is a new object each time; those of two objects are two receivers.
    return id(getattr(receiver, "__func__", receiver)), id(getattr(receiver, "__self__", None))


def _receive(
    receiver: Any, is_async: bool, signal: Signal, sender: type, facts: dict[str, Any]
) -> None:
    try:
        call = async_to_sync(receiver) if is_async else receiver
        call(signal=signal, sender=sender, **facts)
    except Exception as error:  # noqa: BLE001 - as ``send_robust``
        _supervisor.tell(
            logging.ERROR, "Receiver %r of a lock signal raised", receiver, exc_info=error
        )
