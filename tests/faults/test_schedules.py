"""A short run of the drawn schedules, and the fixed ones.

``make schedules`` draws for minutes, for every store; see ``tests/faults/schedules``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testproject.servers import ServerNotFound
from tests.conftest import missing
from tests.faults.schedules.beds_redis import RedisBed
from tests.faults.schedules.checker import check, tally
from tests.faults.schedules.draws import Draw, faults
from tests.faults.schedules.drive import Crew, Drive
from tests.faults.schedules.scenarios import SCENARIOS, Scenario


class BriefBed(RedisBed):
    """With short leases, so that everything is as before after a few seconds."""

    ttl = 1.5
    command_timeout = 0.5


def test_a_drawn_schedule_is_the_same_for_the_same_seed() -> None:
    chances = {"cut": 2, "killed": 1, "paused": 3}
    one, two = faults("1", chances, 9.0), faults("1", chances, 9.0)
    other = faults("2", chances, 9.0)
    drawn = [next(one) for _ in range(20)]
    assert drawn == [next(two) for _ in range(20)]
    assert drawn != [next(other) for _ in range(20)]


def test_a_short_schedule_violates_nothing(tmp_path: Path) -> None:
    try:
        with BriefBed(tmp_path) as bed:
            draws = [Draw(0.5, "cut", 0.0, 0.0), Draw(0.5, "flushed", 0.0, 0.0)]
            events = Drive(bed, "1", Crew(long=0.0, longest=0.0)).run(draws, 2.0)
    except ServerNotFound as error:
        missing(str(error))
    # Whether each client gets its turn in so short a time depends on the machine.
    assert [found for found in check(events) if found.kind != "progress"] == []
    assert sum(row.grants for row in tally(events)) > 10
    assert {row.fault for row in tally(events)} >= {"cut", "flushed"}


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_fixed_schedule_violates_nothing(scenario: Scenario, tmp_path: Path) -> None:
    with scenario.bed(tmp_path) as bed:
        wrong = check(Drive(bed, "1", scenario.crew).run(scenario.draws, scenario.seconds))
    assert wrong == []
