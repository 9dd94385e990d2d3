"""What ``make soak`` draws, and what it finds in a journal."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from tests.faults.suite.checker import check, follow_ups
from tests.faults.suite.draws import FAULTS, faults, order
from tests.faults.suite.kinds import GUARDED
from tests.faults.suite.soak import judge, parse, summary
from tests.faults.suite.trouble import BROKEN, EMPTIED


def test_the_same_seed_draws_the_same_faults():
    one, again, other = (list(islice(faults(seed, "prefork"), 200)) for seed in "112")
    assert one == again
    assert one != other
    assert [order("1", "prefork", key) for key in range(50)] == [
        order("1", "prefork", key) for key in range(50)
    ]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_exactly_the_faults_of_the_pool_are_drawn(pool):
    drawn = {draw.what for draw in islice(faults("1", pool), 1000)}
    assert drawn == {what for what, (_, pools) in FAULTS.items() if pool in pools}


def test_without_a_seed_a_random_one_is_used():
    assert parse([]).seed != parse([]).seed
    assert parse(["--seed", "7"]).seed == "7"


def event(name: str, at: float, **facts: Any) -> dict[str, Any]:
    return {"event": name, "at": at, "kind": GUARDED, "key": 1, **facts}


def span(run: str, start: float, end: float, token: int) -> list[dict[str, Any]]:
    return [
        event("begin", start, run=run, pid=1, token=token),
        event("committed", end, run=run, token=token),
        event("end", end, run=run, how="returned"),
    ]


def problems(*events: dict[str, Any]) -> list[str]:
    sent = event("sent", 0.0, delivery="d")
    final = event("final", 99.0, delivery="d", state="SUCCESS")
    found = [sent, *events, final]
    return judge(check(found)[GUARDED], found)


EFFECT = event("effect", 100.0, run="a", token=1)


def test_one_effect_is_clean():
    assert problems(*span("a", 10, 11, 1), EFFECT) == []


def test_doubles_losses_and_hangs_are_found():
    assert problems(*span("a", 10, 11, 1), EFFECT, EFFECT) == ["1 double effects"]
    assert problems(*span("a", 10, 11, 1)) == ["1 lost keys"]
    begin = event("begin", 10, run="a", pid=1, token=1)
    assert problems(begin, EFFECT) == ["1 bodies without an end"]
    stuck = {"event": "stuck", "at": 1.0, "what": "1 message"}
    assert problems(*span("a", 10, 11, 1), EFFECT, stuck) == ["stuck: 1 message"]


def test_the_last_line_has_all_numbers_that_must_be_0():
    def line(*found: dict[str, Any]) -> str:
        sent = event("sent", 0.0, delivery="d", follow_ups=2)
        found = (sent, *found)
        return summary(check(found)[GUARDED], follow_ups(found), found)

    came = [
        event("followed", 12.0, by="follower", delivery="f"),
        event("followed", 12.0, by="recorded_follower", delivery="r"),
        {**EFFECT, "kind": "recorded_follower"},
    ]
    clean = [*span("a", 10, 11, 1), EFFECT, *came]
    assert line(*clean) == "0 doubled, 0 lost, 0 hung, 0 follow-ups lost"
    again = event("followed", 13.0, by="follower", delivery="g")
    assert line(*clean, EFFECT, again) == "2 doubled, 0 lost, 0 hung, 0 follow-ups lost"
    assert line(*clean[:-3]) == "0 doubled, 0 lost, 0 hung, 2 follow-ups lost"
    stuck = {"event": "stuck", "at": 1.0, "what": "1 message"}
    begin = event("begin", 10, run="b", pid=1, token=1)
    assert line(stuck, begin) == "0 doubled, 1 lost, 2 hung, 0 follow-ups lost"


def test_an_overlap_is_a_problem_unless_the_lock_was_lost():
    overlap = [*span("a", 10, 20, 1), *span("b", 15, 25, 2), EFFECT]
    found = ["1 overlaps of bodies that nobody took the lock from"]
    assert problems(*overlap) == found
    late = {"event": "fault", "what": EMPTIED[0], "pids": [], "at": 16.0}
    assert problems(*overlap, late) == found
    assert problems(*overlap, {**late, "at": 14.0}) == []
    broken = {"event": "fault", "what": BROKEN, "pids": [], "at": 14.0}
    assert problems(*overlap, {**broken, "key": 2}) == found
    assert problems(*overlap, {**broken, "key": 1}) == []
