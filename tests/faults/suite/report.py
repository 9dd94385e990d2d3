"""From outcomes to the table of the documentation."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from statistics import median

from .checker import Tally
from .kinds import ACKS, EARLY, GUARDED, LONG_TTL, PLAIN, SHORT_TTL
from .outcome import Outcome
from .scenarios import SCENARIOS, Scenario
from .stage import Stage

__all__ = ["table", "versions"]

HEAD = (
    "fault",
    "keys hit",
    "plain: doubles",
    "lost",
    "plain, early acks: doubles",
    "lost",
    "guarded: doubles",
    "lost",
    "stale writes",
    "overlaps",
    "take-over",
    "lock free",
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def versions(stage: Stage) -> dict[str, str]:
    """What ran on a stage, and in which version."""
    found = {
        "Python": platform.python_version(),
        **{name: version(name) for name in ("Django", "celery", "kombu", "redis")},
        stage.broker.name: stage.broker.version,
    }
    if stage.site.postgres:
        found["PostgreSQL"] = stage.site.query("SHOW server_version")[0][0].split()[0]
    return found


def table(outcomes: Sequence[Outcome], *, keys: int, versions: Mapping[str, str]) -> str:
    """Markdown: what was run, and one table per broker and pool."""
    stages = groupby(outcomes, key=lambda outcome: (outcome.broker, outcome.pool))
    parts = [_preface(keys, versions)]
    parts += [_stage(broker, pool, list(mine)) for (broker, pool), mine in stages]
    parts.append(_notes(outcomes))
    return "\n".join(part for part in parts if part)


def _preface(keys: int, versions: Mapping[str, str]) -> str:
    acks = {kind: ACKS[kind] for kind in (GUARDED, PLAIN, EARLY)}
    ttl = f"{LONG_TTL:g} s; {SHORT_TTL:g} s where its end is part of the fault"
    lines = [
        "<!-- Written by `make faults`; do not edit. -->",
        "",
        "# What the fault suite measured",
        "",
        f"Each scenario had {keys} keys of each kind of task, on real workers and servers.",
        "A key is *hit* where the fault met it while its body ran.",
        "All have the same body: some work, an INSERT without a unique constraint, some work.",
        "Around a guarded body there is a transaction.",
        "The INSERT of a plain one is committed at once: a death before the commit comes after it,",
        "or before it, where only a message that was acknowledged early is lost by it.",
        "",
        "| task | acknowledgement | TTL of the lock |",
        "| --- | --- | --- |",
        f"| guarded: `LockedTask`, `idempotency_key`, `atomic` | {acks[GUARDED]} | {ttl} |",
        f"| plain | {acks[PLAIN]} | – |",
        f"| plain, early acks | {acks[EARLY]} | – |",
        "",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in _named(versions)) + ".",
        "",
    ]
    return "\n".join(lines)


def _named(versions: Mapping[str, str]) -> list[tuple[str, str]]:
    """A broker's version has its name in it."""
    return [
        tuple(text.split(" ", 1)) if " " in text else (name, text)  # type: ignore[misc]
        for name, text in versions.items()
    ]


def _stage(broker: str, pool: str, outcomes: Sequence[Outcome]) -> str:
    lines = [
        f"## {broker}, {pool}",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- |" + " ---: |" * (len(HEAD) - 1),
        *(_row(outcome) for outcome in outcomes),
        "",
    ]
    return "\n".join(lines)


def _row(outcome: Outcome) -> str:
    scenario = BY_NAME[outcome.scenario]
    guarded = outcome.tallies[GUARDED]
    cells = [
        scenario.title + (" **failed**" if outcome.problems else ""),
        str(guarded.struck),
        *_damage(outcome.tallies.get(PLAIN)),
        *_damage(outcome.tallies.get(EARLY)),
        *_damage(guarded),
        str(guarded.stale_writes),
        str(guarded.overlaps),
        _longest(guarded.takeovers),
        _freed(guarded.freed),
    ]
    return "| " + " | ".join(cells) + " |"


def _damage(tally: Tally | None) -> tuple[str, str]:
    return ("", "") if tally is None else (str(tally.doubles), str(tally.lost))


def _longest(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    longest = max(seconds)
    return "never" if math.isinf(longest) else f"{longest:.2f} s"


def _freed(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s, {max(seconds):.2f} s" if seconds else "–"


def _notes(outcomes: Sequence[Outcome]) -> str:
    """Why what is seen in some rows must be so."""
    present = {outcome.scenario for outcome in outcomes}
    scenarios: list[Scenario] = [each for each in SCENARIOS if each.name in present]
    lines = [
        "*Take-over* is the longest time from the death of a holder to the next body of its key.",
        "Celery waits ten seconds before it delivers the message of a dead child again.",
        "*Lock free* is the time, median and longest, until somebody who only reads saw that.",
        "A whole worker leaves nobody to see its death but the next who asks for the lock.",
    ]
    answered = [each.title for each in scenarios if each.publish_again]
    if answered:
        lines.append(
            f"A message that ends with a failure is published again, of all tasks: "
            f"{', '.join(answered)}."
        )
    lines += [f"Overlaps, {each.title}: {each.overlaps}." for each in scenarios if each.overlaps]
    lines += [
        f"No damage to plain tasks, {each.title} ({where.replace(' ', ', ')}): {why}."
        for each in scenarios
        for where, why in each.harmless.items()
        if where in {f"{outcome.broker} {outcome.pool}" for outcome in outcomes}
    ]
    return "\n".join([*lines, ""])
