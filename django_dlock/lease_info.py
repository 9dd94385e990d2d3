"""What operators see of leases and waiters, and what they ask for: sorted, filtered, in pages.

``lease`` has all of these names, too, and is the path to import them from.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .process import ProcessIdentity
from .text.printable import printable
from .text.request_path import cut

__all__ = [
    "HOLDING",
    "KINDS",
    "OWNER_PART",
    "SEARCHED",
    "SORT_KEYS",
    "HolderState",
    "Kind",
    "LeaseInfo",
    "LeasePage",
    "LeaseQuery",
    "Waiter",
    "in_order",
]

Kind = Literal["held", "cooling", "parked", "reserved"]
"""``held`` by a process; ``cooling`` after a release with ``min_hold``; ``parked`` between
retries of a task; ``reserved`` for a task in its queue. Rules about dead processes and about exit
apply to ``held`` only."""

KINDS: tuple[Kind, ...] = ("held", "cooling", "parked", "reserved")

HolderState = Literal["alive", "silent", "dead", "unknown"]
"""``alive``: a heartbeat within 15 s. ``silent``: none; it may wake up. ``dead``: proven dead.
``unknown``: the lease belongs to no process (cooling, parked, reserved) or names none."""

HOLDING = "dlock_holding"
"""The key of a request's metadata that says which leases its caller, a thread or an asyncio task,
held when it asked: the first ``OWNER_PART`` characters of each owner, separated by spaces. It is
left out if there are none. So operators see which holder waits for which other lock."""
OWNER_PART = 16
"""Enough to tell random owners apart."""

_KINDS: dict[Kind, str] = {
    "cooling": "released, but kept until its min_hold is over",
    "parked": "kept for the next retry of the task",
    "reserved": "reserved for a task that waits in its queue",
}


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One lease as an operator sees it, read from the backend in one step.

    Attributes:
        acquired_at: An aware datetime, by the backend's clock.
        age: Seconds since the grant.
        ttl: Seconds left; ``None`` for a damaged entry that would never end.
        renewals: How often it was renewed.
        waiting: How many threads and coroutines of all processes wait for the name.
        process: The holder's process.
        holder_state: See ``HolderState``.
        metadata: The holder's context (``task_name``, ``task_id``, ``path``, ``user``) and the
            user's own data.
        silent_for: Seconds since the last heartbeat of the process; ``None`` if not known.
        granted_ttl: Seconds that the last grant or renewal gave; ``None`` if not known.
        damaged: What in the store is not as this package writes it, such as ``metadata``; the
            attributes then have values that say nothing.
        unknown: Those of ``renewals``, ``ttl`` and ``waiting`` that the store does not know; then
            ``renewals`` and ``waiting`` are 0, and ``ttl`` is the most that may be left.
    """

    name: str
    alias: str
    kind: Kind
    owner: str
    token: int
    acquired_at: dt.datetime
    age: float
    ttl: float | None
    renewals: int
    waiting: int
    process: ProcessIdentity | None
    holder_state: HolderState
    metadata: Mapping[str, Any] = field(default_factory=dict)
    silent_for: float | None = None
    granted_ttl: float | None = None
    damaged: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def renewed_ago(self) -> float | None:
        """Seconds since the last renewal, or since the grant; ``None`` if not known."""
        if self.ttl is None or not self.granted_ttl or "ttl" in self.unknown:
            return None
        return max(0.0, self.granted_ttl - self.ttl)

    @property
    def is_late(self) -> bool:
        """Whether a lease that was renewed before has not been renewed for half its TTL.

        Renewals are due after a third of the TTL; after half of it, its holder is in doubt, too.
        A lease that was never renewed may be one that is not to be (``renew=False``).
        """
        ago = self.renewed_ago
        is_renewed = self.kind == "held" and self.renewals > 0
        return is_renewed and ago is not None and ago > (self.granted_ttl or 0.0) / 2

    @property
    def holder(self) -> str:
        """A description of the holder for exceptions and logs."""
        who = _described(self.metadata, self.process if self.kind == "held" else None)
        if self.kind != "held":
            who.append(_KINDS[self.kind])
        since = self.acquired_at.strftime("%Y-%m-%d %H:%M:%S UTC")
        return ", ".join([*who, f"since {since} ({self.age:.1f} s)"])

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that commands print; its keys are public. What is unknown is ``None``."""
        facts = {
            "name": self.name,
            "alias": self.alias,
            "kind": self.kind,
            "owner": self.owner,
            "token": self.token,
            "holder": _facts(self.metadata, self.process),
            "holder_state": self.holder_state,
            "acquired_at": self.acquired_at.isoformat(),
            "age": self.age,
            "ttl": self.ttl,
            "renewals": self.renewals,
            "waiting": self.waiting,
            "damaged": list(self.damaged),
            "unknown": list(self.unknown),
        }
        return {**facts, **dict.fromkeys(self.unknown)}


@dataclass(frozen=True, slots=True)
class Waiter:
    """A thread or coroutine that waits for a name, as an operator sees it.

    Attributes:
        owner: The owner that its lease will have.
        since: When it began to wait, an aware datetime by the backend's clock.
        waited: Seconds since then.
        process: The waiter's process; ``None`` if it is not known.
        state: Of that process; see ``HolderState``. A waiter that is ``dead`` gets no lease.
        metadata, damaged: As of ``LeaseInfo``.
    """

    name: str
    alias: str
    owner: str
    since: dt.datetime
    waited: float
    process: ProcessIdentity | None
    state: HolderState
    metadata: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()

    @property
    def holding(self) -> tuple[str, ...]:
        """The beginnings of the owners of the leases that the waiter holds; see ``HOLDING``."""
        value = self.metadata.get(HOLDING)
        return tuple(value.split()) if isinstance(value, str) else ()

    @property
    def who(self) -> str:
        """A description of the waiter; empty if nothing is known."""
        return ", ".join(_described(self.metadata, self.process))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that commands print; its keys are part of the public interface."""
        return {
            "owner": self.owner,
            "waiter": _facts(self.metadata, self.process),
            "state": self.state,
            "since": self.since.isoformat(),
            "waited": self.waited,
            "damaged": list(self.damaged),
        }


def _described(metadata: Mapping[str, Any], process: ProcessIdentity | None) -> list[str]:
    """Task or request, and process; a path may contain any character, so they are escaped."""
    what = str(metadata.get("path") or metadata.get("task_name") or "")
    if what and metadata.get("task_id"):
        what = f"{what}[{metadata['task_id']}]"
    if what and metadata.get("task_name"):
        what = f"task {what}"
    elif what.startswith("/"):
        what = f"request {what}"
    who = [what] if what else []
    if process is not None:
        who.append(f"process {process.pid} on {process.host}")
    # A value of another program may be huge.
    return [cut(printable(text)) for text in who]


def _facts(metadata: Mapping[str, Any], process: ProcessIdentity | None) -> dict[str, Any]:
    return {
        "host": process.host if process else None,
        "pid": process.pid if process else None,
        **{key: metadata.get(key) for key in ("task_name", "task_id", "path", "user")},
    }


def _trouble(info: LeaseInfo) -> int:
    # Only operators need it.
    from .trouble import trouble

    return trouble(info)


SORT_KEYS: dict[str, Callable[[LeaseInfo], Any]] = {
    "name": lambda info: info.name,
    "alias": lambda info: info.alias,
    "kind": lambda info: info.kind,
    "holder": lambda info: (by.host, by.pid) if (by := info.process) else ("", 0),
    "holder_state": lambda info: info.holder_state,
    # By the time of the grant, because the aliases measure ages at different moments. If two are
    # equal, the higher token is younger.
    "age": lambda info: (-info.acquired_at.timestamp(), -info.token),
    # A damaged entry would never end, so it counts as the longest.
    "ttl": lambda info: float("inf") if (left := info.ttl) is None else left,
    "renewals": lambda info: -1 if "renewals" in info.unknown else info.renewals,
    "token": lambda info: info.token,
    "waiting": lambda info: -1 if "waiting" in info.unknown else info.waiting,
    "trouble": _trouble,
}
"""The keys that leases can be sorted by. A number that is not known is less than 0."""

SEARCHED = ("task_name", "task_id", "path")
"""The keys of the metadata in which ``LeaseQuery.contains`` is searched for."""


@dataclass(frozen=True, slots=True)
class LeaseQuery:
    """Which leases an operator wants to see, and in which order.

    Attributes:
        prefix: Only names that begin with this.
        contains: Only leases with this text (case-sensitive) in their name, or in one of the
            ``SEARCHED`` keys of their metadata.
        kind, holder_state: Only these; empty for any.
        host, task: Only leases of a process on a host, or with a ``task_name`` in their metadata,
            that begins with this.
        older_than: Only leases granted at least this many seconds ago.
        waiting: Only those that somebody is known to wait for.
        sort: Names in ``SORT_KEYS``, the most important first; a ``-`` in front sorts in
            descending order. Equal leases, and all without ``sort``, are in the order of grants.
    """

    prefix: str = ""
    contains: str = ""
    kind: str = ""
    holder_state: str = ""
    sort: Sequence[str] = ()
    host: str = ""
    task: str = ""
    older_than: float = 0.0
    waiting: bool = False

    def __post_init__(self) -> None:
        unknown = [key for key in self.sort if key.removeprefix("-") not in SORT_KEYS]
        if unknown or isinstance(self.sort, str):
            raise ValueError(f"sort is {self.sort!r}; it takes a sequence of {list(SORT_KEYS)}")
        if not 0 <= self.older_than < float("inf"):
            raise ValueError(f"older_than is {self.older_than!r}; it takes 0 or more seconds")

    def matches(self, info: LeaseInfo) -> bool:
        return (
            info.name.startswith(self.prefix)
            and self.kind in ("", info.kind)
            and (not self.contains or self.contains in info.name or self._is_in(info.metadata))
            and (not self.task or self._is_of_task(info.metadata))
            and (not self.host or self._is_on_host(info))
            and (not self.older_than or info.age >= self.older_than)
            and (not self.waiting or info.waiting > 0)
            # Last, because it takes longest to find out.
            and (not self.holder_state or self.holder_state == info.holder_state)
        )

    def _is_in(self, metadata: Mapping[str, Any]) -> bool:
        facts = (metadata.get(key) for key in SEARCHED)
        return any(isinstance(fact, str) and self.contains in fact for fact in facts)

    def _is_of_task(self, metadata: Mapping[str, Any]) -> bool:
        task = metadata.get("task_name")
        return isinstance(task, str) and task.startswith(self.task)

    def _is_on_host(self, info: LeaseInfo) -> bool:
        process = info.process
        return process is not None and process.host.startswith(self.host)


class LeasePage(NamedTuple):
    """Some of the leases that a query finds.

    Attributes:
        total: The number of all leases that it finds.
    """

    infos: list[LeaseInfo]
    total: int


def in_order(infos: Iterable[LeaseInfo], sort: Sequence[str]) -> list[LeaseInfo]:
    """Sort as ``LeaseQuery.sort`` says; equal leases keep their order."""
    found = list(infos)
    for key in reversed(sort):
        found.sort(key=SORT_KEYS[key.removeprefix("-")], reverse=key.startswith("-"))
    return found
