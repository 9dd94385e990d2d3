"""Results that are stored, shown and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compare, store
from benchmarks.budgets import Budget, judge
from benchmarks.model import OURS, Metric, Result, RowResult, Series, SubjectResult
from benchmarks.report import amount, render
from benchmarks.stolen import Stolen

CYCLE = Metric("cycle", "s", floor="bare", percentiles=(99,))
TRIPS = Metric("round_trips")


def result(
    ours: list[float], *, trips: float = 2.0, started: str = "2026-01-01T00:00:00Z"
) -> Result:
    row = RowResult(
        "cycle.idle.same",
        "One name",
        (CYCLE, TRIPS),
        subjects={
            "bare": SubjectResult(
                "floor", "plain", {"cycle": Series([1e-4] * len(ours), {"99": 2e-4})}
            ),
            OURS: SubjectResult(
                "ours",
                "defaults",
                {"cycle": Series(ours, {"99": 3e-4}), "round_trips": Series([trips])},
            ),
            "gone": SubjectResult("peer", "as it comes", {}, "is not installed"),
        },
        seconds=1.5,
    )
    packages = {"redis": "8.1.0"}
    about = {"python": "CPython 3.11", "redis_server": "7.0", "cpus": 2, "load_at_start": 0.1}
    return Result(started, False, {**about, "packages": packages}, {row.name: row})


FIRST = result([1.0e-4, 1.1e-4, 1.2e-4])


def test_a_stored_result_is_loaded_unchanged(tmp_path: Path) -> None:
    path = store.write(FIRST, tmp_path)
    assert store.read(path) == FIRST


def test_the_file_contains_ratios_and_verdicts_for_other_programs(tmp_path: Path) -> None:
    data = json.loads(store.write(FIRST, tmp_path).read_text())
    told = data["rows"]["cycle.idle.same"]["subjects"][OURS]["series"]["cycle"]["ratio"]
    assert told["spread"]["median"] == pytest.approx(1.1)
    assert told["percentiles"]["99"] == pytest.approx(1.5)
    assert {verdict["budget"]["row"] for verdict in data["verdicts"]} == {"cycle.idle.same"}


def test_the_latest_results_are_found_in_order(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.latest(2, tmp_path)
    later = store.write(result([1e-4], started="2026-01-02T00:00:00Z"), tmp_path)
    earlier = store.write(result([1e-4], started="2026-01-01T23:59:59Z"), tmp_path)
    assert store.latest(2, tmp_path) == [earlier, later]


# -- comparing ------------------------------------------------------------------------------


def directions(second: Result) -> dict[str, str]:
    return {move.metric.name: move.direction for move in compare.moves(FIRST, second)}


def test_a_difference_within_the_spread_is_no_change() -> None:
    assert directions(result([1.1e-4, 1.2e-4, 1.3e-4])) == {"cycle": "same", "round_trips": "same"}


def test_a_difference_beyond_the_spread_is_a_change() -> None:
    assert directions(result([1.4e-4, 1.5e-4, 1.6e-4]))["cycle"] == "worse"
    assert directions(result([0.7e-4, 0.8e-4, 0.9e-4]))["cycle"] == "better"
    assert directions(result([1.1e-4] * 3, trips=3.0))["round_trips"] == "worse"


def test_a_comparison_lists_changes_and_other_differences() -> None:
    second = result([1.4e-4, 1.5e-4, 1.6e-4], started="2026-01-02T00:00:00Z")
    second.environment["packages"] = {"redis": "8.2.0"}
    second.rows["new"] = RowResult("new", "New", ())
    said = compare.render(FIRST, second)
    assert "cycle.idle.same, django-dlock: cycle is worse, 1.10 × → 1.50 ×" in said
    assert "They differ in redis: 8.1.0 → 8.2.0" in said
    assert "Only in B: new" in said
    assert "Nothing moved" in compare.render(FIRST, FIRST)


# -- showing --------------------------------------------------------------------------------


def test_the_report_shows_numbers_reasons_and_verdicts() -> None:
    budgets = [
        Budget("cycle.idle.same", "cycle", "most", 1.05, aim=0.85),
        Budget("cycle.idle.same", "round_trips", "most", 2),
        Budget("cycle.idle.same", "commands", "most", 2),
    ]
    said = render(FIRST, judge(FIRST.rows.values(), budgets))
    assert "110 µs" in said
    assert "gone cannot: is not installed" in said
    assert "BEHIND by 5%" in said
    assert "NOT MEASURED" in said
    assert "django-dlock: defaults (cycle)" in said
    assert "No peer is ahead" in said


def test_the_report_shows_the_processor_time_stolen_by_the_host() -> None:
    second = result([1.0e-4, 1.1e-4, 1.2e-4])
    for share, told in ((None, False), (0.004, False), (0.123, True)):
        second.environment["stolen"] = share
        assert ("kept 12% of" in render(second, [])) is told
        assert ("host kept for others: 0% → 12%" in compare.render(FIRST, second)) is told


def test_stolen_time_is_a_share_of_the_requested_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 9000 10 5 5 40 7 0\ncpu0 0\n")
    stolen = Stolen(stat)
    assert stolen.share() == 0
    stat.write_text("cpu  130 10 60 9900 99 6 9 55 8 0\ncpu0 0\n")
    assert stolen.share() == pytest.approx(15 / 70)
    stat.write_text("cpu  nothing\n")
    assert stolen.share() is None
    assert Stolen(tmp_path / "missing").share() is None


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (61.34e-6, "s", "61.3 µs"),
        (0.25, "s", "250 ms"),
        (3.1e-9, "s", "3.10 ns"),
        (0.0, "s", "0 ns"),
        (1240.4, "/s", "1 240 /s"),
        (2.0, "", "2"),
        (12.34, "MiB", "12.3 MiB"),
    ],
)
def test_amounts_have_three_digits_and_a_suitable_unit(value: float, unit: str, said: str) -> None:
    assert amount(value, unit) == said
