"""The row of one name, and what each operation changes in it; no I/O.

Times are whole microseconds since the epoch on the database's clock. A row outlives its lease: it
stores the last token, how the last leases ended, who waits, and which attempts were cancelled.

A name is held while ``ended`` is empty and ``ends_at`` is in the future. If somebody waits when a
lease ends, the same step grants the name to the first waiter, with the whole TTL that it asked
for. So later callers never overtake a waiter.

A waiter's ticket is valid for ``TICKET_TTL`` after it last asked. If this process knows that a
waiter is dead, it skips it. A waiter that died elsewhere is skipped once its ticket has expired;
before that, it costs one TTL.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple, cast

from ...lease import Contention, Kind, Lease, LeaseRequest, Outcome, Renewal
from ...process import ProcessIdentity, death_proof
from .. import handover_mac
from ..holder_state import process_from_json
from . import memory

SECOND = 1_000_000
TICKET_TTL = 20.0
"""How long a waiter keeps its position after it last asked. It may be a quarter less, because not
every request writes the ticket again."""
LATE_BY = 120 * SECOND
"""A copy of a request may be late by its TTL plus this time; it is granted nothing."""
LARGEST = 2**61
"""Microseconds; a time and a duration below it fit into a column together."""
MEMORY = LATE_BY
"""The end of a lease is remembered for at least this long, or for its TTL if that is longer."""

MAC = "sha256"
"""The hash for MACs of messages that PostgreSQL's statements can make, too."""

OUTCOMES: dict[str, Outcome] = {"r": "released", "e": "expired", "b": "broken"}
"""The outcomes that the codes in ``ended`` and ``past`` stand for."""


def micro(seconds: float) -> int:
    # Round up, so that the lease never ends earlier at the database than for its holder.
    return math.ceil(seconds * SECOND)


class Ticket(NamedTuple):
    """A waiter in the queue and its request.

    Attributes:
        channel: The channel its process listens to for hand-overs; empty if the waiter polls.
        until: When the ticket expires.
        since: When the waiter came.
    """

    owner: str
    ttl: int
    kind: Kind
    process: str
    metadata: str
    channel: str
    until: int
    since: int

    @property
    def asked_at(self) -> int:
        """When it last asked, or up to a quarter of ``TICKET_TTL`` before that."""
        return self.until - micro(TICKET_TTL)

    @property
    def line(self) -> str:
        """As it stands in the queue; no field contains a control character."""
        return "\t".join(map(str, self)) + "\n"

    @classmethod
    def of(cls, line: str) -> Ticket:
        """Raises ``ValueError`` if it is damaged."""
        owner, ttl, kind, process, metadata, channel, until, since = line.split("\t")
        numbers = int(ttl), int(until), int(since)
        # A column has no room for more, and the release that grants the name would fail.
        if not all(0 <= number < LARGEST for number in numbers) or not numbers[0]:
            raise ValueError("no duration, or no time")
        return cls(owner, numbers[0], cast(Kind, kind), process, metadata, channel, *numbers[1:])


class Message(NamedTuple):
    """Sent to a waiter together with the change; a token of 0 means "ask again".

    Attributes:
        mac: See ``handover_mac``; a message that only tells to ask again needs none.
    """

    channel: str
    owner: str
    token: int
    mac: str = ""

    @property
    def grant(self) -> str:
        return f"{self.owner} {self.token}"

    @property
    def payload(self) -> str:
        return f"{self.grant} {self.mac}" if self.mac else self.grant

    def signed(self, key: str) -> Message:
        """The message with its MAC under the key of its name."""
        made = handover_mac.mac(MAC, key, self.channel, self.grant) if key else ""
        return self._replace(mac=made)


class WaitInfo(NamedTuple):
    """What a contention passes on to the wait that follows.

    Attributes:
        token: Of the lease in the way; a lease that is handed over later has a higher one.
        asked_at: When the request was sent, on ``clock.now()``.
        age: Seconds since the grant of the lease in the way.
        position: Of the waiter in the queue; 0 for the first.
        registration: Of the waiter for the notification of a hand-over, made before its ticket was
            stored; ``None`` if no notification will come.
    """

    token: int
    asked_at: float
    age: float = 0.0
    position: int = 0
    registration: object = None


@dataclass(slots=True)
class Row:
    """One row; see the module. One attribute per column, in the order of ``COLUMNS``.

    Attributes:
        version: Rises with every change; a change is written only if the version is still the same.
        ttl: The longest time left to the lease, as of its last renewal.
        ended: Empty, or the code of how the lease was ended.
        renewals: -1 after a hand-over until the new owner first uses the lease.
        shortened: Number of the last renewal for which the holder named a TTL.
        process: Identity of the holder's process, as JSON.
        past: How earlier leases ended; see ``memory``.
        queue: The lines of tickets, in order of arrival; empty if nobody waits.
        cancelled: Requests of which a copy may still arrive; see ``memory``.
    """

    version: int
    owner: str = ""
    kind: Kind = "held"
    ended: str = "r"
    token: int = 0
    ttl: int = 0
    granted_at: int = 0
    ends_at: int = 0
    renewals: int = 0
    shortened: int = 0
    process: str = ""
    metadata: str = "{}"
    past: str = ""
    queue: str = ""
    cancelled: str = ""

    def values(self) -> tuple[Any, ...]:
        return astuple(self)

    # -- queries -----------------------------------------------------------------

    def lives(self, now: int) -> bool:
        return not self.ended and self.ends_at > now

    def outcome(self) -> Outcome:
        """How the last lease ended; only for a row whose lease has ended."""
        if self.kind == "cooling":
            return "released"
        return OUTCOMES.get(self.ended, "expired")

    def outcome_of(self, owner: str, now: int) -> Outcome | None:
        """How the lease of this owner ended; ``None`` while it lives."""
        if owner and owner == self.owner:
            if self.lives(now) and self.kind != "cooling":
                return None
            return self.outcome()
        return OUTCOMES.get(memory.end_of(self.past, owner), "refused")

    def _late_mark(self, owner: str) -> str | None:
        """The mark of this owner's late request; ``None`` if there is none."""
        late = memory.late_requests(self.cancelled).get(owner) if self.cancelled else None
        return None if late is None else late.mark

    def _is_cancelled(self, owner: str) -> bool:
        return self._late_mark(owner) == memory.CANCELLED

    def tickets(self, now: int) -> list[Ticket]:
        """The waiters; expired and damaged tickets are left out."""
        found: list[Ticket] = []
        for line in self.queue.split("\n")[:-1]:
            with suppress(ValueError):
                found.append(Ticket.of(line))
        return [ticket for ticket in found if ticket.until > now]

    def contention(
        self,
        owner: str,
        now: int,
        asked_at: float,
        registration: object,
        *,
        overtaken: bool = False,
    ) -> Contention:
        """What keeps this owner from the lock.

        The owner in it is empty if the attempt is over: it was granted or cancelled before. Its
        caller then goes on with a new attempt, which can be granted.

        Args:
            overtaken: This is the answer if the row cannot be written, because others change it
                first. A name that is free now then counts as held by its last owner, so that the
                caller waits and asks again instead of beginning anew.
        """
        waiting = [ticket.owner for ticket in self.tickets(now)] if self.queue else []
        position = waiting.index(owner) if owner in waiting else len(waiting)
        age = max(0, now - self.granted_at) / SECOND
        met = WaitInfo(self.token, asked_at, age, position, registration)
        if self._is_over(owner) or not self.lives(now):
            named = self.owner if overtaken and not self._is_over(owner) else ""
            return Contention(named, "held", 0.0, now / SECOND, ticket=met)
        process = process_from_json(self.process)
        left = (self.ends_at - now) / SECOND
        return Contention(self.owner, self.kind, left, now / SECOND, process, met)

    def lease(self, request: LeaseRequest, sent_at: float) -> Lease:
        return Lease(request.name, self.owner, self.token, request.ttl, sent_at)

    # -- changes; each returns the messages for waiters -------------------------------------

    def acquire(
        self,
        request: LeaseRequest,
        now: int,
        process: str,
        channel: str,
        *,
        repeated: bool = False,
    ) -> tuple[bool, list[Message]]:
        """Grant the name, or put its waiter into the queue; return whether it was granted.

        Args:
            repeated: The request was sent before and not answered, so that a copy of it may still
                arrive after this one.
        """
        granted, messages = self._acquire(request, now, process, channel)
        # The copy may arrive many leases later. Somebody who waits asks again before that.
        if repeated and granted:
            self._expect_copy(request, now, memory.GRANTED)
        elif repeated and not request.waits and not is_dead(self.process):
            # If the holder is dead, the caller breaks its lease and asks again.
            self._expect_copy(request, now)
        return granted, messages

    def _acquire(
        self, request: LeaseRequest, now: int, process: str, channel: str
    ) -> tuple[bool, list[Message]]:
        me = request.owner
        self._limit_to_ttl(now)
        if self._is_held_by(me, now) and not self._is_cancelled(me):
            ttl = micro(request.ttl)
            self.ends_at = max(self.ends_at, now + ttl)
            self.ttl = max(self.ttl, ttl)
            self.renewals = max(0, self.renewals)
            self._remove_ticket(me, now)
            return True, []
        # A late packet of an attempt whose lease was released or broken must not revive it.
        if self._is_over(me) or self._is_cancelled(me):
            return False, self.settle(now)
        until = now + micro(TICKET_TTL)
        asked = Ticket(
            me, micro(request.ttl), request.kind, process, request.metadata, channel, until, now
        )
        if request.replaces and self._is_held_by(request.replaces, now):
            self.ended = "r"
            self._grant(asked, now, renewals=0)
            # It may have waited before the lease that it replaces was passed on to it.
            self._remove_ticket(me, now)
            # One of the waiters may be the retry for which the lease was parked.
            return True, self._ask_again(now) if request.kind == "parked" else []
        messages = self.settle(now, besides=asked)
        if self.owner == me:
            self._remove_ticket(me, now)
            return True, messages
        if request.waits:
            self._enqueue(asked, now)
        else:
            self._remove_ticket(me, now)
        return False, messages

    def _is_over(self, owner: str) -> bool:
        """Whether an attempt that has no lease now had one before."""
        if owner == self.owner or memory.end_of(self.past, owner):
            return True
        return self._late_mark(owner) == memory.GRANTED

    def _is_held_by(self, owner: str, now: int) -> bool:
        return self.owner == owner and self.lives(now) and self.kind != "cooling"

    def renew(self, renewal: Renewal, now: int) -> tuple[Outcome, list[Message]]:
        ended = self.outcome_of(renewal.owner, now)
        if ended is not None:
            return ended, []
        self._limit_to_ttl(now)
        ttl = micro(renewal.ttl)
        until = now + ttl
        if renewal.shorten > self.shortened:
            self.shortened = renewal.shorten
        else:
            until = max(until, self.ends_at)
        # Waiters sleep until the end that they know.
        messages = self._ask_again(now) if until < self.ends_at else []
        self.ends_at, self.ttl = until, max(ttl, until - now)
        self.renewals = max(0, self.renewals) + 1
        return "renewed", messages

    def release(
        self, owner: str, min_hold: float, now: int, *, repeated: bool = False
    ) -> tuple[Outcome, list[Message]]:
        """Free the name; return how the lease ended, and the messages.

        Args:
            repeated: The release was sent before and not answered, so it may have been done.
        """
        ended = self.outcome_of(owner, now)
        if ended is not None:
            is_forgotten = ended == "refused" and memory.is_cut(self.past)
            return "unknown" if repeated and is_forgotten else ended, []
        # The database's clock may have stepped back since the grant: then count from now.
        cool = min(self.granted_at, now) + micro(min_hold)
        if min_hold and cool > now:
            self.kind, self.ends_at = "cooling", cool
            # Any of them may give up before the name is free. So all are told.
            return "released", self._ask_again(now)
        self.ended = "r"
        return "released", self.settle(now)

    def cancel(self, request: LeaseRequest, now: int) -> list[Message]:
        me = request.owner
        until = self._expect_copy(request, now)
        self._remove_ticket(me, now)
        if self._is_held_by(me, now):
            self.ended = "r"
        messages = self.settle(now)
        if not self.lives(now):
            # Keep the row as long as the attempt may still arrive.
            self.ended, self.ends_at = self.outcome()[0], max(self.ends_at, until)
        return messages

    def end_by_break(self, owner: str, now: int) -> tuple[bool, list[Message]]:
        if owner != self.owner or not self.lives(now):
            return False, []
        self.ended = "b"
        return True, self.settle(now)

    def settle(self, now: int, besides: Ticket | None = None) -> list[Message]:
        """Grant a free name to the first waiter; ``besides`` comes after all others."""
        if self.lives(now):
            return []
        waiting = self.tickets(now)
        if self.renewals < 0 and not self.ended and self.kind != "cooling":
            # The name was handed over, and the new owner did not use it for a whole TTL.
            waiting = [ticket for ticket in waiting if ticket.process != self.process]
        while waiting and is_dead(waiting[0].process):
            del waiting[0]
        first = waiting.pop(0) if waiting else None
        self._keep(waiting)
        if first is None and besides is None:
            return []
        if first is None or (besides is not None and besides.owner == first.owner):
            self._grant(cast(Ticket, besides), now, renewals=0)
            return []
        self._grant(first, now, renewals=-1)
        return [Message(first.channel, first.owner, self.token)] if first.channel else []

    # -- internals ------------------------------------------------------------------------

    def _grant(self, to: Ticket, now: int, renewals: int) -> None:
        if self.owner:
            self.past = memory.with_end(self.past, self.outcome()[0], self.owner)
        self.token = max(self.token + 1, now)
        self.owner, self.kind, self.ended = to.owner, to.kind, ""
        self.ttl, self.granted_at, self.ends_at = to.ttl, now, now + to.ttl
        self.renewals, self.shortened = renewals, 0
        self.process, self.metadata = to.process, to.metadata

    def _expect_copy(self, request: LeaseRequest, now: int, mark: str = memory.CANCELLED) -> int:
        """Note that a copy of a request may arrive, and return until when."""
        until = now + micro(request.ttl) + LATE_BY
        self.cancelled = memory.with_late_request(self.cancelled, request.owner, mark, until, now)
        return until

    def _enqueue(self, asked: Ticket, now: int) -> None:
        waiting = self.tickets(now)
        for position, ticket in enumerate(waiting):
            if ticket.owner == asked.owner:
                # Asking again seldom needs a write: only to extend the ticket. Whoever waits for a
                # notification usually asks after more than a quarter, so it extends it each time.
                if asked.until - ticket.until >= micro(TICKET_TTL) / 4 or ticket[:6] != asked[:6]:
                    waiting[position] = asked._replace(since=ticket.since)
                    self._keep(waiting)
                return
        self._keep([*waiting, asked])

    def _ask_again(self, now: int) -> list[Message]:
        """Messages that tell all waiters to ask again; they keep their positions."""
        return [Message(it.channel, it.owner, 0) for it in self.tickets(now) if it.channel]

    def _remove_ticket(self, owner: str, now: int) -> None:
        if self.queue:
            self._keep([ticket for ticket in self.tickets(now) if ticket.owner != owner])

    def _keep(self, waiting: list[Ticket]) -> None:
        self.queue = "".join(ticket.line for ticket in waiting)

    def _limit_to_ttl(self, now: int) -> None:
        # An end later than the lease's own TTL means that the clock has stepped back. Nobody should
        # have to wait for the length of that step.
        if self.lives(now) and self.kind != "cooling" and self.ends_at - now > self.ttl > 0:
            self.ends_at = now + self.ttl


COLUMNS = tuple(field.name for field in fields(Row))


def is_dead(identity: str) -> bool:
    """Whether this process can prove that the one with this identity is dead."""
    process: ProcessIdentity | None = process_from_json(identity)
    return process is not None and death_proof(process) is not None
