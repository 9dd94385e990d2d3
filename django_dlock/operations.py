"""What operators do to locks, for the admin and for the commands alike.

Everything here asks every alias by itself: one that does not answer is named, and hides none
of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from . import events, signals
from .backends.base import BaseLockBackend
from .exceptions import BackendUnavailable, InvalidLockBackend
from .handler import locks
from .lease import LeaseInfo
from .lock import Lock

__all__ = ["Survey", "break_lease", "duration", "is_running"]

T = TypeVar("T")


class Survey:
    """Puts questions to several aliases and keeps what is wrong with each.

    Attributes:
        problems: Alias → why it gave no answer, as text for an operator.
    """

    def __init__(self, aliases: Iterable[str]) -> None:
        self.aliases = list(aliases)
        self.problems: dict[str, str] = {}

    def ask(self, question: Callable[[BaseLockBackend], T]) -> dict[str, T]:
        """The answer of each alias that gives one.

        An alias that failed once is not asked again: every question to a dead server costs its
        whole ``command_timeout``.
        """
        answers: dict[str, T] = {}
        for alias in self.aliases:
            if alias in self.problems:
                continue
            try:
                backend = locks[alias]
                if backend.supports_listing:
                    answers[alias] = question(backend)
                else:
                    self.problems[alias] = f"Alias {alias!r} cannot list its locks."
            except (BackendUnavailable, InvalidLockBackend) as error:
                self.problems[alias] = str(error)
        return answers


def is_running(info: LeaseInfo) -> bool:
    """Whether work may be going on under the lease, so that ending it needs force.

    A silent holder may wake up, and a parked or reserved lease is counted on by a task that
    waits. Only a proof of death, the rest of a ``min_hold`` and a damaged entry that would
    never end are safe.
    """
    if info.holder_state == "dead" or info.kind == "cooling":
        return False
    return info.ttl is not None or info.holder_state == "alive"


def break_lease(info: LeaseInfo, *, reason: str) -> bool:
    """End the lease that ``info`` was read from, and send ``broken``.

    Args:
        reason: Who did it, ``operator`` or ``command``; goes out with the signal.

    Returns:
        False where the name has another owner by now, or none: nothing was changed.

    Raises:
        BackendUnavailable: The outcome is unknown; it may be repeated.
    """
    if not locks[info.alias].break_(info.name, owner=info.owner, reason=reason):
        return False
    events.send(
        signals.broken,
        Lock,
        name=info.name,
        alias=info.alias,
        owner=info.owner,
        token=info.token,
        metadata=info.metadata,
        reason=reason,
        held_for=info.age,
    )
    return True


def duration(seconds: float) -> str:
    """A duration in at most two units, such as ``1h 5m`` or ``12.3s``."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes}m"
    return f"{hours // 24}d {hours % 24}h"
