"""Reads the rows of a listing: all facts of a lease, or those that were requested."""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...lease import HolderState, Kind, LeaseInfo
from ...lease_info import KINDS
from ...process import ProcessIdentity
from ..holder_state import SILENT_AFTER, holder_state, names_of, process_from_json, stored_object
from .commands import EXACTLY
from .lua_source import EXACT, WRONG_TYPE
from .processes import StoredProcess

FACTS: dict[str, tuple[str, ...]] = {
    "name": (),
    "alias": (),
    "kind": (),
    "holder": ("proc",),
    "holder_state": ("proc", "ttl"),
    "age": ("at", "token"),
    "ttl": (),
    "renewals": ("n",),
    "token": ("token",),
    "waiting": ("@waiting",),
    # Without the metadata, which would be most of what is read.
    "trouble": ("proc", "ttl", "n", "at", "token", "@waiting"),
}
"""The facts of a lease that are needed to sort by a key of ``SORT_KEYS``."""
ALL_FACTS = ("proc", "at", "ttl", "owner", "token", "n", "meta", "@endless", "@waiting")


class Reader:
    """Makes rows from the scripts' answers, for one listing.

    A process may hold thousands of leases, but its state is determined only once per listing.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.holder_state = functools.cache(holder_state)
        self._processes: dict[str, StoredProcess] = {}

    def rows(
        self, facts: Sequence[str], now: Any, rows: bytes, processes: bytes
    ) -> tuple[list[Row], list[str]]:
        """The rows, and which processes they refer to that this reader has to ``learn`` about."""
        column_of = {fact: number for number, fact in enumerate(("name", "until", "kind", *facts))}
        ids = ["", *_json(processes)]
        answer = _Answer(self, int(now), column_of, ids)
        unknown = [one for one in ids if one and one not in self._processes]
        return [Row(answer, values) for values in _json(rows)], unknown

    def learn(self, processes: Mapping[str, StoredProcess]) -> None:
        self._processes.update(processes)

    def process(self, process: str) -> StoredProcess:
        return self._processes.get(process, _UNKNOWN)


_UNKNOWN = StoredProcess()


@dataclass(slots=True)
class _Answer:
    """What the rows of one answer share.

    Attributes:
        now: Milliseconds, on the server's clock.
        column_of: Fact → its index in a row.
        processes: The id of each process; rows refer to it by index, and index 0 means none.
    """

    reader: Reader
    now: int
    column_of: dict[str, int]
    processes: list[str]

    def process(self, number: Any) -> StoredProcess:
        return self.reader.process(self.processes[int(number or 0)])


def _json(answer: bytes) -> Iterable[Any]:
    # Bytes that are not UTF-8 are preserved, so that such a name can still be asked about. An
    # empty list arrives as an empty object, because Lua does not distinguish them.
    return cast("Iterable[Any]", json.loads(answer.decode(*EXACTLY)))


class Row:
    """The attributes of a ``LeaseInfo``, as far as their facts were requested."""

    __slots__ = ("_answer", "_values")

    unknown: tuple[str, ...] = ()
    renewed_ago, is_late = LeaseInfo.renewed_ago, LeaseInfo.is_late

    def __init__(self, answer: _Answer, values: list[Any]) -> None:
        self._answer, self._values = answer, values

    @property
    def exact_name(self) -> str:
        """The name with bytes preserved; encode it with ``EXACTLY``."""
        return cast(str, self._values[0])

    @property
    def name(self) -> str:
        return self._text("name")

    @property
    def alias(self) -> str:
        return self._answer.reader.alias

    @property
    def kind(self) -> Kind:
        kind = self._text("kind")
        return kind if kind in KINDS else "held"

    @property
    def owner(self) -> str:
        return self._text("owner")

    @property
    def token(self) -> int:
        return self._number("token")

    @property
    def acquired_at(self) -> dt.datetime:
        now = self._answer.now
        # Never in the future, even if the clock stepped back or the entry is damaged.
        at = max(0, min(self._number("at") or now, now))
        return dt.datetime.fromtimestamp(at / 1000, tz=dt.timezone.utc)

    @property
    def age(self) -> float:
        return self._answer.now / 1000 - self.acquired_at.timestamp()

    @property
    def ttl(self) -> float | None:
        left = self._number("until") - self._answer.now
        # It is over but still listed, so its key has no TTL and never ends. For a lease that is not
        # over, this is asked only for rows that are shown; for sorting it would be too slow.
        endless = self._answer.column_of.get("@endless")
        if left <= 0 or (endless is not None and self._values[endless]):
            return None
        return left / 1000

    @property
    def granted_ttl(self) -> float:
        return self._number("ttl") / 1000

    @property
    def renewals(self) -> int:
        # -1 as long as the owner has not used a lease that was handed over.
        return max(0, self._number("n"))

    @property
    def waiting(self) -> int:
        # Those whose process is listening or has sent a heartbeat lately; the others are gone.
        answer, count = self._answer, 0
        for number, waiters in self._said("@waiting") or ():
            process = answer.process(number)
            silent = answer.now - _whole(process.beat) >= SILENT_AFTER * 1000
            count += 0 if silent and not process.listeners else int(waiters)
        return count

    @property
    def process(self) -> ProcessIdentity | None:
        return process_from_json(self._holder.identity)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return stored_object(self._text("meta")).value

    @property
    def silent_for(self) -> float | None:
        renewed = self._number("until") - self._number("ttl")
        last = max(_whole(self._holder.beat), renewed)
        # Of a damaged entry, neither may be known.
        return (self._answer.now - last) / 1000 if last > 0 else None

    @property
    def holder_state(self) -> HolderState:
        beat = _whole(self._holder.beat)
        # The heartbeat alone decides most cases.
        overdue = self._answer.now - beat > SILENT_AFTER * 1000
        silent = overdue and (self.silent_for is None or self.silent_for > SILENT_AFTER)
        return self._answer.reader.holder_state(self.kind, self.process, silent, beat < 0)

    @property
    def damaged(self) -> tuple[str, ...]:
        """As far as its facts were requested; those of ``FACTS["trouble"]`` must be among them."""
        if self._said("kind") == WRONG_TYPE:
            return ("type",)
        number = {fact: not _is_whole(self._said(fact)) for fact in _NUMBERS}
        return names_of(
            kind=self._said("kind") not in KINDS,
            token=number["token"],
            acquired_at=number["at"],
            ttl=number["until"] or number["ttl"],
            renewals=number["n"],
            process=bool(self._holder.identity) and self.process is None,
            metadata="meta" in self._answer.column_of
            and not stored_object(self._text("meta")).is_sound,
        )

    def info(self) -> LeaseInfo:
        return LeaseInfo(**{fact: getattr(self, fact) for fact in LeaseInfo.__slots__})

    @property
    def _holder(self) -> StoredProcess:
        # Its heartbeat is like ``now``, but negative after the process deregistered.
        return self._answer.process(self._said("proc"))

    def _said(self, fact: str) -> Any:
        return self._values[self._answer.column_of[fact]]

    def _text(self, fact: str) -> str:
        value = str(self._said(fact) or "")
        # A name that is not UTF-8 must not prevent the listing of the others.
        return value if value.isascii() else value.encode(*EXACTLY).decode("utf-8", "replace")

    def _number(self, fact: str) -> int:
        return _whole(self._values[self._answer.column_of[fact]])


_NUMBERS = ("until", "token", "ttl", "at", "n")


def _whole(value: Any) -> int:
    # A damaged entry, such as an end that is not a number, must not hide the others either.
    try:
        number = int(value)
    except (TypeError, ValueError):
        return 0
    return number if abs(number) < EXACT else 0


def _is_whole(value: Any) -> bool:
    return bool(value) and str(_whole(value)) == str(value)
