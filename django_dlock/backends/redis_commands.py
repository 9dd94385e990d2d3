"""What is said to Redis and how its answers are read, without doing any I/O.

Shared by threads and coroutines, which differ in how they wait and in nothing else.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from .. import clock
from ..lease import Contention, Fate, Kind, Lease, LeaseRequest, Renewal
from ..process import ProcessIdentity, current
from . import redis_scripts as scripts
from .base import Fates
from .describe import process_from_json
from .redis_scripts import FATES, Script

__all__ = ["RENEWALS_PER_CALL", "Command", "Commands", "Keys", "text"]

RENEWALS_PER_CALL = 500
UNDONE_FOR = 120.0
"""Seconds, besides the TTL, for which an undone attempt cannot be granted any more."""

T = TypeVar("T")


def text(field: Any) -> str:
    # A stranger's bytes in a name must not keep the operator from seeing the other names.
    return field.decode("utf-8", "replace") if isinstance(field, bytes) else str(field)


def _ms(seconds: float) -> int:
    # Up, and one more for the server's own rounding: the backend's end is never the earlier.
    return math.ceil(seconds * 1000) + 1


@functools.lru_cache(maxsize=1)
def _process_json(process: ProcessIdentity) -> str:
    return json.dumps(process.as_dict(), separators=(",", ":"))


class Keys:
    """Names of all keys of one alias, in one slot of a cluster."""

    def __init__(self, prefix: str) -> None:
        bucket = f"{{{prefix}:0}}"
        self.locks, self.waiters = f"{bucket}:l:", f"{bucket}:q:"
        self.wakes, self.undone = f"{bucket}:w:", f"{bucket}:u:"
        self.index, self.beats, self.clock = (
            f"{bucket}:{key}" for key in ("index", "beats", "clock")
        )

    def of(self, name: str) -> list[str]:
        """Of one lock: the lease, its waiters, the index, the list on which they block."""
        return [self.locks + name, self.waiters + name, self.index, self.wakes + name]


@dataclass(slots=True)
class Command(Generic[T]):
    """One script to be run, in one round trip.

    Attributes:
        read: Makes the answer of the script's reply and of the moment at which it was sent.
        name: Of the lock, for errors; empty for none.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[str | int]
    read: Callable[[Any, float], T]
    name: str = ""


class Commands:
    """The commands of one alias."""

    def __init__(self, prefix: str) -> None:
        self.keys = Keys(prefix)

    def acquire(self, request: LeaseRequest) -> Command[Lease | Contention]:
        keys, name, owner, process = self.keys, request.name, request.owner, current()

        def read(answer: Any, sent_at: float) -> Lease | Contention:
            if answer[0]:
                return Lease(
                    name=name,
                    owner=owner,
                    token=int(answer[0]),
                    ttl=request.ttl,
                    # From when it was sent: the answer may have travelled longer than the lease
                    # lives, and a late "yes" must not pass for a fresh one.
                    deadline=sent_at + request.ttl * (1 - clock.DRIFT),
                )
            _, holder, kind, remaining, process_json, now = (text(field) for field in answer)
            return Contention(
                owner=holder,
                kind=cast(Kind, kind),
                remaining=int(remaining) / 1000,
                now=int(now) / 1000,
                process=process_from_json(process_json),
            )

        return Command(
            scripts.ACQUIRE,
            [
                keys.locks + name,
                keys.waiters + name,
                keys.index,
                keys.clock,
                keys.undone + owner,
            ],
            [
                name,
                owner,
                _ms(request.ttl),
                request.kind,
                process.id,
                _process_json(process),
                request.metadata,
                "1" if request.waits else "0",
                request.replaces,
            ],
            read,
            name,
        )

    def renew(self, renewals: Sequence[Renewal], process: str) -> Command[Fates]:
        """At most ``RENEWALS_PER_CALL`` of them."""
        keys = self.keys
        args: list[str | int] = [process, keys.locks]
        for renewal in renewals:
            args += (renewal.owner, _ms(renewal.ttl))
        return Command(
            scripts.RENEW,
            [keys.beats, keys.index, *(keys.locks + renewal.name for renewal in renewals)],
            args,
            _fates,
        )

    def release(self, name: str, owner: str, min_hold: float) -> Command[Fate]:
        return Command(
            scripts.RELEASE,
            self.keys.of(name),
            [name, owner, math.ceil(min_hold * 1000)],
            _fate,
            name,
        )

    def undo(self, request: LeaseRequest) -> Command[None]:
        name, owner = request.name, request.owner
        return Command(
            scripts.UNDO,
            [*self.keys.of(name), self.keys.undone + owner],
            [name, owner, _ms(request.ttl + UNDONE_FOR)],
            _nothing,
            name,
        )

    def locked(self, name: str) -> Command[bool]:
        return Command(scripts.LOCKED, [self.keys.locks + name], [], _truth, name)

    def break_(self, name: str, owner: str) -> Command[bool]:
        return Command(scripts.BREAK, self.keys.of(name), [name, owner], _truth, name)

    def last_end(self, name: str) -> Command[tuple[str, Fate] | None]:
        return Command(scripts.LAST_END, [self.keys.locks + name], [], _end, name)

    def goodbye(self, process: str) -> Command[None]:
        return Command(scripts.GOODBYE, [self.keys.beats], [process], _nothing)


def _fates(answer: Any, sent_at: float) -> Fates:
    return [cast(Fate, FATES[letter]) for letter in text(answer)]


def _fate(answer: Any, sent_at: float) -> Fate:
    return cast(Fate, text(answer))


def _truth(answer: Any, sent_at: float) -> bool:
    return bool(answer)


def _end(answer: Any, sent_at: float) -> tuple[str, Fate] | None:
    return (text(answer[0]), cast(Fate, text(answer[1]))) if answer else None


def _nothing(answer: Any, sent_at: float) -> None:
    return None
