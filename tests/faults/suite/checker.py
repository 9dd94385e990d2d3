"""Judges the events of a run; uses no server and no clock, so it can also read files."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from .journal import Event
from .kinds import FOLLOWERS, GUARDED, HOOK_FOLLOWER, RECORDED_FOLLOWER


@dataclass(slots=True)
class Span:
    """One execution of a body.

    Attributes:
        start, end: When it ran; without an end if its process died and nobody saw its end.
        lost: When its lock was lost as far as its process knew, or would have known.
        died: Whether it ended because its process died.
    """

    run: str
    key: int
    pid: int
    token: int | None
    start: float
    end: float = math.inf
    lost: float = math.inf
    died: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """One kind of task in one run.

    Attributes:
        keys: How many were published.
        bodies: How often a body began.
        doubles: Effects beyond the first one of each key.
        lost: Keys without an effect.
        unknown: Effects of keys that were not published.
        overlaps: Pairs of bodies of one key that ran at the same time and both considered the lock
            theirs; without a lock, all pairs that ran at the same time.
        stale_spans: Pairs that ran or were stopped at the same time, of which one knew that it had
            lost the lock, or would have known if it had not been stopped.
        stale_writes: Commits with a token lower than one that the key had seen.
        hit: Keys that met a fault: their own one, or one during their body.
        failed: Messages that ended with FAILURE or REVOKED.
        endless: Bodies without a known end or death.
        takeovers: Seconds from the death of a body that had not committed to the next start for its
            key; infinite if there was none.
        freed: Seconds from such a death until the lock was free.
    """

    keys: int
    bodies: int
    doubles: int
    lost: int
    unknown: int
    overlaps: int
    stale_spans: int
    stale_writes: int
    hit: int
    failed: int
    endless: int
    takeovers: Sequence[float]
    freed: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUps:
    """The tasks that guarded bodies sent, and what became of them.

    Attributes:
        expected: Two for each key that took effect.
        lost: How many of them were not received. A follower with a record also counts as lost if
            its effect is missing.
        doubled: Additional ids under which one was received, and additional effects of the follower
            with a record.
        unfounded: Received for keys that did not take effect.
        repeated: Further deliveries under the same id; they are allowed.
        pending: Rows that were not published at the end.
        by_command: How many ``publish_pending_followups`` published.
        hook_lost: How many were lost of those that guarded bodies sent with ``on_commit()``;
            ``None`` if they sent none.
    """

    expected: int = 0
    lost: int = 0
    doubled: int = 0
    unfounded: int = 0
    repeated: int = 0
    pending: int = 0
    by_command: int = 0
    hook_lost: int | None = None

    @property
    def problems(self) -> dict[str, int]:
        """How often each forbidden thing happened."""
        return {
            "lost follow-ups": self.lost,
            "doubled follow-ups": self.doubled,
            "follow-ups of keys without effect": self.unfounded,
            "follow-ups that were not published": self.pending,
        }


def follow_ups(events: Collection[Event]) -> FollowUps:
    """The follow-ups of all keys whose bodies send any."""
    sending = {event["key"] for event in _named("sent", events) if event.get("follow_ups")}
    hooked = {event["key"] for event in _named("sent", events) if event.get("hook")}
    effects = _named("effect", events)
    took_effect = {event["key"] for event in effects if event["kind"] == GUARDED} & sending
    expected = {(by, key) for by in FOLLOWERS for key in took_effect}
    ids: dict[tuple[str, int], set[str]] = defaultdict(set)
    received = [event for event in _named("followed", events) if event["by"] in FOLLOWERS]
    for event in received:
        ids[event["by"], event["key"]].add(event["delivery"])
    rows = Counter(event["key"] for event in effects if event["kind"] == RECORDED_FOLLOWER)
    told = {event["key"] for event in _named("followed", events) if event["by"] == HOOK_FOLLOWER}
    different = sum(len(same) for same in ids.values())
    return FollowUps(
        expected=len(expected),
        lost=sum(
            one not in ids or (one[0] == RECORDED_FOLLOWER and not rows[one[1]]) for one in expected
        ),
        doubled=different - len(ids) + sum(count - 1 for count in rows.values()),
        unfounded=len(ids.keys() - expected),
        repeated=len(received) - different,
        pending=sum(event["count"] for event in _named("pending", events)),
        by_command=sum(event.get("published", 0) for event in _named("command", events)),
        hook_lost=len((hooked & took_effect) - told) if hooked else None,
    )


def check(events: Collection[Event]) -> dict[str, Tally]:
    """The tally of each published kind."""
    kinds = sorted({event["kind"] for event in events if event["event"] == "sent"})
    return {kind: _tally(kind, events) for kind in kinds}


def _tally(kind: str, events: Collection[Event]) -> Tally:
    mine = [event for event in events if event.get("kind") == kind]
    keys = {event["key"] for event in _named("sent", mine)}
    effects = Counter(event["key"] for event in _named("effect", mine))
    spans = _spans(kind, events)
    both, stale = _overlaps(spans)
    runs = {span.run for span in spans}
    return Tally(
        keys=len(keys),
        bodies=len(spans),
        doubles=sum(count - 1 for count in effects.values()),
        lost=sum(key not in effects for key in keys),
        unknown=sum(count for key, count in effects.items() if key not in keys),
        overlaps=both,
        stale_spans=stale,
        stale_writes=_stale_writes(mine),
        hit=len(_hit(mine, events, spans)),
        failed=sum(event["state"] != "SUCCESS" for event in _named("final", mine)),
        endless=sum(span.end == math.inf for span in spans),
        takeovers=_takeovers(spans, {event["run"] for event in _named("effect", mine)}),
        freed=[event["after"] for event in _named("freed", events) if event["run"] in runs],
    )


def _named(name: str, events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _spans(kind: str, events: Collection[Event]) -> list[Span]:
    """The spans of a kind, by their start."""
    deaths: dict[int, list[float]] = defaultdict(list)
    for event in _named("death", events):
        deaths[event["pid"]].append(event["at"])
    by_run: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if "run" in event:
            by_run[event["run"]].append(event)
    begun = [event for event in _named("begin", events) if event["kind"] == kind]
    spans = [_span(event, by_run[event["run"]], deaths[event["pid"]]) for event in begun]
    return sorted(spans, key=lambda span: span.start)


def _span(begin: Event, lines: Sequence[Event], deaths: Sequence[float]) -> Span:
    span = Span(begin["run"], begin["key"], begin["pid"], begin["token"], begin["at"])
    for line in _named("end", lines):
        span.end = line["at"]
    if span.end == math.inf:
        # The system may give the process id to a later process.
        span.end = min((at for at in deaths if at >= span.start), default=math.inf)
        span.died = span.end != math.inf
    span.lost = min((line["at"] for line in _named("lost", lines)), default=math.inf)
    return span


def overlapping(kind: str, events: Collection[Event]) -> list[tuple[Span, Span]]:
    """Pairs of bodies that ran at the same time and both considered the lock theirs."""
    return [pair for pair in _pairs(_spans(kind, events)) if _both_hold(*pair)]


def _overlaps(spans: Sequence[Span]) -> tuple[int, int]:
    """Pairs that overlap while both hold the lock, and all other overlapping pairs."""
    both = stale = 0
    for one, other in _pairs(spans):
        if _both_hold(one, other):
            both += 1
        elif one.start < other.end and other.start < one.end:
            stale += 1
    return both, stale


def _pairs(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Pairs of the same key; the one that began first comes first."""
    by_key: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_key[span.key].append(span)
    for same in by_key.values():
        yield from combinations(same, 2)


def _both_hold(one: Span, other: Span) -> bool:
    # A body that was stopped before it began may know of the loss from its first moment.
    if one.lost <= one.start or other.lost <= other.start:
        return False
    return one.start < min(other.end, other.lost) and other.start < min(one.end, one.lost)


def _stale_writes(mine: Collection[Event]) -> int:
    highest: dict[int, int] = {}
    stale = 0
    for event in sorted(_named("committed", mine), key=lambda event: float(event["at"])):
        if event["token"] is None:
            continue
        stale += event["token"] < highest.get(event["key"], 0)
        highest[event["key"]] = max(event["token"], highest.get(event["key"], 0))
    return stale


def _hit(mine: Collection[Event], events: Collection[Event], spans: Sequence[Span]) -> set[int]:
    hit = {event["key"] for event in _named("hit", mine)}
    for fault in _named("fault", events):
        hit |= {
            span.key
            for span in spans
            if span.start <= fault["at"] <= span.end
            and (not fault["pids"] or span.pid in fault["pids"])
        }
    return hit


def _takeovers(spans: Sequence[Span], effective: set[str]) -> list[float]:
    """For bodies that died without an effect; a body that had its effect needs no successor."""
    found = []
    for span in spans:
        if not span.died or span.run in effective:
            continue
        later = (
            other.start - span.end
            for other in spans
            if other.key == span.key and other.run != span.run and other.start >= span.end
        )
        found.append(min(later, default=math.inf))
    return found
