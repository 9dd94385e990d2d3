"""What is said to Redis and how its answers are read, without doing any I/O.

Shared by threads and coroutines, which differ in how they wait and in nothing else.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

from .. import clock
from ..lease import Contention, Fate, Kind, Lease, LeaseRequest, Renewal
from ..process import ProcessIdentity, current
from . import redis_scripts as scripts
from .base import Fates
from .describe import process_from_json
from .redis_lua import MEMORY_MS, Script
from .redis_packing import BLANK, Word, fill, pack, pattern
from .redis_scripts import FATES

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

Words: TypeAlias = tuple[Sequence[str], Sequence[Word]]
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


def read_letter(message: bytes) -> tuple[str, Letter] | None:
    """The addressee and the letter, ``None`` for what is none."""
    try:
        owner, token, ttl_ms = message.decode().split(" ")
        return owner, Letter(int(token), int(ttl_ms) / 1000, clock.now())
    except (OverflowError, ValueError):
        # A stranger's.
        return None


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


@dataclass(slots=True, eq=False)
class Command(Generic[T]):
    """One script to be run, in one round trip.

    Attributes:
        read: Makes the answer of the script's reply and of the moment at which it was sent.
        name: Of the lock, for errors; empty for none.
        packed: The call of the script by its digest, as it travels.
        words: Keys and arguments, for those who must say it in another way.
        handed_at: When the lease was handed over that it gives back, on ``clock.now()``: it is
            likely to be handed on. 0 for all others.
    """

    script: Script
    packed: bytes
    words: Callable[[], Words]
    read: Callable[[Any, float], T]
    name: str = ""
    handed_at: float = 0.0

    @classmethod
    def of(
        cls,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Word],
        read: Callable[[Any, float], T],
        name: str = "",
    ) -> Command[T]:
        return cls(script, pack(script, keys, args), lambda: (keys, args), read, name)


class Commands:
    """The commands of one alias.

    Args:
        timeout: Seconds that a command may take.
    """

    def __init__(self, prefix: str, timeout: float) -> None:
        self.keys, self._timeout = Keys(prefix), timeout
        # The same for all keys of one lock.
        self._prefix = len(self.keys.locks.encode())
        self._acquiring = functools.lru_cache(maxsize=64)(self._acquire_pattern)
        self._releasing = pattern(scripts.RELEASE, *self._release_words(BLANK, BLANK, BLANK))

    def acquire(self, request: LeaseRequest, mailbox: int = 0) -> Command[Lease | Contention]:
        """Try once.

        Args:
            mailbox: Number of the one that is listened to, for a request that waits.
        """
        if not request.waits:
            mailbox = 0
        return Command(
            scripts.ACQUIRE,
            self._packed_acquire(request, mailbox),
            # Made where they are asked for: they cost as much as to pack them (1.5 µs).
            functools.partial(self._acquire_words, request, mailbox),
            functools.partial(_granted, request),
            request.name,
        )

    def _acquire_words(self, request: LeaseRequest, mailbox: int) -> Words:
        name, owner, ttl, kind, metadata, _, replaces, _ = request
        process = current()
        args = [name, owner, str(_ms(ttl)), kind, _process_json(process)]
        args += (metadata, self.keys.mailbox(mailbox) if mailbox else "", replaces)
        # As the scripts' ``memory`` has it; to format a number costs the server as much as a write.
        args.append(str(_ms(ttl) + max(_ms(ttl), MEMORY_MS)))
        return [*self.keys.of(name), *self.keys.of_attempt(owner)], args

    def _acquire_pattern(self, process_id: str, ttl: float, kind: Kind, mailbox: int) -> list[str]:
        """All that is the same from one attempt of this process to the next."""
        request = LeaseRequest(BLANK, BLANK, ttl, kind, metadata=BLANK, replaces=BLANK)
        return pattern(scripts.ACQUIRE, *self._acquire_words(request, mailbox))

    def _packed_acquire(self, request: LeaseRequest, mailbox: int) -> bytes:
        name, owner, ttl, kind, metadata, _, replaces, _ = request
        n, o = len(name), len(owner)
        lock, attempt = str(self._prefix + n), str(self._prefix + o)
        packed = fill(
            self._acquiring(current().id, ttl, kind, mailbox),
            *(lock, name, lock, name, attempt, owner, attempt, owner, str(n), name, str(o), owner),
            *(str(len(metadata)), metadata, str(len(replaces)), replaces),
        )
        if packed.isascii():
            return packed.encode()
        return pack(scripts.ACQUIRE, *self._acquire_words(request, mailbox))

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
        # From when it was asked for, which was before it was handed over.
        left, deadline = letter.ttl - age, met.asked_at + letter.ttl * (1 - clock.DRIFT)
        return Lease(request.name, request.owner, letter.token, left, deadline)

    def renew(self, renewals: Sequence[Renewal], process: str) -> Command[Fates]:
        """At most ``RENEWALS_PER_CALL`` of them."""
        locks, ttls = self.keys.locks, [renewal.ttl for renewal in renewals]
        if ttls.count(ttls[0] if ttls else 0.0) == len(ttls):
            # Nearly always, and half as much to be said.
            del ttls[1:]
        return Command.of(
            scripts.RENEW,
            [self.keys.beats, self.keys.index, *[locks + renewal.name for renewal in renewals]],
            [process, locks, *[renewal.owner for renewal in renewals], *map(_ms, ttls)],
            _fates,
        )

    def release(
        self, name: str, owner: str, min_hold: float, *, handed_at: float = 0.0
    ) -> Command[Fate]:
        words = name, owner, str(math.ceil(min_hold * 1000))
        return Command(
            scripts.RELEASE,
            self._packed_release(*words),
            functools.partial(self._release_words, *words),
            _fate,
            name,
            handed_at,
        )

    def _release_words(self, name: str, owner: str, min_hold: str) -> Words:
        return self.keys.of(name), [name, owner, min_hold, self.keys.requests]

    def _packed_release(self, name: str, owner: str, min_hold: str) -> bytes:
        n, key = str(len(name)), str(self._prefix + len(name))
        packed = fill(
            self._releasing,
            *(key, name, key, name),
            *(n, name, str(len(owner)), owner, str(len(min_hold)), min_hold),
        )
        if packed.isascii():
            return packed.encode()
        return pack(scripts.RELEASE, *self._release_words(name, owner, min_hold))

    def undo(self, request: LeaseRequest) -> Command[None]:
        name, owner = request.name, request.owner
        return Command.of(
            scripts.UNDO,
            [*self.keys.of(name), *self.keys.of_attempt(owner)],
            [name, owner, _ms(request.ttl + UNDONE_FOR), self.keys.requests],
            _nothing,
            name,
        )

    def locked(self, name: str) -> Command[bool]:
        return Command.of(scripts.LOCKED, [self.keys.locks + name], [], _truth, name)

    def break_(self, name: str, owner: str) -> Command[bool]:
        args = [name, owner, self.keys.requests]
        return Command.of(scripts.BREAK, self.keys.of(name), args, _truth, name)

    def last_end(self, name: str) -> Command[tuple[str, Fate] | None]:
        return Command.of(scripts.LAST_END, [self.keys.locks + name], [], _end, name)

    def goodbye(self, process: str) -> Command[None]:
        return Command.of(scripts.GOODBYE, [self.keys.beats], [process], _nothing)


def _granted(request: LeaseRequest, answer: Any, sent_at: float) -> Lease | Contention:
    if isinstance(answer, int):
        # From when it was sent: the answer may have travelled longer than the lease lives, and a
        # late "yes" must not pass for a fresh one.
        ttl = request.ttl
        return Lease(request.name, request.owner, answer, ttl, sent_at + ttl * (1 - clock.DRIFT))
    # The last one is not ours to choose, and may hold anything.
    kind, remaining, now, token, process_json, holder = text(answer).split("\n", 5)
    return Contention(
        owner=holder,
        kind=cast(Kind, kind),
        remaining=int(remaining) / 1000,
        now=int(now) / 1000,
        process=process_from_json(process_json),
        # Where a stranger wrote what is none, no letter is believed.
        token=int(token) if token.isdigit() else sys.maxsize,
        asked_at=sent_at,
    )


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
