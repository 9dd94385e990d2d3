"""The fault suite's checker on made-up logs: each kind of finding is found, and nothing else."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from tests.faults.suite.checker import FollowUps, Tally, check, follow_ups
from tests.faults.suite.journal import Event, Journal
from tests.faults.suite.outcome import judge
from tests.faults.suite.scenarios import Scenario

runs = itertools.count(1)


def sent(key: int = 1, kind: str = "guarded") -> Event:
    return {"event": "sent", "at": 0.0, "kind": kind, "key": key, "delivery": f"d{key}"}


def body(
    start: float,
    end: float | None,
    *,
    key: int = 1,
    kind: str = "guarded",
    pid: int = 10,
    token: int | None = 1,
    committed: float | None = None,
    lost: float | None = None,
    effect: bool | None = None,
) -> list[Event]:
    """The events of one body; by default it takes effect if it commits."""
    run = f"r{next(runs)}"
    about = {"run": run, "kind": kind, "key": key, "token": token}
    lines: list[Event] = [
        {"event": "begin", "at": start, "pid": pid, "delivery": f"d{key}", "owner": "o", **about}
    ]
    if lost is not None:
        lines.append({"event": "lost", "run": run, "at": lost})
    if committed is not None:
        lines.append({"event": "committed", "at": committed, **about})
    if end is not None:
        lines.append({"event": "end", "run": run, "at": end, "how": "returned"})
    if committed is not None if effect is None else effect:
        lines.append({"event": "effect", "at": 99.0, **about})
    return lines


def death(at: float, pid: int = 10) -> Event:
    return {"event": "death", "at": at, "pid": pid}


def tally(*events: Event, kind: str = "guarded") -> Tally:
    return check(events)[kind]


def test_a_clean_run_has_no_findings() -> None:
    found = tally(sent(1), sent(2), *body(1, 2, committed=2), *body(1, 2, key=2, committed=2))
    assert (found.keys, found.bodies) == (2, 2)
    assert not any(
        (
            found.doubles,
            found.lost,
            found.unknown,
            found.overlaps,
            found.stale_spans,
            found.stale_writes,
            found.hit,
            found.failed,
            found.endless,
        )
    )
    assert list(found.takeovers) == list(found.freed) == []


def test_a_second_effect_is_a_double() -> None:
    assert tally(sent(), *body(1, 2, committed=2), *body(3, 4, committed=4, token=2)).doubles == 1


def test_a_key_without_effect_is_lost() -> None:
    found = tally(sent(1), sent(2), *body(1, 2, key=2, committed=2))
    assert (found.lost, found.doubles) == (1, 0)


def test_an_effect_of_a_body_without_a_commit_event_counts() -> None:
    found = tally(sent(), *body(1, None, effect=True), death(2))
    assert (found.lost, found.doubles, list(found.takeovers)) == (0, 0, [])


def test_an_effect_of_an_unknown_key_is_found() -> None:
    assert tally(sent(1), *body(1, 2, committed=2), *body(1, 2, key=7, committed=2)).unknown == 1


def test_kinds_are_counted_apart() -> None:
    events = [sent(), sent(kind="plain"), *body(1, 2, committed=2)]
    events += [*body(1, 2, kind="plain", committed=1), *body(3, 4, kind="plain", committed=3)]
    assert (check(events)["guarded"].doubles, check(events)["plain"].doubles) == (0, 1)


def test_two_bodies_that_hold_at_the_same_time_overlap() -> None:
    found = tally(sent(), *body(1, 3, committed=3), *body(2, 4, token=2))
    assert (found.overlaps, found.stale_spans) == (1, 0)


def test_bodies_of_other_keys_do_not_overlap() -> None:
    assert tally(sent(1), sent(2), *body(1, 3), *body(2, 4, key=2)).overlaps == 0


def test_a_body_that_knows_its_loss_is_a_stale_span_and_no_overlap() -> None:
    found = tally(sent(), *body(1, 5, lost=2), *body(3, 4, token=2, committed=4))
    assert (found.overlaps, found.stale_spans) == (0, 1)


def test_a_body_that_had_lost_before_it_began_is_a_stale_span_and_no_overlap() -> None:
    found = tally(sent(), *body(1, 5, token=2, committed=5), *body(2, 3, lost=2))
    assert (found.overlaps, found.stale_spans) == (0, 1)


def test_a_body_that_learned_of_its_loss_too_late_overlaps() -> None:
    assert tally(sent(), *body(1, 5, lost=3.5), *body(3, 4, token=2)).overlaps == 1


def test_a_commit_with_an_older_token_is_a_stale_write() -> None:
    late = body(1, 9, token=1, lost=2, committed=9)
    assert tally(sent(), *late, *body(3, 4, token=2, committed=4)).stale_writes == 1
    in_order = body(1, 2, token=1, committed=2)
    assert tally(sent(), *in_order, *body(3, 4, token=2, committed=4)).stale_writes == 0


def test_a_body_ends_with_its_process() -> None:
    found = tally(sent(), *body(1, None), death(2), *body(3, 4, pid=11, token=2, committed=4))
    assert (found.overlaps, found.endless) == (0, 0)
    assert found.takeovers == [1]


def test_an_earlier_death_of_another_process_with_the_same_id_does_not_count() -> None:
    assert tally(sent(), death(0.5), *body(1, None)).endless == 1


def test_a_dead_body_without_a_successor_is_reported() -> None:
    assert tally(sent(), *body(1, None), death(2)).takeovers == [math.inf]


def test_a_body_that_took_effect_before_it_died_needs_no_successor() -> None:
    found = tally(sent(), *body(1, None, committed=1.5), death(2))
    assert (list(found.takeovers), found.lost) == ([], 0)


def test_a_body_without_an_end_is_reported() -> None:
    assert tally(sent(), *body(1, None)).endless == 1


def test_a_freed_lock_is_reported_with_its_kind() -> None:
    dead = body(1, None)
    freed = {"event": "freed", "at": 3.0, "run": dead[0]["run"], "key": 1, "after": 0.4}
    found = check([sent(), sent(kind="plain"), *dead, death(2), freed])
    assert (list(found["guarded"].freed), list(found["plain"].freed)) == ([0.4], [])


@pytest.mark.parametrize(("pids", "hit"), [([], 2), ([10], 1), ([12], 0)])
def test_a_fault_meets_the_keys_whose_bodies_run_in_its_processes(
    pids: list[int], hit: int
) -> None:
    fault = {"event": "fault", "at": 2.0, "what": "x", "pids": pids}
    bodies = [*body(1, 3), *body(1, 3, key=2, pid=11), *body(2.5, 3, key=3)]
    assert tally(sent(1), sent(2), sent(3), *bodies, fault).hit == hit


def test_a_bodys_own_fault_meets_its_key() -> None:
    hit = {"event": "hit", "at": 1.0, "kind": "guarded", "key": 1, "what": "die"}
    assert tally(sent(), hit).hit == 1


def test_messages_that_failed_or_were_revoked_are_counted() -> None:
    ends = [
        {"event": "final", "at": 1.0, "kind": "guarded", "key": 1, "delivery": "d", "state": state}
        for state in ("SUCCESS", "FAILURE", "REVOKED")
    ]
    assert tally(sent(), *ends).failed == 2


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    journal.write("sent", at=0.0, kind="guarded", key=1, delivery="d")
    with journal.path.open("ab") as file:
        file.write(b'{"event": "half')
    assert journal.new() == [sent() | {"delivery": "d"}]
    with journal.path.open("ab") as file:
        file.write(b'", "at": 1}\n')
    assert journal.new() == [{"event": "half", "at": 1}]
    assert journal.first("x")
    assert not journal.first("x")


# -- follow-ups --------------------------------------------------------------------------

SENDING = sent() | {"follow_ups": 2}


def followed(by: str, delivery: str, key: int = 1) -> Event:
    return {"event": "followed", "at": 5.0, "by": by, "key": key, "delivery": delivery}


def row(delivery: str = "b", key: int = 1, kind: str = "recorded_follower") -> Event:
    return {"event": "effect", "at": 99.0, "kind": kind, "key": key, "run": delivery, "token": None}


CAME = [followed("follower", "a"), followed("recorded_follower", "b"), row()]


def test_follow_ups_delivered_once_are_clean() -> None:
    found = follow_ups([SENDING, *body(1, 2, committed=2), *CAME])
    assert found == FollowUps(expected=2)
    assert not any(found.problems.values())


def test_a_follow_up_delivered_again_under_its_id_is_reported_and_allowed() -> None:
    again = [followed("follower", "a"), followed("recorded_follower", "b")]
    found = follow_ups([SENDING, *body(1, 2, committed=2), *CAME, *again])
    assert found == FollowUps(expected=2, repeated=2)
    assert not any(found.problems.values())


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], {"lost": 2}),
        (CAME[:1], {"lost": 1}),
        (CAME[1:], {"lost": 1}),
        # It was delivered, but rolled back.
        (CAME[:2], {"lost": 1}),
        ([*CAME, followed("follower", "c")], {"doubled": 1}),
        ([*CAME, row()], {"doubled": 1}),
        ([*CAME, followed("follower", "d", key=2)], {"unfounded": 1}),
        ([*CAME, {"event": "pending", "at": 9.0, "count": 3}], {"pending": 3}),
    ],
)
def test_forbidden_outcomes_of_follow_ups_are_found(
    events: list[Event], expected: dict[str, int]
) -> None:
    found = follow_ups([SENDING, *body(1, 2, committed=2), *events])
    assert found == FollowUps(expected=2, **expected)
    assert sum(found.problems.values()) == sum(expected.values())


def test_keys_without_follow_ups_or_effect_are_not_expected() -> None:
    assert follow_ups([sent(), *body(1, 2, committed=2)]) == FollowUps()
    assert follow_ups([SENDING, *body(1, None), death(2)]) == FollowUps()


def test_follow_ups_sent_with_on_commit_are_counted_separately() -> None:
    events = [{**SENDING, "key": key, "hook": True} for key in (1, 2, 3)]
    for key in (1, 2):
        events += [*body(1, 2, key=key, committed=2), row(key=key)]
        events += [followed("follower", "a", key), followed("recorded_follower", "b", key)]
    events.append(followed("hook_follower", "h"))
    assert follow_ups(events) == FollowUps(expected=4, hook_lost=1)


def test_follow_ups_published_by_the_command_are_reported() -> None:
    commands = [
        {"event": "command", "at": 1.0, "code": 1, "said": "no broker"},
        {"event": "command", "at": 2.0, "code": 0, "published": 4, "pending": 0},
    ]
    assert follow_ups(commands).by_command == 4


# -- the verdict -------------------------------------------------------------------------


def scenario(**options: Any) -> Scenario:
    return Scenario(name="x", title="x", play=lambda run: None, **options)


BITTEN = [
    sent(kind="plain"),
    *body(1, 2, kind="plain", committed=1),
    *body(3, 4, kind="plain", committed=3),
]


def problems(*events: Event, **options: Any) -> list[str]:
    everything = [*BITTEN, *events]
    return judge(scenario(**options), check(everything), everything, "redis solo")


def test_a_clean_guard_beside_damaged_tasks_is_no_problem() -> None:
    assert problems(sent(), *body(1, 2, committed=2)) == []


FAILED = {
    "event": "final",
    "at": 1,
    "kind": "guarded",
    "key": 1,
    "delivery": "d",
    "state": "FAILURE",
}


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([*body(1, 2, committed=2), *body(3, 4, committed=4, token=2)], "double"),
        ([], "lost"),
        ([*body(1, 2, committed=2), *body(1, 2, key=7, committed=2)], "unknown"),
        ([*body(1, 2, committed=2), *body(1.5, 2, token=2)], "overlaps"),
        ([*body(1, 5, committed=5, token=1), *body(3, 4, committed=4, token=2)], "stale writes"),
        ([*body(1, 2, committed=2), *body(3, None)], "without an end"),
        ([*body(1, None), death(2), *body(0, 1, committed=1)], "taken over"),
        ([*body(1, 2, committed=2), FAILED], "failed messages"),
        ([*body(1, 2, committed=2), {"event": "stuck", "at": 1, "what": "it hangs"}], "it hangs"),
        ([*body(1, 2, committed=2), SENDING], "2 lost follow-ups"),
    ],
)
def test_each_finding_is_a_problem(events: list[Event], problem: str) -> None:
    assert any(problem in text for text in problems(sent(), *events))


def test_an_expected_overlap_is_no_problem() -> None:
    overlapping = [sent(), *body(1, 2, committed=2), *body(1.5, 2, token=2)]
    assert problems(*overlapping, overlaps="the store forgot") == []
    assert problems(sent(), *body(1, 2, committed=2), FAILED, publish_again=True) == []


def test_a_lock_must_be_free_within_the_time_of_the_scenario() -> None:
    dead = body(1, None)

    def freed(after: float) -> Event:
        return {"event": "freed", "at": 9.0, "run": dead[0]["run"], "key": 1, "after": after}

    events = [sent(), *dead, death(2), *body(3, 4, pid=11, token=2, committed=4)]
    assert problems(*events, freed(0.9), freed(0.2), free_within=1.0) == []
    [problem] = problems(*events, freed(0.8), freed(0.9), freed(1.1), free_within=1.0)
    assert "1 of 3 locks" in problem
    assert "the last one after 1.1 s" in problem
    assert "no lock of a dead process" in problems(*events, free_within=1.0)[0]


def test_a_fault_without_damage_is_a_problem_unless_explained() -> None:
    events = [sent(), *body(1, 2, committed=2), sent(kind="plain")]
    events += body(1, 2, kind="plain", committed=1)
    assert "had no effect" in judge(scenario(), check(events), events, "redis solo")[0]
    excused = scenario(harmless={"redis solo": "it cannot"})
    assert judge(excused, check(events), events, "redis solo") == []
    assert judge(excused, check(events), events, "redis threads") != []


def test_a_fault_that_met_no_guarded_key_is_a_problem() -> None:
    events = [sent(), *body(1, 2, committed=2)]
    fault = {"event": "fault", "at": 1.5, "what": "x", "pids": []}
    assert problems(*events, fault) == []
    assert problems(*events, fault | {"at": 3.0}) == ["guarded: no key was hit"]
