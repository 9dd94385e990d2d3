"""What the benchmark computes from its readings: spreads, ratios, verdicts."""

from __future__ import annotations

import pytest

from benchmarks.budgets import Budget, judge
from benchmarks.model import OURS, Gathering, Metric, RowResult, Series, SubjectResult
from benchmarks.statistics import Spread, median, percentile


def row(*metrics: Metric, **subjects: SubjectResult) -> RowResult:
    named = {{"ours": OURS}.get(name, name): subject for name, subject in subjects.items()}
    return RowResult("row", "A row", metrics, subjects=named)


def subject(role: str = "peer", cannot: str | None = None, **series: list[float]) -> SubjectResult:
    read = {name: Series(rounds) for name, rounds in series.items()}
    return SubjectResult(role, "as it comes", read, cannot)  # type: ignore[arg-type]


TIME = Metric("time", "s", floor="floor", percentiles=(90,))


# -- statistics -----------------------------------------------------------------------------


def test_a_percentile_is_interpolated() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, rank) for rank in (0, 25, 50, 90, 100)] == [
        1.0,
        1.75,
        2.5,
        pytest.approx(3.7),
        4.0,
    ]
    assert values == [4.0, 1.0, 3.0, 2.0]


@pytest.mark.parametrize(("values", "rank"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_a_percentile_of_nothing_is_an_error(values: list[float], rank: float) -> None:
    with pytest.raises(ValueError, match=r"no values|rank"):
        percentile(values, rank)


def test_the_spread_consists_of_quartiles_and_extremes() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 1.0, 5.0)
    assert median([7.0]) == 7.0


# -- series ---------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine became three times slower after the first round; the ratios stay the same.
    slowed = row(TIME, floor=subject("floor", time=[1.0, 3.0]), ours=subject(time=[2.0, 6.0]))
    compared = slowed.compared(OURS, "time")
    assert compared is not None
    assert compared.rounds == [2.0, 2.0]


def test_a_round_without_a_reading_of_the_floor_has_no_ratio() -> None:
    assert Series([4.0, 6.0]).over(Series([0.0, 3.0])).rounds == [2.0]
    nothing = row(
        Metric("time", "/s", better="higher", floor="floor"),
        floor=subject("floor", time=[0.0]),
        ours=subject("ours", time=[1.0]),
    )
    assert nothing.compared(OURS, "time") is None
    (verdict,) = judge([nothing], [Budget("row", "time", "least", 0.8)])
    assert (verdict.value, verdict.holds) == (None, False)


def test_percentiles_are_of_the_raw_samples_of_all_rounds() -> None:
    gathering = Gathering([TIME])
    gathering.add({"time": [1.0] * 9})
    gathering.add({"time": [1.0, 1.0, 101.0]})
    series = gathering.series()["time"]
    assert series.rounds == [1.0, 1.0]
    assert series.percentiles == {"90": 1.0}
    gathering.add({"time": [101.0] * 8})
    assert gathering.series()["time"].percentiles == {"90": 101.0}


def test_the_passes_of_a_round_are_combined() -> None:
    gathering = Gathering([TIME])
    gathering.add({"time": [1.0, 1.0]}, {"time": [5.0]})
    assert gathering.series()["time"].rounds == [1.0]
    with pytest.raises(TypeError, match="must be samples"):
        gathering.add({"time": 1.0}, {"time": 2.0})


def test_a_reading_that_the_row_does_not_define_is_an_error() -> None:
    with pytest.raises(KeyError):
        Gathering([TIME]).add({"tmie": 1.0})


def test_rounds_are_never_compared_with_other_rounds() -> None:
    with pytest.raises(ValueError, match="zip"):
        Series([1.0, 2.0]).over(Series([1.0]))


# -- verdicts -------------------------------------------------------------------------------


def test_a_budget_holds_up_to_its_limit_and_shows_the_margin() -> None:
    measured = row(TIME, floor=subject("floor", time=[1.0]), ours=subject("ours", time=[0.9]))
    (verdict,) = judge([measured], [Budget("row", "time", "most", 1.2, aim=0.9)])
    assert verdict.holds
    assert verdict.ahead == pytest.approx(0.25)
    assert verdict.reached_aim is True
    (verdict,) = judge([measured], [Budget("row", "time", "most", 0.9, aim=0.8)])
    assert (verdict.holds, verdict.ahead, verdict.reached_aim) == (True, 0.0, False)
    (verdict,) = judge([measured], [Budget("row", "time", "most", 0.6)])
    assert (verdict.holds, verdict.ahead) == (False, pytest.approx(-0.5))


def test_a_minimum_budget_is_judged_the_other_way_round() -> None:
    rate = Metric("rate", "/s", better="higher", floor="floor")
    measured = row(rate, floor=subject("floor", rate=[100.0]), ours=subject("ours", rate=[90.0]))
    (verdict,) = judge([measured], [Budget("row", "rate", "least", 0.8, aim=0.95)])
    assert (verdict.holds, verdict.reached_aim) == (True, False)
    assert verdict.ahead == pytest.approx(0.125)
    (verdict,) = judge([measured], [Budget("row", "rate", "least", 1.0)])
    assert not verdict.holds


def test_nothing_lost_means_nothing() -> None:
    lost = Metric("lost")
    for count, holds in ((0.0, True), (1.0, False)):
        measured = row(lost, ours=subject("ours", lost=[0.0, count]))
        (verdict,) = judge([measured], [Budget("row", "lost", "most", 0, statistic="max")])
        assert verdict.holds is holds


def test_peers_that_are_ahead_are_listed_best_first() -> None:
    measured = row(
        TIME,
        floor=subject("floor", time=[1.0]),
        ours=subject("ours", time=[2.0]),
        slow=subject(time=[3.0]),
        fast=subject(time=[1.5]),
        faster=subject(time=[1.2]),
        absent=subject(cannot="not installed"),
    )
    (verdict,) = judge([measured], [Budget("row", "time", "most", 2.5)])
    assert verdict.holds
    assert verdict.peers_ahead == (("faster", 1.2), ("fast", 1.5))


def test_a_budget_without_a_measurement_does_not_hold() -> None:
    gone = row(TIME, floor=subject("floor", time=[1.0]), ours=subject("ours", cannot="broken"))
    no_floor = row(TIME, ours=subject("ours", time=[1.0]))
    no_percentile = row(TIME, floor=subject("floor", time=[1.0]), ours=subject(time=[1.0]))
    for measured, budget in (
        (gone, Budget("row", "time", "most", 9.0)),
        (no_floor, Budget("row", "time", "most", 9.0)),
        (no_floor, Budget("row", "other", "most", 9.0)),
        (no_percentile, Budget("row", "time", "most", 9.0, statistic="p90")),
    ):
        (verdict,) = judge([measured], [budget])
        assert (verdict.value, verdict.holds) == (None, False)


def test_rows_that_were_not_chosen_are_not_judged() -> None:
    assert judge([], [Budget("row", "time", "most", 1.0)]) == ()
