"""Runs one scenario and judges it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .checker import FollowUps, Tally, check, follow_ups
from .journal import Event
from .kinds import GUARDED
from .run import OutOfTime, Run
from .scenarios import Scenario
from .stage import Stage

UNHIT = "guarded: no key was hit"
HARMLESS = "unguarded: nothing doubled or lost, so the fault had no effect"
MISSED = frozenset({UNHIT, HARMLESS})
"""Problems of a fault that came at the wrong moment; they say nothing about the guard."""

TRIES = 3
"""How often a scenario runs until its fault hits something, on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one scenario on one stage.

    Attributes:
        seconds: How long it took.
        tallies: By kind.
        follow_ups: Of the guarded tasks.
        problems: Why it counts as failed; empty if it passed.
    """

    scenario: str
    broker: str
    pool: str
    seconds: float
    tallies: Mapping[str, Tally]
    problems: list[str] = field(default_factory=list)
    follow_ups: FollowUps = field(default_factory=FollowUps)


def play(stage: Stage, scenario: Scenario, *, keys: int, busy: float) -> Outcome:
    """Run a scenario, wait for its end and judge it; its journal stays in the directory.

    If the fault hit nothing, the scenario runs again.

    Args:
        keys: How many of each kind.
        busy: Seconds for which all slots shall be busy while the faults are made.
    """
    for _ in range(TRIES):
        found = _play(stage, scenario, keys=keys, busy=busy)
        if not found.problems or not MISSED.issuperset(found.problems):
            break
    return found


def _play(stage: Stage, scenario: Scenario, *, keys: int, busy: float) -> Outcome:
    run = Run(
        stage,
        scenario.name,
        keys=keys,
        busy=busy,
        kinds=scenario.kinds,
        task=scenario.task,
        publish_again=scenario.publish_again,
    )
    with run.watched():
        try:
            scenario.play(run)
        except OutOfTime as error:
            run.journal.write("stuck", what=str(error))
        run.settle()
    return outcome(scenario, stage.broker.name, stage.pool.name, run.finish())


def outcome(scenario: Scenario, broker: str, pool: str, events: Sequence[Event]) -> Outcome:
    """Judge a scenario from its journal."""
    tallies = check(events)
    times = [event["at"] for event in events]
    return Outcome(
        scenario=scenario.name,
        broker=broker,
        pool=pool,
        seconds=max(times) - min(times),
        tallies=tallies,
        problems=judge(scenario, tallies, events, f"{broker} {pool}"),
        follow_ups=follow_ups(events),
    )


def judge(
    scenario: Scenario, tallies: Mapping[str, Tally], events: Collection[Event], where: str
) -> list[str]:
    """The problems found.

    The guarded tasks must have met the fault without damage, and the others must show its damage.

    Args:
        where: Broker and pool.
    """
    guarded, found = tallies[GUARDED], follow_ups(events)
    wrong = {
        "double effects": guarded.doubles,
        "lost keys": guarded.lost,
        "effects of unknown keys": guarded.unknown,
        "stale writes": guarded.stale_writes,
        "overlaps": 0 if scenario.overlaps else guarded.overlaps,
        "failed messages": 0 if scenario.publish_again else guarded.failed,
        "bodies without an end": guarded.endless,
        "bodies that died and were not taken over": sum(map(math.isinf, guarded.takeovers)),
        **found.problems,
    }
    problems = [f"guarded: {count} {what}" for what, count in wrong.items() if count]
    if (limit := scenario.free_within) is not None:
        if not guarded.freed:
            problems.append("guarded: no lock of a dead process was seen")
        elif (late := sum(seconds > limit for seconds in guarded.freed)) > 0:
            problems.append(
                f"guarded: {late} of {len(guarded.freed)} locks were not free {limit:g} s "
                f"after the death of their holders, the last one after {max(guarded.freed):.1f} s"
            )
    made = any(event["event"] in ("fault", "hit") for event in events)
    if made and not guarded.hit:
        problems.append(UNHIT)
    if where not in scenario.harmless and not any(
        tally.doubles or tally.lost for kind, tally in tallies.items() if kind != GUARDED
    ):
        problems.append(HARMLESS)
    problems += [f"stuck: {event['what']}" for event in events if event["event"] == "stuck"]
    return problems
