"""What is said to Redis and how its answers are read, without doing any I/O.

Shared by threads and coroutines, which differ in how they wait and in nothing else.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from .. import clock
from ..lease import Contention, Fate, Kind, Lease, LeaseRequest, Renewal
from ..process import ProcessIdentity, current
from . import redis_scripts as scripts
from .base import Fates
from .describe import process_from_json
from .redis_packing import BLANK, pack, pattern
from .redis_scripts import FATES, Script

__all__ = [
    "RENEWALS_PER_CALL",
    "Command",
    "Commands",
    "Keys",
    "Letter",
    "read_letter",
    "text",
]

RENEWALS_PER_CALL = 500
UNDONE_FOR = 120.0
"""Seconds, besides the TTL, for which an undone attempt cannot be granted any more."""

Words: TypeAlias = tuple[Sequence[str], Sequence[str]]
"""Keys and arguments of a script."""

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


class Letter(NamedTuple):
    """What the server wrote to a waiter; a token of 0 says "ask again".

    Attributes:
        ttl: Seconds for which the lease is handed over.
        read_at: On ``clock.now()``.
    """

    token: int
    ttl: float
    read_at: float


def read_letter(message: Any) -> tuple[str, Letter] | None:
    """The addressee and the letter, ``None`` for all else that a subscription brings."""
    if text(message[0]) != "message":
        return None
    owner, token, ttl_ms = text(message[2]).rsplit(" ", 2)
    return owner, Letter(int(token), int(ttl_ms) / 1000, clock.now())


class Keys:
    """Names of all keys of one alias, in one slot of a cluster."""

    def __init__(self, prefix: str) -> None:
        bucket = f"{{{prefix}:0}}"
        self.locks, self.waiters = f"{bucket}:l:", f"{bucket}:q:"
        self.requests, self.mailboxes = f"{bucket}:w:", f"{bucket}:m:"
        self.undone = f"{bucket}:u:"
        self.index, self.beats, self.clock = (
            f"{bucket}:{key}" for key in ("index", "beats", "clock")
        )

    def of(self, name: str) -> list[str]:
        """What grants and ends of one lock need, in the scripts' order."""
        return [self.locks + name, self.waiters + name, self.index, self.clock]

    def of_attempt(self, owner: str) -> list[str]:
        """Of one attempt: the mark that it was taken back, and what it asks for."""
        return [self.undone + owner, self.requests + owner]

    def mailbox(self, number: int) -> str:
        """The channel of this process and the number, of which there is one to a listener."""
        return f"{self.mailboxes}{current().id}:{number}"


@dataclass(slots=True)
class Command(Generic[T]):
    """One script to be run, in one round trip.

    Attributes:
        read: Makes the answer of the script's reply and of the moment at which it was sent.
        name: Of the lock, for errors; empty for none.
        packed: The call of the script by its digest, as it travels; made of the other attributes
            where it is not given.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[str | int | bytes]
    read: Callable[[Any, float], T]
    name: str = ""
    packed: bytes = b""

    def __post_init__(self) -> None:
        if not self.packed:
            self.packed = pack(self.script, self.keys, self.args)


class Commands:
    """The commands of one alias.

    Args:
        timeout: Seconds that a command may take.
    """

    def __init__(self, prefix: str, timeout: float) -> None:
        self.keys, self._timeout = Keys(prefix), timeout
        # The same for all keys of one lock.
        self._prefix = len(self.keys.locks.encode())
        self._acquiring: tuple[ProcessIdentity | None, bytes] = (None, b"")
        self._releasing = pattern(scripts.RELEASE, *self._release_words(BLANK, BLANK, BLANK))

    def acquire(self, request: LeaseRequest, mailbox: str = "") -> Command[Lease | Contention]:
        """Try once.

        Args:
            mailbox: Where this process listens, for a request that waits.
        """
        name, owner, process = request.name, request.owner, current()
        ttl, mailbox = str(_ms(request.ttl)), mailbox if request.waits else ""
        details = (request.kind, request.metadata, mailbox, request.replaces)

        def read(answer: Any, sent_at: float) -> Lease | Contention:
            if isinstance(answer, int):
                # From when it was sent: the answer may have travelled longer than the lease
                # lives, and a late "yes" must not pass for a fresh one.
                deadline = sent_at + request.ttl * (1 - clock.DRIFT)
                return Lease(name, owner, answer, request.ttl, deadline)
            holder, kind, remaining, process_json, now, token = map(text, answer)
            return Contention(
                owner=holder,
                kind=cast(Kind, kind),
                remaining=int(remaining) / 1000,
                now=int(now) / 1000,
                process=process_from_json(process_json),
                token=int(token),
                asked_at=sent_at,
            )

        return Command(
            scripts.ACQUIRE,
            *self._acquire_words(process, name, owner, ttl, *details),
            read,
            name,
            self._packed_acquire(process, name, owner, ttl, *details),
        )

    def _acquire_words(self, process: ProcessIdentity, *words: str) -> Words:
        name, owner, ttl, kind, metadata, mailbox, replaces = words
        args = [name, owner, ttl, kind, process.id, _process_json(process)]
        args += (metadata, mailbox, replaces)
        return [*self.keys.of(name), *self.keys.of_attempt(owner)], args

    def _packed_acquire(self, process: ProcessIdentity, *words: str) -> bytes:
        known, acquiring = self._acquiring
        if known is not process:
            blanks = self._acquire_words(process, *(BLANK for _ in words))
            acquiring = pattern(scripts.ACQUIRE, *blanks)
            self._acquiring = process, acquiring
        name, owner, ttl, kind, metadata, mailbox, replaces = map(str.encode, words)
        n, o = len(name), len(owner)
        lock, attempt = self._prefix + n, self._prefix + o
        return acquiring % (
            *(lock, name, lock, name, attempt, owner, attempt, owner),
            *(n, name, o, owner, len(ttl), ttl, len(kind), kind, len(metadata), metadata),
            *(len(mailbox), mailbox, len(replaces), replaces),
        )

    def handed(self, request: LeaseRequest, met: Contention, letter: Letter) -> Lease | None:
        """The lease that the letter announces; ``None`` where the owner had better ask for it.

        Args:
            met: The answer to the last ask, which was sent while the mailbox was listened to.
        """
        if not letter.token or not request.renewed or letter.ttl < 2 * self._timeout:
            return None
        age = clock.now() - met.asked_at
        if age > letter.ttl / 2:
            return None
        return Lease(
            name=request.name,
            owner=request.owner,
            token=letter.token,
            # From when it was asked for, which was before it was handed over.
            ttl=letter.ttl - age,
            deadline=met.asked_at + letter.ttl * (1 - clock.DRIFT),
        )

    def renew(self, renewals: Sequence[Renewal], process: str) -> Command[Fates]:
        """At most ``RENEWALS_PER_CALL`` of them."""
        locks, ttls = self.keys.locks, [renewal.ttl for renewal in renewals]
        if ttls.count(ttls[0] if ttls else 0.0) == len(ttls):
            # Nearly always, and half as much to be said.
            del ttls[1:]
        return Command(
            scripts.RENEW,
            [self.keys.beats, self.keys.index, *[locks + renewal.name for renewal in renewals]],
            [process, locks, *[renewal.owner for renewal in renewals], *map(_ms, ttls)],
            _fates,
        )

    def release(self, name: str, owner: str, min_hold: float) -> Command[Fate]:
        words = name, owner, str(math.ceil(min_hold * 1000))
        return Command(
            scripts.RELEASE, *self._release_words(*words), _fate, name, self._packed_release(*words)
        )

    def _release_words(self, name: str, owner: str, min_hold: str) -> Words:
        return self.keys.of(name), [name, owner, min_hold, self.keys.requests]

    def _packed_release(self, *words: str) -> bytes:
        name, owner, min_hold = map(str.encode, words)
        n, key = len(name), self._prefix + len(name)
        return self._releasing % (
            *(key, name, key, name),
            *(n, name, len(owner), owner, len(min_hold), min_hold),
        )

    def undo(self, request: LeaseRequest) -> Command[None]:
        name, owner = request.name, request.owner
        return Command(
            scripts.UNDO,
            [*self.keys.of(name), *self.keys.of_attempt(owner)],
            [name, owner, _ms(request.ttl + UNDONE_FOR), self.keys.requests],
            _nothing,
            name,
        )

    def locked(self, name: str) -> Command[bool]:
        return Command(scripts.LOCKED, [self.keys.locks + name], [], _truth, name)

    def break_(self, name: str, owner: str) -> Command[bool]:
        args = [name, owner, self.keys.requests]
        return Command(scripts.BREAK, self.keys.of(name), args, _truth, name)

    def last_end(self, name: str) -> Command[tuple[str, Fate] | None]:
        return Command(scripts.LAST_END, [self.keys.locks + name], [], _end, name)

    def goodbye(self, process: str) -> Command[None]:
        return Command(scripts.GOODBYE, [self.keys.beats], [process], _nothing)


def _fates(answer: Any, sent_at: float) -> Fates:
    return [cast(Fate, FATES[letter]) for letter in text(answer)]


def _fate(answer: Any, sent_at: float) -> Fate:
    return "released" if answer == 1 else cast(Fate, text(answer))


def _truth(answer: Any, sent_at: float) -> bool:
    return bool(answer)


def _end(answer: Any, sent_at: float) -> tuple[str, Fate] | None:
    return (text(answer[0]), cast(Fate, text(answer[1]))) if answer else None


def _nothing(answer: Any, sent_at: float) -> None:
    return None
