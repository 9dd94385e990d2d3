"""The fault suite's table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.faults.suite.__main__ import main
from tests.faults.suite.checker import FollowUps, Tally
from tests.faults.suite.journal import Journal
from tests.faults.suite.outcome import Outcome
from tests.faults.suite.report import overview, table
from tests.faults.suite.scenarios import SCENARIOS


def tally(**counts: Any) -> Tally:
    none = dict.fromkeys(Tally.__dataclass_fields__, 0)
    return Tally(**{**none, "takeovers": [], "freed": [], **counts})


def outcome(scenario: str = "child-before-commit", **facts: Any) -> Outcome:
    tallies = {"guarded": tally(hit=3), "plain": tally(doubles=7), "early": tally(lost=5)}
    known = {"scenario": scenario, "broker": "redis", "pool": "prefork", "seconds": 1.0}
    return Outcome(**{**known, "tallies": tallies, **facts})


def cells(text: str, title: str) -> list[str]:
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {title}")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def row(one: Outcome) -> dict[str, str]:
    """The row by its headings; a repeated heading has a number."""
    text = table([one], keys=200, versions={})
    names = [
        *("fault", "hit", "plain doubles", "plain lost"),
        *("early doubles", "early lost", "doubles", "lost"),
        *("follow-ups doubled", "follow-ups lost", "follow-ups repeated", "hook lost"),
        *("stale writes", "overlaps", "take-over", "free"),
    ]
    found = cells(text, next(each.title for each in SCENARIOS if each.name == one.scenario))
    assert len(found) == len(names)
    return dict(zip(names, found, strict=True))


def test_a_row_has_each_number_in_its_column() -> None:
    guarded = tally(
        hit=3,
        doubles=1,
        lost=2,
        stale_writes=4,
        overlaps=6,
        takeovers=[0.5, 8.2],
        freed=[0.31, 0.9, 0.2],
    )
    found = row(
        outcome(
            tallies={"guarded": guarded, "plain": tally(doubles=7), "early": tally(lost=5)},
            follow_ups=FollowUps(lost=8, doubled=9, repeated=10, hook_lost=11),
        )
    )
    assert found == {
        "fault": "child SIGKILL before the commit",
        "hit": "3",
        "plain doubles": "7",
        "plain lost": "0",
        "early doubles": "0",
        "early lost": "5",
        "doubles": "1",
        "lost": "2",
        "follow-ups doubled": "9",
        "follow-ups lost": "8",
        "follow-ups repeated": "10",
        "hook lost": "11",
        "stale writes": "4",
        "overlaps": "6",
        "take-over": "8.20 s",
        "free": "0.31 s, 0.90 s",
    }


def test_a_kind_that_did_not_take_part_has_empty_cells() -> None:
    found = row(outcome(tallies={"guarded": tally(), "plain": tally()}))
    assert (found["early doubles"], found["early lost"], found["take-over"]) == ("", "", "–")
    assert found["hook lost"] == ""


def test_a_death_without_successor_is_not_hidden() -> None:
    found = row(outcome(tallies={"guarded": tally(takeovers=[0.1, math.inf]), "plain": tally()}))
    assert found["take-over"] == "never"


def test_a_failed_scenario_is_marked() -> None:
    assert "**failed**" in row(outcome(problems=["guarded: 1 lost keys"]))["fault"]


def test_every_broker_and_pool_has_a_separate_table() -> None:
    text = table(
        [outcome(), outcome(pool="solo"), outcome(broker="rabbitmq", pool="solo")],
        keys=200,
        versions={},
    )
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[1:] == ["## redis, prefork", "## redis, solo", "## rabbitmq, solo"]


def test_keys_versions_and_acknowledgements_come_before_the_table() -> None:
    text = table([outcome()], keys=123, versions={"Django": "5.2", "redis": "Redis 7.0.15"})
    assert "123 keys" in text
    assert "Versions: Django 5.2, Redis 7.0.15." in text
    assert "late, reject_on_worker_lost" in cells(text, "plain |")[1]
    assert "early" in cells(text, "plain, early acks")[1]


def test_the_reasons_of_a_scenario_come_before_the_tables() -> None:
    (scenario,) = [each for each in SCENARIOS if each.name == "locks-emptied"]
    assert scenario.overlaps in table([outcome("locks-emptied")], keys=1, versions={})
    assert scenario.overlaps not in table([outcome()], keys=1, versions={})


def test_the_overview_adds_up_all_brokers_and_pools() -> None:
    def dead(*freed: float) -> dict[str, Tally]:
        return {"guarded": tally(hit=3, lost=1, freed=[*freed]), "plain": tally(doubles=7)}

    outcomes = [
        outcome(tallies=dead(0.2, 0.9), follow_ups=FollowUps(lost=8, hook_lost=11)),
        outcome(broker="rabbitmq", pool="solo", tallies=dead(0.4), problems=["1 lost keys"]),
    ]
    text = overview(outcomes, keys=200, versions={"Django": "5.2"})
    assert cells(text, "child SIGKILL before the commit") == [
        "child SIGKILL before the commit **failed**",
        *("6", "14/0", "", "0/2", "0/8", "11", "0", "0.90 s"),
    ]
    assert "brokers (redis, rabbitmq) and pools (prefork, solo)" in text
    assert "Versions: Django 5.2." in text


@pytest.mark.parametrize("problems", [[], ["1 lost keys"]])
def test_the_overview_leaves_a_variant_out_unless_it_failed(problems: list[str]) -> None:
    variant = next(each for each in SCENARIOS if each.is_variant)
    text = overview([outcome(variant.name, problems=problems)], keys=200, versions={})
    assert (f"| {variant.title}" in text) == bool(problems)


@pytest.mark.parametrize(("effects", "code"), [(1, 0), (2, 1), (0, 1)])
def test_stored_journals_can_be_judged_again(tmp_path: Path, effects: int, code: int) -> None:
    (tmp_path / "redis-solo").mkdir()
    journal = Journal(tmp_path / "redis-solo" / "late.jsonl")
    for kind, count in (("guarded", effects), ("plain", 2)):
        journal.write("sent", kind=kind, key=1, delivery="d")
        for run in range(count):
            journal.write("effect", kind=kind, key=1, token=None, run=f"{kind}-{run}")
    known = {"keys": 1, "versions": {"Django": "5.2"}, "seconds": 60}
    (tmp_path / "results.json").write_text(json.dumps(known))
    table = tmp_path / "table.md"
    summed = tmp_path / "overview.md"
    files = ["--table", str(table), "--overview", str(summed)]
    assert main(["--again", "--directory", str(tmp_path), *files]) == code
    assert cells(summed.read_text(), "late duplicates")[2] == "1/0"
    row = cells(table.read_text(), "late duplicates")
    assert (row[2], row[6]) == ("1", str(max(0, effects - 1)))
    assert ("**failed**" in row[0]) == bool(code)
