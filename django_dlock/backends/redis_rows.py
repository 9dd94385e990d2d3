"""Reads what the listing of a Redis is told about leases, all of it or the facts asked for."""

from __future__ import annotations

import datetime as dt
import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..lease import HolderState, Kind, LeaseInfo
from ..process import ProcessIdentity, death_proof
from .describe import SILENT_AFTER, holder_state, json_object, process_from_json
from .redis_lua import EXACT

__all__ = ["ALL_FACTS", "EXACTLY", "FACTS", "Reader", "Row"]

EXACTLY = ("utf-8", "surrogateescape")
"""How bytes become text and the same bytes again, though they be no text."""

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
}
"""What has to be known of a lease to sort by a key of ``SORT_KEYS``."""
ALL_FACTS = ("proc", "at", "ttl", "owner", "token", "n", "meta", "@endless", "@waiting")


class Reader:
    """Makes rows of the scripts' answers, for one listing.

    One process may hold thousands of leases; it is looked at once. The next listing looks again,
    since a process may die at any moment.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.process = functools.cache(process_from_json)
        self._proof = functools.cache(death_proof)
        self.holder_state = functools.cache(self._holder_state)

    def rows(self, facts: Sequence[str], now: Any, rows: bytes, processes: bytes) -> list[Row]:
        place = {fact: number for number, fact in enumerate(("name", "until", "kind", *facts))}
        holders = [(process, _whole(beat)) for process, beat in _json(processes)]
        answer = _Answer(self, int(now), place, [("", 0), *holders])
        return [Row(answer, values) for values in _json(rows)]

    def _holder_state(self, kind: Kind, process: str, silent: bool, goodbye: bool) -> HolderState:
        unheard = math.inf if silent else 0.0
        return holder_state(
            kind, self.process(process), unheard=unheard, goodbye=goodbye, proof=self._proof
        )


@dataclass(slots=True)
class _Answer:
    """What the rows of one answer share.

    Attributes:
        now: Milliseconds, on the server's clock.
        place: Fact → where it stands in a row.
        processes: JSON of each and its heartbeat as ``now``, which is below 0 after a goodbye, at
            the number by which rows name it; 0 is none.
        states: By kind and number of the process, as far as it does not matter when that was last
            heard of.
    """

    reader: Reader
    now: int
    place: dict[str, int]
    processes: list[tuple[str, int]]
    states: dict[tuple[Any, Any], HolderState] = field(default_factory=dict)


def _json(answer: bytes) -> Iterable[Any]:
    # Bytes that are no text stay what they are, so that the name can be asked about. An empty
    # list comes as an empty object: Lua has one thing for both.
    return cast("Iterable[Any]", json.loads(answer.decode(*EXACTLY)))


class Row:
    """As a ``LeaseInfo``, as far as the facts go that were asked for."""

    __slots__ = ("_answer", "_values")

    def __init__(self, answer: _Answer, values: list[Any]) -> None:
        self._answer, self._values = answer, values

    @property
    def exact_name(self) -> str:
        """To be encoded as it was decoded, see ``_json``."""
        return cast(str, self._values[0])

    @property
    def name(self) -> str:
        return self._text("name")

    @property
    def alias(self) -> str:
        return self._answer.reader.alias

    @property
    def kind(self) -> Kind:
        return cast(Kind, self._text("kind") or "held")

    @property
    def token(self) -> int:
        return self._number("token")

    @property
    def acquired_at(self) -> dt.datetime:
        now = self._answer.now
        # Not in the future: the clock has stepped back, or a stranger wrote it.
        at = max(0, min(self._number("at") or now, now))
        return dt.datetime.fromtimestamp(at / 1000, tz=dt.timezone.utc)

    @property
    def ttl(self) -> float | None:
        left = self._number("until") - self._answer.now
        # Over, and told of all the same: it is one without an end. One that has been made so and
        # is not over yet is seen where it is shown; to ask about each would make sorting dear.
        endless = self._answer.place.get("@endless")
        if left <= 0 or (endless is not None and self._values[endless]):
            return None
        return left / 1000

    @property
    def renewals(self) -> int:
        return self._number("n")

    @property
    def waiting(self) -> int:
        return self._number("@waiting")

    @property
    def process(self) -> ProcessIdentity | None:
        return self._answer.reader.process(self._holder[0])

    @property
    def unheard(self) -> float:
        renewed = self._number("until") - self._number("ttl")
        return (self._answer.now - max(self._holder[1], renewed)) / 1000

    @property
    def holder_state(self) -> HolderState:
        answer = self._answer
        key = self._said("kind"), self._said("proc")
        state = answer.states.get(key)
        if state is None:
            state = answer.states[key] = self._judge(silent=False)
        # Only of these it matters when they were last heard of, which most heartbeats tell.
        if state == "alive" and answer.now - self._holder[1] > SILENT_AFTER * 1000:
            return self._judge(silent=self.unheard > SILENT_AFTER)
        return state

    def _judge(self, *, silent: bool) -> HolderState:
        process, beat = self._holder
        return self._answer.reader.holder_state(self.kind, process, silent, beat < 0)

    def info(self) -> LeaseInfo:
        acquired_at = self.acquired_at
        return LeaseInfo(
            name=self.name,
            alias=self.alias,
            kind=self.kind,
            owner=self._text("owner"),
            token=self.token,
            acquired_at=acquired_at,
            age=self._answer.now / 1000 - acquired_at.timestamp(),
            ttl=self.ttl,
            renewals=self.renewals,
            waiting=self.waiting,
            process=self.process,
            holder_state=self.holder_state,
            metadata=json_object(self._text("meta")),
            unheard=self.unheard,
        )

    @property
    def _holder(self) -> tuple[str, int]:
        return self._answer.processes[int(self._said("proc") or 0)]

    def _said(self, fact: str) -> Any:
        return self._values[self._answer.place[fact]]

    def _text(self, fact: str) -> str:
        value = str(self._said(fact) or "")
        # A stranger's bytes in a name must not keep the operator from seeing the other names.
        return value if value.isascii() else value.encode(*EXACTLY).decode("utf-8", "replace")

    def _number(self, fact: str) -> int:
        return _whole(self._values[self._answer.place[fact]])


def _whole(value: Any) -> int:
    # Nor must a stranger's damage to one entry, such as an end that is no number.
    try:
        number = int(value)
    except (TypeError, ValueError):
        return 0
    return number if abs(number) < EXACT else 0
