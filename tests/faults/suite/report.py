"""Makes the tables from the outcomes: one for each broker and pool, and one of all together."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from statistics import median

from tests.support.workers import DATABASE

from .checker import FollowUps, Tally
from .kinds import ACKS, EARLY, GUARDED, LONG_TTL, PLAIN, SHORT_TTL
from .outcome import Outcome
from .scenarios import SCENARIOS, Scenario
from .stage import Stage

HEAD = (
    "fault",
    "keys hit",
    "plain: doubles",
    "lost",
    "plain, early acks: doubles",
    "lost",
    "guarded: doubles",
    "lost",
    "follow-ups: doubled",
    "lost",
    "repeated",
    "by `on_commit()`: lost",
    "stale writes",
    "overlaps",
    "take-over",
    "lock free",
)
OVERVIEW_HEAD = (
    "fault",
    "keys hit",
    "plain",
    "early acks",
    "guarded",
    "outbox",
    "`on_commit()`",
    "overlaps",
    "lock free",
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def versions(stage: Stage) -> dict[str, str]:
    """The programs of a stage and their versions."""
    found = {
        "Python": platform.python_version(),
        **{name: version(name) for name in ("Django", "celery", "kombu", "redis")},
        stage.broker.name: stage.broker.version,
    }
    if stage.site.postgres:
        found["PostgreSQL"] = stage.site.query("SHOW server_version")[0][0].split()[0]
    return found


def table(
    outcomes: Sequence[Outcome],
    *,
    keys: int,
    versions: Mapping[str, str],
    backend: str = "redis",
) -> str:
    """Markdown for contributors: how the suite ran, and one table per broker and pool.

    Args:
        backend: Where the locks are kept.
    """
    stages = groupby(outcomes, key=lambda outcome: (outcome.broker, outcome.pool))
    parts = [_preface(keys, versions, backend), _notes(outcomes)]
    parts += [_stage(broker, pool, list(mine), backend) for (broker, pool), mine in stages]
    return "\n".join(part for part in parts if part)


def overview(
    outcomes: Sequence[Outcome],
    *,
    keys: int,
    versions: Mapping[str, str],
    backend: str = "redis",
) -> str:
    """Markdown for the manual: one row for each fault, which adds up all brokers and pools."""
    brokers, pools = (
        ", ".join(dict.fromkeys(names))
        for names in ([one.broker for one in outcomes], [one.pool for one in outcomes])
    )
    stale = sum(one.tallies[GUARDED].stale_writes for one in outcomes)
    present = [each for each in SCENARIOS if each.name in {one.scenario for one in outcomes}]
    failed = {one.scenario for one in outcomes if one.problems}
    shown = [each for each in present if not each.is_variant or each.name in failed]
    lines = [
        "<!-- Written by `make faults`; do not edit. -->",
        "",
        "# What the fault suite measured",
        "",
        f"Each fault was made to happen to {keys} keys of each kind of task, on real workers.",
        f"A row adds up the brokers ({brokers}) and pools ({pools}) in which it can happen.",
        "All bodies are the same: some work, an INSERT without a unique constraint, some work.",
        *_where(backend),
        "",
        "A cell such as `40/2` counts what was doubled and what was lost.",
        "",
        "* **keys hit:** their bodies were running when the fault happened.",
        "* **plain:** a Celery task with late acknowledgement.",
        "* **early acks:** the same with Celery's default.",
        "* **guarded:** a `LockedTask` with `idempotency_key` and `atomic`.",
        (
            "* **outbox:** of two messages that each body sends with `current_run.send()`, those "
            "that came under a second id as well, or took effect twice in spite of their record."
        ),
        "* **`on_commit()`:** what was lost of the same messages, sent with `on_commit()`.",
        "* **overlaps:** pairs of guarded runs of one key at the same time.",
        (
            "* **lock free:** the longest time from the death of a holder until its lock was free; "
            "that of a whole worker is noticed when the next task asks for the lock."
        ),
        "",
        "| " + " | ".join(OVERVIEW_HEAD) + " |",
        "| --- |" + " ---: |" * (len(OVERVIEW_HEAD) - 1),
        *(
            _sum(each, [one for one in outcomes if one.scenario == each.name], backend)
            for each in shown
        ),
        "",
        (
            f"Guarded tasks made {stale} stale writes: commits with a lower fencing token than one "
            "that the key had seen."
        ),
        *_remarks(shown),
        "",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in _named(versions)) + ".",
        (
            "`contributing/faults-table.md` in the repository has a table for each broker and "
            "pool, with some more faults that differ little from these."
        ),
        "",
    ]
    return "\n".join(lines)


def _sum(scenario: Scenario, outcomes: Sequence[Outcome], backend: str) -> str:
    def added(kind: str, what: str) -> str:
        found = [getattr(one.tallies[kind], what) for one in outcomes if kind in one.tallies]
        return str(sum(found)) if found else ""

    sent = [one.follow_ups for one in outcomes]
    hooks = [each.hook_lost for each in sent if each.hook_lost is not None]
    free = [seconds for one in outcomes for seconds in one.tallies[GUARDED].freed]
    cells = [
        _title(scenario, backend, any(one.problems for one in outcomes)),
        added(GUARDED, "hit"),
        *(_pair(added(kind, "doubles"), added(kind, "lost")) for kind in (PLAIN, EARLY, GUARDED)),
        f"{sum(each.doubled for each in sent)}/{sum(each.lost for each in sent)}",
        str(sum(hooks)) if hooks else "",
        added(GUARDED, "overlaps"),
        _longest(free),
    ]
    return "| " + " | ".join(cells) + " |"


def _pair(doubled: str, lost: str) -> str:
    return f"{doubled}/{lost}" if doubled else ""


def _title(scenario: Scenario, backend: str, failed: bool) -> str:
    title = (backend == DATABASE and scenario.on_database) or scenario.title
    return title + (" **failed**" if failed else "")


def _where(backend: str) -> list[str]:
    told = "The locks are in the same PostgreSQL as everything else."
    return [told] if backend == DATABASE else []


def _preface(keys: int, versions: Mapping[str, str], backend: str) -> str:
    acks = {kind: ACKS[kind] for kind in (GUARDED, PLAIN, EARLY)}
    ttl = f"{LONG_TTL:g} s; {SHORT_TTL:g} s where its end is part of the fault"
    lines = [
        "<!-- Written by `make faults`; do not edit. -->",
        "",
        "# What the fault suite measured",
        "",
        f"Each fault was made to happen to {keys} keys of each kind of task, on real workers.",
        "All bodies are the same: some work, an INSERT without a unique constraint, some work.",
        "A guarded body runs in a transaction, in which it sends two follow-ups.",
        "A plain task commits at once, so the kill may come before or after its INSERT.",
        *_where(backend),
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
    """The version of a broker includes its name."""
    return [
        tuple(text.split(" ", 1)) if " " in text else (name, text)  # type: ignore[misc]
        for name, text in versions.items()
    ]


def _stage(broker: str, pool: str, outcomes: Sequence[Outcome], backend: str) -> str:
    lines = [
        f"## {broker}, {pool}",
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- |" + " ---: |" * (len(HEAD) - 1),
        *(_row(outcome, backend) for outcome in outcomes),
        "",
    ]
    return "\n".join(lines)


def _row(outcome: Outcome, backend: str) -> str:
    guarded = outcome.tallies[GUARDED]
    cells = [
        _title(BY_NAME[outcome.scenario], backend, bool(outcome.problems)),
        str(guarded.hit),
        *_damage(outcome.tallies.get(PLAIN)),
        *_damage(outcome.tallies.get(EARLY)),
        *_damage(guarded),
        *_follow_ups(outcome.follow_ups),
        str(guarded.stale_writes),
        str(guarded.overlaps),
        _longest(guarded.takeovers),
        _freed(guarded.freed),
    ]
    return "| " + " | ".join(cells) + " |"


def _damage(tally: Tally | None) -> tuple[str, str]:
    return ("", "") if tally is None else (str(tally.doubles), str(tally.lost))


def _follow_ups(found: FollowUps) -> tuple[str, str, str, str]:
    hook = "" if found.hook_lost is None else str(found.hook_lost)
    return str(found.doubled), str(found.lost), str(found.repeated), hook


def _longest(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    longest = max(seconds)
    return "never" if math.isinf(longest) else f"{longest:.2f} s"


def _freed(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s, {max(seconds):.2f} s" if seconds else "–"


def _notes(outcomes: Sequence[Outcome]) -> str:
    """Explanations of values in some rows."""
    present = {outcome.scenario for outcome in outcomes}
    scenarios: list[Scenario] = [each for each in SCENARIOS if each.name in present]
    lines = [
        "## How to read the tables",
        "",
        "| column | what it counts |",
        "| --- | --- |",
        "| keys hit | keys whose body was running when the fault happened |",
        "| doubles | extra INSERTs: those beyond the first one of a key |",
        "| lost | keys without an INSERT |",
        (
            "| follow-ups | the two tasks that each guarded body sends with "
            "`current_run.send()`; one of them has a record of its own |"
        ),
        (
            "| follow-ups: doubled | follow-ups that came under a second id as well, or took "
            "effect twice in spite of their record |"
        ),
        "| follow-ups: lost | follow-ups that never came, although the key took effect |",
        "| follow-ups: repeated | follow-ups that came again under the same id, which is allowed |",
        "| by `on_commit()`: lost | what the same body sent with `on_commit()`, and never came |",
        "| stale writes | commits with a lower fencing token than one that the key had seen |",
        "| overlaps | pairs of runs of one key that ran at the same time |",
        "| take-over | the longest time from the death of a holder to the next run of its key |",
        "| lock free | the time from the death until the lock is free: median and longest |",
        "",
        (
            "A take-over takes seconds although the lock is free sooner, because the message has "
            "to come again, and then to wait for a child that is free: Celery redelivers the "
            "message of a dead child process within a second, and that of a dead worker when the "
            "broker notices."
        ),
        "If a whole worker dies, its death is noticed when the next task asks for the lock.",
    ]
    lines += _remarks(scenarios)
    lines += [
        f"In the row “{each.title}” of {where.replace(' ', ', ')}, plain tasks are not damaged "
        f"because {why}."
        for each in scenarios
        for where, why in each.harmless.items()
        if where in {f"{outcome.broker} {outcome.pool}" for outcome in outcomes}
    ]
    return "\n".join([*lines, ""])


def _remarks(scenarios: Sequence[Scenario]) -> list[str]:
    """What a reader must know of some rows."""
    answered = [each.title for each in scenarios if each.publish_again]
    lines = []
    if answered:
        lines.append(
            f"In these rows, a message whose task fails is published again, for every kind of "
            f"task: {', '.join(answered)}."
        )
    lines += [
        f"In the row “{each.title}”, runs may overlap because {each.overlaps}."
        for each in scenarios
        if each.overlaps
    ]
    lines += [
        f"In the row “{each.title}”, {each.explained}." for each in scenarios if each.explained
    ]
    return lines
