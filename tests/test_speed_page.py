"""Pages about speed agree with the stored result: tables and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import pictures, publish, readme, tables
from benchmarks.beds import BEDS
from benchmarks.budgets import BUDGETS, Verdict, judge
from benchmarks.model import OURS, Metric, Result, RowResult, Series, SubjectResult
from benchmarks.reasons import WHY

PAGE = publish.DOCS / "explanation" / "speed.md"
COST_PAGE = publish.DOCS / "reference" / "cost.md"
GUIDE = publish.KEPT / "README.md"
RESULTS = publish.kept()
NEWEST = list(RESULTS)[-1]
TABLES = tables.all_tables(RESULTS)


@pytest.mark.parametrize("table", sorted(TABLES))
def test_a_table_matches_the_stored_result(table: str) -> None:
    assert (publish.KEPT / f"{table}.md").read_text() == f"{TABLES[table]}\n"
    assert f"({table}.md)" in GUIDE.read_text()
    if table not in tables.TITLES:
        page = COST_PAGE if table == "costs" else PAGE
        assert f"```{{include}} ../../benchmarks/results/{table}.md\n```" in page.read_text()


def test_every_stored_page_is_a_table() -> None:
    assert {path.stem for path in publish.KEPT.glob("*.md")} - {GUIDE.stem} == set(TABLES)


def test_the_links_of_the_guide_to_the_results_have_targets() -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", GUIDE.read_text())
    assert [link for link in links if not (GUIDE.parent / link).exists()] == []


FILES = [
    (picture, theme.name, pictures.file_name(picture, theme))
    for picture in pictures.PICTURES
    for theme in pictures.THEMES
]


@pytest.mark.parametrize(("picture", "theme", "file"), FILES)
def test_a_picture_matches_the_stored_result(picture: str, theme: str, file: str) -> None:
    assert f"{publish.source(NEWEST)}<" in (publish.IMAGES / file).read_text()
    if picture == "cycle":
        shown = f"```{{image}} ../images/{file}\n:class: only-{theme}\n:alt: "
        assert shown in PAGE.read_text()
    else:
        assert f'="../../docs/images/{file}"' in GUIDE.read_text()


def test_there_are_no_other_pictures() -> None:
    assert {path.name for path in publish.IMAGES.glob("speed-*")} == {file for *_, file in FILES}


def test_the_times_in_the_readme_match_the_stored_result() -> None:
    text = readme.README.read_text()
    assert re.search(r"\| django-dlock \(.*\) \|.*\sµs Redis, .* PostgreSQL, .* task \|", text)
    assert readme.with_times(text, RESULTS[NEWEST]) == text, "run: make bench-docs ARGS=--again"


def test_the_readme_compares_the_versions_that_were_measured() -> None:
    measured = RESULTS[NEWEST].environment["packages"]
    told = dict(re.findall(r"^\| ([a-z-]+) (\d[\d.]+)", readme.README.read_text(), re.MULTILINE))
    told["redis"] = told.pop("redis-py")
    assert len(told) == 6
    assert {name: measured[name] for name in told} == told


@pytest.mark.parametrize("told", readme.AHEAD)
def test_the_readme_says_where_others_are_better(told: str) -> None:
    assert told in readme.README.read_text()
    for row, metric, subject, times in readme.AHEAD[told]:
        measured = RESULTS[NEWEST].rows[row]
        ours, theirs = (measured.series(name, metric) for name in (OURS, subject))
        assert ours
        assert theirs
        ratio = ours.spread.median / theirs.spread.median
        lower = measured.metric(metric).better == "lower"
        assert (ratio if lower else 1 / ratio) >= times, (row, metric)


def test_no_measured_figure_is_written_by_hand() -> None:
    assert re.findall(r"\d[\d.]*\s?(?:×|%|ms|µs|times)", PAGE.read_text()) == []


def test_the_version_of_this_package_was_measured() -> None:
    from django_dlock import __version__

    assert __version__ == NEWEST


def test_a_row_with_a_budget_was_measured() -> None:
    assert {budget.row for budget in BUDGETS} <= set(RESULTS[NEWEST].rows)


def test_each_peer_that_may_be_ahead_has_a_reason() -> None:
    peers = {
        name
        for row in RESULTS[NEWEST].rows.values()
        for name, subject in row.subjects.items()
        if subject.role == "peer"
    }
    assert {name for name in peers if not WHY.get(name.partition(",")[0])} == set()


# -- functions for the tables --------------------------------------------------


def result(name: str = "cycle.idle.same", **rounds: float) -> Result:
    """A cycle for which the floor takes 1 µs."""
    subjects = {
        name: SubjectResult(role, "", {"latency": Series([1e-6 * rounds[name.replace("-", "_")]])})
        for name, role in (("bare", "floor"), ("django-dlock", "ours"), ("django-redis", "peer"))
    }
    metrics = tuple(Metric(metric, "s", floor="bare") for metric in ("latency", "cpu"))
    row = RowResult(name, "t", metrics, subjects=subjects)
    return Result("2026-01-01T00:00:00Z", False, {}, {name: row})


def first(found: Result) -> Verdict:
    return judge(found.rows.values())[0]


def test_a_budget_that_does_not_hold_is_bold() -> None:
    good = result(bare=1, django_dlock=0.81, django_redis=1.2)
    bad = result(bare=1, django_dlock=0.9, django_redis=1.2)
    assert (first(good).holds, first(bad).holds) == (True, False)
    assert "| 0.81\N{NO-BREAK SPACE}× | ≤\N{NO-BREAK SPACE}0.85" in tables.budgets(good)
    assert "| **0.90\N{NO-BREAK SPACE}×** | ≤\N{NO-BREAK SPACE}0.85" in tables.budgets(bad)


def test_a_peer_that_is_ahead_is_named_with_the_reason() -> None:
    behind = tables.ahead(result(bare=1, django_dlock=1.1, django_redis=1.05))
    assert re.search(r"\| django-redis \| .*1\.05.* against 1\.10.* \| redis-py's lock", behind)
    assert "django-redis" not in tables.ahead(result(bare=1, django_dlock=1.1, django_redis=1.2))


def test_a_bed_shows_both_kinds_of_names_and_slower_results_in_bold() -> None:
    found = result(bare=1, django_dlock=0.8, django_redis=1.3)
    assert tables.beds(found) == "Not measured."
    found.rows |= result("cycle.idle.fresh", bare=1, django_dlock=0.9, django_redis=1.4).rows
    space = "\N{NO-BREAK SPACE}"
    cells = ["", f"1{space}µs", "**0.80 / 0.90**", "1.30 / 1.40", "≤ 0.85"]
    shown = " | ".join(cell.replace(" ", space) for cell in cells)
    where = f"{BEDS['idle'].title}, without hiredis"
    assert f"| {where} | {shown} |" in tables.beds(found)


@pytest.mark.parametrize(
    ("costs", "label"),
    [
        ([10, 11, 9, 12, 14], "constant"),
        ([10, 30, 90, 20, 14], "bounded"),
        ([10, 20, 30, 40, 50], "logarithmic"),
        ([1, 10, 100, 1000, 10_000], "linear"),
        ([50, 51, 60, 150, 1_000], "linear"),
    ],
)
def test_a_growth_is_named(costs: list[float], label: str) -> None:
    assert tables.growth(costs, 10_000) == label


def test_versions_are_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = (publish.KEPT / f"{NEWEST}.json").read_text()
    monkeypatch.setattr(publish, "KEPT", tmp_path)
    for version in ("0.10.0", "0.2.0", "1.0.0"):
        (tmp_path / f"{version}.json").write_text(kept)
    results = publish.kept()
    assert list(results) == ["0.2.0", "0.10.0", "1.0.0"]
    assert tables.releases(results).startswith("|  | 0.2.0 | 0.10.0 | 1.0.0 |\n")


def test_rows_are_added_with_the_systems_they_were_measured_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(publish, "KEPT", tmp_path)
    about = {"packages": {"django-dlock": "1.0"}, "redis_server": "7", "load_at_start": 0.5}
    about["postgresql"] = "14"
    whole = result(bare=1, django_dlock=0.8, django_redis=1.3)
    whole.environment |= {**about, "stolen": 0.0}
    publish.keep(whole)
    part = result("db.cycle.same", bare=1, django_dlock=1.2, django_redis=1.3)
    part.started = "2026-02-03T00:00:00Z"
    part.environment |= {**about, "postgresql": "17", "stolen": 0.04}
    publish.keep(part, add=True)
    (found,) = publish.kept().values()
    assert list(found.rows) == ["cycle.idle.same", "db.cycle.same"]
    assert (found.started, found.environment["postgresql"]) == (whole.started, "14")
    told = tables.database(found)
    assert "Measured on 2026-02-03: Redis 7, PostgreSQL 17 with fsync off" in told
    assert "kept 4.0% of the" in told
    told = tables.rows(found)
    assert "db.cycle.same" not in told
    assert "PostgreSQL 14 with fsync off" in told
