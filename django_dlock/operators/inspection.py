"""What operators can ask and do, for the admin and for the commands.

Every alias is asked separately, so that one that does not answer does not hide the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from .. import signals
from ..backends.base import BaseLockBackend
from ..core import dispatch
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..lease import LeaseInfo
from ..lock import Lock

T = TypeVar("T")


class AliasQuery:
    """Asks several aliases, and collects the errors.

    Attributes:
        problems: Alias → why it did not answer, as text for an operator.
    """

    def __init__(self, aliases: Iterable[str]) -> None:
        self.aliases = list(aliases)
        self.problems: dict[str, str] = {}

    def ask(self, question: Callable[[BaseLockBackend], T]) -> dict[str, T]:
        """The answers of the aliases that give one.

        An alias that has failed is not asked again, because every question to a dead server
        takes its whole ``command_timeout``.
        """
        answers: dict[str, T] = {}
        for alias in self.aliases:
            if alias in self.problems:
                continue
            try:
                backend = locks[alias]
                backend.require_listing()
                answers[alias] = question(backend)
            except NotImplementedError as error:
                self.problems[alias] = f"{error}."
            except (BackendUnavailable, InvalidLockBackend) as error:
                self.problems[alias] = str(error)
        return answers


def is_running(info: LeaseInfo) -> bool:
    """Whether a task or request may rely on the lease, so that ending it needs ``force``.

    A silent holder may wake up, and a waiting task relies on its parked or reserved lease. It is
    safe to end a lease if its holder is proven dead, if only its ``min_hold`` is left, or if it
    is a damaged entry that would never end.
    """
    if info.holder_state == "dead" or info.kind == "cooling":
        return False
    return info.ttl is not None or info.holder_state == "alive"


def break_lease(info: LeaseInfo, *, reason: str) -> bool:
    """End the lease that ``info`` was read from, and send ``broken``.

    Args:
        reason: ``operator`` or ``command``: who ends it; or ``holder_dead``. Sent with the signal.

    Returns:
        ``False`` if the name is free or has another owner by now; then nothing has changed.

    Raises:
        BackendUnavailable: The outcome is unknown; you can repeat the call.
    """
    if not locks[info.alias].break_silently(info.name, owner=info.owner):
        return False
    report_break(info.alias, info.name, info.owner, info, reason=reason)
    return True


def report_break(alias: str, name: str, owner: str, info: LeaseInfo | None, *, reason: str) -> None:
    """Send ``broken``, of which metrics and lock events are made; never blocks.

    Args:
        info: What is known of the lease that was ended.
        reason: See ``break_lease``; or ``code``, if the project has called ``break_``.
    """
    dispatch.send(
        signals.broken,
        Lock,
        name=name,
        alias=alias,
        owner=owner,
        token=info and info.token,
        metadata=info.metadata if info else {},
        # The store does not keep it.
        template="",
        reason=reason,
        process=info and info.process,
        held_for=info and info.age,
        holder_state=info and info.holder_state,
    )


def age_text(info: LeaseInfo) -> str:
    """How long it has been held; a dash if the entry is damaged so that it does not say this."""
    return "-" if {"type", "acquired_at"} & set(info.damaged) else duration(info.age)


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
