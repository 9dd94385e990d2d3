"""The short form of the fault suite: Redis, prefork, 20 keys per scenario.

``make faults`` runs all of it; see ``tests/faults/suite``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from testproject.servers import ServerNotFound
from tests.conftest import missing
from tests.faults.suite.brokers import RedisBroker
from tests.faults.suite.outcome import play
from tests.faults.suite.scenarios import SCENARIOS, Scenario
from tests.faults.suite.stage import SMALL_POOLS, Stage
from tests.support.postgres import PostgresNotFound

KEYS = 20
BUSY = 2.0
FREE_WITHIN = 5.0
"""Other tests run at the same time, unlike with ``make faults``; a lease expires after 30 s."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Workers on Redis and, where it is installed and in CI, PostgreSQL."""
    in_ci = bool(os.environ.get("CI"))
    directory = tmp_path_factory.mktemp("suite")
    try:
        with Stage(
            RedisBroker(), SMALL_POOLS["prefork"], directory, postgres_needed=in_ci
        ) as stage:
            yield stage
    except (ServerNotFound, PostgresNotFound) as error:
        missing(str(error))


@pytest.mark.parametrize(
    "scenario", [each for each in SCENARIOS if each.short], ids=lambda scenario: scenario.name
)
def test_g12_g13_each_key_takes_effect_once_whatever_happens(
    stage: Stage, scenario: Scenario
) -> None:
    """Without the guard it does not, so the fault was real."""
    if stage.database is None and not scenario.on_sqlite:
        pytest.skip("needs two transactions at a time, and SQLite has one")
    if scenario.free_within is not None:
        scenario = replace(scenario, free_within=FREE_WITHIN)
    outcome = play(stage, scenario, keys=KEYS, busy=BUSY)
    assert not outcome.problems, (outcome.tallies, f"see {stage.directory}/{scenario.name}*.jsonl")
