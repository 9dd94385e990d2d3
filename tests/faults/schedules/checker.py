"""Judges the history of a run; uses no server and no clock, so it can also read files.

The events, all with ``event`` and ``at`` (``clock.now()``, one clock for the whole machine):

* ``bed``: the first one; what is promised here: ``ttl``, ``command_timeout``, ``recovery`` (seconds
  after which everything is as before), ``longest_hold``;
* ``call``, ``done``: a call (``id``, ``pid``, ``who``, ``op``, ``name``, ``patience``) began; it
  ended in ``outcome``, a grant with its ``token``;
* ``held``: the holder of this grant (``id``) was told that it is held; ``ended``: it no longer
  holds, at ``last`` it still did; ``how`` is ``released``, or the reason of the loss;
* ``stall``: a process (``pid``) did not run until ``until``;
* ``killed``: the driver killed a process;
* ``fault``, ``healed``: it made a fault (``id``, ``what``), and ended it. ``excuse``: until so many
  seconds after its end, the store may forget leases or let them end early; ``None`` for a fault
  that is no excuse. ``harmless``: no lease is lost by it;
* ``end``: of the run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ..suite.journal import Event

SLACK = 1.0
"""Seconds by which a busy machine may be late."""
ANSWERS = {"granted", "contended", "released"}
EXPECTED = {*ANSWERS, "unavailable", "lost"}
CALM = "no fault"


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not happen.

    Attributes:
        kind: ``overlap``, ``told late``, ``token``, ``loss`` (of a lease that nothing endangered),
            ``outage`` (told to a caller that had the time to see that there is none), ``stuck``
            (a process alone had no answer for long), ``bound``, ``liveness``, ``progress`` or
            ``error``.
        fault: The latest fault before it.
    """

    kind: str
    at: float
    text: str
    fault: str = CALM


@dataclass(slots=True)
class _Hold:
    """A grant, from when the caller knew of it until it was last told that it holds."""

    call: str
    pid: int
    name: str
    token: int
    asked: float
    start: float
    end: float
    how: str
    released: float = math.inf


@dataclass(frozen=True, slots=True)
class _Fault:
    what: str
    start: float
    end: float
    excuse: float | None
    harmless: bool
    leap: float


@dataclass
class _Run:
    """A history, sorted by what it is about."""

    ttl: float
    command_timeout: float
    recovery: float
    began: float
    ended: float
    faults: list[_Fault] = field(default_factory=list)
    calls: dict[str, Event] = field(default_factory=dict)
    done: dict[str, Event] = field(default_factory=dict)
    holds: list[_Hold] = field(default_factory=list)
    stalls: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    killed: dict[int, float] = field(default_factory=dict)

    def before(self, at: float) -> str:
        """The latest fault that began before."""
        past = [fault for fault in self.faults if fault.start <= at]
        return max(past, key=lambda fault: fault.start).what if past else CALM

    def stalled(self, pid: int, start: float, end: float) -> float:
        """Seconds between these times in which the process did not run."""
        return sum(
            max(0.0, min(end, until) - max(start, at)) for at, until in self.stalls.get(pid, ())
        )

    def is_safe(self, pid: int, start: float, end: float) -> bool:
        """Whether the process could reach its store all the time between these."""
        dangers = [
            fault
            for fault in self.faults
            if not fault.harmless and fault.start <= end + SLACK and fault.end >= start
        ]
        return not dangers and self.stalled(pid, start, end) < self.ttl / 4


def check(events: Collection[Event]) -> list[Violation]:
    """All violations, in the order of their times."""
    run = _read(events)
    found = [
        *_overlaps(run),
        *_tokens(run),
        *_losses(run),
        *_outages(run),
        *_stuck(run),
        *_bounds(run),
        *_liveness(run),
        *_progress(run),
        *_errors(run),
    ]
    named = [Violation(one.kind, one.at, one.text, run.before(one.at)) for one in found]
    return sorted(named, key=lambda one: one.at)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a kind of fault.

    Attributes:
        times: How often it was made.
        grants: Granted from such a fault until the next one.
        violations: After such a fault, by kind.
    """

    fault: str
    times: int
    grants: int
    violations: Counter[str]


def tally(events: Collection[Event]) -> list[Row]:
    """The rows of the table, one for each kind of fault."""
    run, wrong = _read(events), check(events)
    times = Counter(fault.what for fault in run.faults)
    grants = Counter(run.before(hold.start) for hold in run.holds)
    return [
        Row(
            fault,
            times[fault],
            grants[fault],
            Counter(one.kind for one in wrong if one.fault == fault),
        )
        for fault in sorted({*times, *grants, *(one.fault for one in wrong)})
    ]


# -- reading -----------------------------------------------------------------------------------


def _read(events: Collection[Event]) -> _Run:
    (bed,) = [event for event in events if event["event"] == "bed"]
    ended = max(event["at"] for event in events)
    run = _Run(bed["ttl"], bed["command_timeout"], bed["recovery"], bed["at"], ended)
    healed = {event["id"]: event["at"] for event in events if event["event"] == "healed"}
    held: dict[str, float] = {}
    how: dict[str, str] = {}
    for event in sorted(events, key=lambda event: float(event["at"])):
        what = event["event"]
        if what == "call":
            run.calls[event["id"]] = event
        elif what == "done":
            run.done[event["id"]] = event
        elif what == "held":
            held[event["id"]] = event["at"]
        elif what == "ended":
            held[event["id"]], how[event["id"]] = event["last"], event["how"]
        elif what == "stall":
            run.stalls[event["pid"]].append((event["at"], event["until"]))
        elif what == "killed":
            run.killed[event["pid"]] = event["at"]
        elif what == "fault":
            end = healed.get(event["id"], math.inf)
            facts = event["excuse"], event.get("harmless", False), event.get("leap", 0.0)
            run.faults.append(_Fault(event["what"], event["at"], end, *facts))
    releases = {
        call["grant"]: run.done[one]["at"]
        for one, call in run.calls.items()
        if call["op"] == "release" and run.done.get(one, {}).get("outcome") == "released"
    }
    for one, done in run.done.items():
        if done["outcome"] == "granted":
            call = run.calls[one]
            start, end = done["at"], held.get(one, done["at"])
            run.holds.append(
                _Hold(
                    *(one, call["pid"], call["name"], done["token"], call["at"], start, end),
                    how.get(one, ""),
                    releases.get(one, math.inf),
                )
            )
    return run


# -- exclusion -----------------------------------------------------------------------------------


def _pairs(run: _Run) -> Iterator[tuple[_Hold, _Hold]]:
    """Pairs of grants of one name; the one that began first comes first."""
    by_name: dict[str, list[_Hold]] = defaultdict(list)
    for hold in sorted(run.holds, key=lambda hold: hold.start):
        by_name[hold.name].append(hold)
    for same in by_name.values():
        yield from combinations(same, 2)


def _overlaps(run: _Run) -> Iterator[Violation]:
    for one, other in _pairs(run):
        both = min(one.end, other.end) - other.start
        if both <= 0:
            continue
        told = f"{one.call} and {other.call} both held {one.name!r} for {both:.3f} s"
        excuses = [
            fault
            for fault in run.faults
            if fault.excuse is not None
            and fault.start <= other.start
            and fault.end + fault.excuse >= one.start
        ]
        if not excuses:
            yield Violation("overlap", other.start, told)
            continue
        # The first holder learns of it at its next renewal; or at its deadline, if something keeps
        # its renewals from the store.
        allowed = run.ttl / 3 + run.command_timeout + SLACK
        if any(
            fault.start < other.start + allowed and fault.end > other.start - run.command_timeout
            for fault in run.faults
            if fault.excuse is None or fault.end > fault.start
        ):
            allowed = run.ttl + SLACK
        if both - run.stalled(one.pid, other.start, one.end) > allowed:
            late = f"{told}; after {excuses[-1].what!r} the first was told late"
            yield Violation("told late", other.start + allowed, late)


def _tokens(run: _Run) -> Iterator[Violation]:
    for one, other in _pairs(run):
        # Surely granted one after the other: asked for later, or granted after the release.
        in_turn = other.asked >= one.start or one.released <= other.start
        if in_turn and other.token <= one.token and not _forgotten_ahead(run, one, other):
            told = f"{other.name!r}: token {other.token} of {other.call} after {one.token}"
            yield Violation("token", other.start, told)


def _forgotten_ahead(run: _Run, one: _Hold, other: _Hold) -> bool:
    """Whether the clock was ahead before the first grant, and the data was lost before the next.

    What is lost then is the last token, which the time has not reached yet.
    """
    lost = any(
        fault.excuse is not None
        and not fault.what.startswith("clock")
        and fault.start <= other.start
        and fault.end >= one.asked
        for fault in run.faults
    )
    return lost and any(
        fault.leap and fault.start <= one.start and other.asked <= fault.end + fault.leap + SLACK
        for fault in run.faults
    )


def _losses(run: _Run) -> Iterator[Violation]:
    for one in run.holds:
        if one.how in ("", "released"):
            continue
        # What may have kept its last renewals from the store, or the process from sending them.
        since = one.end - run.ttl - run.command_timeout
        excused = any(
            fault.excuse is not None
            and fault.start <= one.end
            and fault.end + fault.excuse >= one.start
            for fault in run.faults
        )
        if not excused and run.is_safe(one.pid, since, one.end):
            told = f"{one.name!r}: the lease of {one.call} was lost ({one.how})"
            yield Violation("loss", one.end, told)


def _outages(run: _Run) -> Iterator[Violation]:
    for one, done in run.done.items():
        call = run.calls[one]
        if done["outcome"] != "unavailable" or call["patience"] < run.command_timeout:
            continue
        if any(call["at"] <= fault.end and fault.start <= done["at"] for fault in run.faults):
            # The last of its requests may have met it, and left no time for another one.
            continue
        # After an outage, it takes a while until everything is found again.
        since = call["at"] - run.recovery
        if run.is_safe(call["pid"], since, done["at"]):
            told = f"{call['op']} of {call['name']!r} ({one}): no answer after "
            took = done["at"] - call["at"]
            yield Violation("outage", done["at"], f"{told}{took:.1f} s, though it could have one")


def _stuck(run: _Run) -> Iterator[Violation]:
    """Processes that got no answer for long after another one had got one."""
    faults = [fault.end - fault.start for fault in run.faults if fault.end < math.inf]
    # Several faults in a row may have met each call of a process, and none of another's.
    allowed = run.recovery + 3 * max(faults, default=0.0)
    silent: dict[int, tuple[float, float]] = {}
    told: set[int] = set()
    for one, done in sorted(run.done.items(), key=lambda item: float(item[1]["at"])):
        pid, at = run.calls[one]["pid"], done["at"]
        if done["outcome"] in ANSWERS:
            silent.pop(pid, None)
            told.discard(pid)
            # The others could have had an answer from now on.
            for other, (began, since) in silent.items():
                silent[other] = began, min(since, at)
        elif done["outcome"] == "unavailable":
            began, since = silent.setdefault(pid, (run.calls[one]["at"], math.inf))
            took = at - since - run.stalled(pid, since, at)
            if took > allowed and pid not in told:
                told.add(pid)
                text = f"process {pid} got no answer for {took:.1f} s and more, another one did"
                yield Violation("stuck", began, text)


# -- bounds and liveness -------------------------------------------------------------------------


def _bounds(run: _Run) -> Iterator[Violation]:
    for one, call in run.calls.items():
        done = run.done.get(one)
        if done is None and call["pid"] in run.killed:
            continue
        began, ended = call["at"], done["at"] if done else run.ended
        took = ended - began - run.stalled(call["pid"], began, ended)
        if took > call["patience"] + run.command_timeout + SLACK:
            how = "took" if done else "has not ended for"
            told = (
                f"{call['op']} of {call['name']!r} ({one}, patience {call['patience']:g} s) {how}"
            )
            yield Violation("bound", began, f"{told} {took:.1f} s")


def _calms(run: _Run) -> Iterator[tuple[float, float]]:
    """The times without a fault."""
    began = run.began
    for fault in sorted(run.faults, key=lambda fault: fault.start):
        if fault.start > began:
            yield began, fault.start
        began = max(began, fault.end)
    if run.ended > began:
        yield began, run.ended


def _liveness(run: _Run) -> Iterator[Violation]:
    names = {call["name"] for call in run.calls.values()}
    for start, end in _calms(run):
        if end - start < run.recovery:
            continue
        for name in names:
            asked = [
                call
                for call in run.calls.values()
                if call["op"] == "acquire"
                and call["name"] == name
                and start <= call["at"] <= start + run.recovery - run.command_timeout
            ]
            granted = any(
                hold.name == name and start <= hold.start <= start + run.recovery
                for hold in run.holds
            )
            if asked and not granted:
                told = f"{name!r}: {len(asked)} acquires and no grant within {run.recovery:.1f} s"
                yield Violation("liveness", start, f"{told} after the last fault was over")


def _progress(run: _Run) -> Iterator[Violation]:
    """In the last calm, every client gets answers; over the run, every one gets a grant."""
    *_, last = [(run.began, run.ended), *_calms(run)]
    granted = {run.calls[hold.call]["who"] for hold in run.holds}
    answered = {
        run.calls[one]["who"]
        for one, done in run.done.items()
        if done["at"] >= last[0] and done["outcome"] in ANSWERS
    }
    alive = {call["who"] for call in run.calls.values() if call["pid"] not in run.killed}
    if last[1] - last[0] < run.recovery:
        return
    for who in sorted(alive - (granted & answered)):
        told = "got no answer after the last fault" if who in granted else "never got a lock"
        yield Violation("progress", last[0], f"{who} {told}")


def _errors(run: _Run) -> Iterator[Violation]:
    for one, done in run.done.items():
        if done["outcome"] not in EXPECTED:
            call = run.calls[one]
            told = f"{call['op']} of {call['name']!r} ({one}): {done['outcome']}"
            yield Violation("error", done["at"], told)


def summary(wrong: Sequence[Violation]) -> str:
    """How many of each kind."""
    count = Counter(one.kind for one in wrong)
    return ", ".join(f"{number} {kind}" for kind, number in sorted(count.items())) or "clean"
