"""The alert rules, on series that are written down here; most begin with the first event."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from django_dlock.metrics import instruments
from django_dlock.metrics.instruments import Instrument, prometheus_name
from tests.conftest import missing
from tests.support.prometheus import ALERTS, ServerNotFound, collector_name, promtool

pytestmark = pytest.mark.extended

FORMS: dict[str, tuple[Callable[[Instrument], str], dict[str, str]]] = {
    # How a metric is called, and the labels that it has besides its own.
    "scraped": (prometheus_name, {"job": "site", "instance": "i"}),
    "collector": (
        collector_name,
        {"job": "site", "instance": "i", "otel_scope_name": "django_dlock"},
    ),
}


class Case(NamedTuple):
    """What happens, and whether an alert fires.

    Attributes:
        series: Instrument, its labels, and its values each minute, where ``_`` is no value.
        at: The minutes at which the alert is looked at.
        fires: The labels of each alert; none if it must not fire.
    """

    what: str
    series: list[tuple[Instrument, dict[str, str], str]]
    at: tuple[int, ...]
    fires: list[dict[str, str]]


A = {"alias": "a"}
ORDER = {**A, "group": "order"}
REFUSED = {**ORDER, "reason": "refused"}
MAX_HOLD = {**ORDER, "reason": "max_hold"}
ENDED = {**ORDER, "reason": "exit"}
ACQUIRED = {**ORDER, "outcome": "acquired"}
CONTENDED = {**ORDER, "outcome": "contended"}
UNAVAILABLE = {**ORDER, "outcome": "unavailable"}


def losses(labels: dict[str, str], fires: dict[str, str], other: dict[str, str]) -> list[Case]:
    """The cases of a rule about losses; ``other`` are those that it leaves out."""

    def case(what: str, values: str, *at: int, expected: bool = True) -> Case:
        return Case(what, [(instruments.LOSSES, labels, values)], at, [fires] * expected)

    return [
        case("the first one, counted from zero", "0 0 0 1x20", 3, 11),
        case("the first one, of a series that begins with it", "_ _ _ 1x20", 3, 11),
        case("the first one, of a process that has ended", "_ _ _ 1 stale", 3),
        case("a second one", "0 1x30 2x20", 33),
        case("the first one after a restart", "7x20 0x20 1x5", 43),
        case("the first one after a restart, of a new series", "7x9 stale _x20 1x5", 33),
        case("none", "0x60", 5, 30, expected=False),
        case("one that is long past", "0 1x60", 30, expected=False),
        case("a restart", "7x20 0x20", 23, expected=False),
        case("no scrapes for 4 minutes", "7x20 _x3 7x20", *range(21, 40), expected=False),
        case("no scrapes for 8 minutes", "7x20 _x7 7x20", 37),
        Case("of another kind", [(instruments.LOSSES, other, "0 0 0 1x20")], (5,), []),
        Case("of a process that ended", [(instruments.LOSSES, ENDED, "0 0 0 1x20")], (5,), []),
    ]


INFO = {"severity": "info"}
WARNING = {"severity": "warning"}
CRITICAL = {"severity": "critical"}
CASES: dict[str, list[Case]] = {
    "DlockStoreDown": [
        Case("it stops", [(instruments.STORE_UP, A, "1 1 0x9")], (4,), [{**A, **CRITICAL}]),
        Case("it was never up", [(instruments.STORE_UP, A, "0x9")], (2,), [{**A, **CRITICAL}]),
        Case("it is up", [(instruments.STORE_UP, A, "1x9")], (4,), []),
        Case(
            "it answers another process",
            [(instruments.STORE_UP, {**A, "pod": str(up)}, f"{up}x9") for up in (0, 1)],
            (4,),
            [],
        ),
    ],
    "DlockUnavailable": [
        Case(
            "from the first acquire on",
            [(instruments.ATTEMPTS, UNAVAILABLE, "0+1x20")],
            (12,),
            [{**A, **CRITICAL}],
        ),
        Case("none", [(instruments.ATTEMPTS, UNAVAILABLE, "0x20")], (12,), []),
        Case("a single acquire", [(instruments.ATTEMPTS, UNAVAILABLE, "0 0 1x20")], (9, 12), []),
    ],
    "DlockLost": losses(REFUSED, {**REFUSED, **WARNING}, MAX_HOLD),
    "DlockHeldTooLong": losses(MAX_HOLD, {**ORDER, **WARNING}, REFUSED),
    "DlockRenewalLate": [
        Case(
            "starved, survived or not",
            [
                (instruments.LATENESS, {}, "5 5 5 6x20"),
                (instruments.LATENESS, {"le": bound}, "5x23"),
            ],
            (4, 11),
            [{"instance": "i", **WARNING}],
        )
        for bound in ("2.0", "2")
    ]
    + [
        Case(
            "in time",
            [
                (instruments.LATENESS, {}, "5 5 5 6x20"),
                (instruments.LATENESS, {"le": "2.0"}, "5 5 5 6x20"),
            ],
            (4,),
            [],
        ),
    ],
    "DlockContended": [
        Case(
            "most",
            [
                (instruments.ATTEMPTS, CONTENDED, "0+3x60"),
                (instruments.ATTEMPTS, ACQUIRED, "0+1x60"),
            ],
            (45,),
            [{**ORDER, **INFO}],
        ),
        Case(
            "all",
            [(instruments.ATTEMPTS, CONTENDED, "0+3x60")],
            (45,),
            [{**ORDER, **INFO}],
        ),
        Case(
            "few",
            [
                (instruments.ATTEMPTS, CONTENDED, "0+1x60"),
                (instruments.ATTEMPTS, ACQUIRED, "0+3x60"),
            ],
            (45,),
            [],
        ),
    ],
    "DlockDeadHolders": [
        Case(
            "one",
            [(instruments.STORE_HOLDERS, {**A, "state": "dead"}, "0 1x20")],
            (7,),
            [{**A, **WARNING}],
        ),
        Case("alive", [(instruments.STORE_HOLDERS, {**A, "state": "alive"}, "0 1x20")], (7,), []),
    ],
    "DlockStoreSwitched": [
        Case(
            "it is told once, whatever the number of processes",
            [(instruments.STORE_EPOCH, {**A, "pod": pod}, "1 1 2x20") for pod in "xy"],
            (2, 11),
            [{**A, **WARNING}],
        ),
        Case(
            "all processes were started again",
            [
                (instruments.STORE_EPOCH, {**A, "pod": "old"}, "1 1 1 stale"),
                (instruments.STORE_EPOCH, {**A, "pod": "new"}, "_ _ _ _ 2x20"),
            ],
            (4, 11),
            [{**A, **WARNING}],
        ),
        Case("long ago", [(instruments.STORE_EPOCH, A, "1 2x20")], (14,), []),
        Case("never", [(instruments.STORE_EPOCH, A, "1x20")], (4,), []),
    ],
}


@pytest.fixture(scope="module")
def tool() -> str:
    try:
        return promtool()
    except ServerNotFound as error:
        missing(str(error))


def test_promtool_accepts_the_rules(tool: str) -> None:
    done = subprocess.run(
        [tool, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 rules found" in done.stdout


def in_yaml(case: Case, alert: str, form: str) -> dict[str, Any]:
    """The case as ``promtool`` reads it, with the names and labels of a form."""
    name, more = FORMS[form]
    return {
        "name": f"{form}: {case.what}",
        "interval": "1m",
        "input_series": [
            {
                "series": f"{name(of)}{part(of, labels)}{in_braces({**more, **labels})}",
                "values": values,
            }
            for of, labels, values in case.series
        ],
        "alert_rule_test": [
            {
                "alertname": alert,
                "eval_time": f"{at}m",
                "exp_alerts": [{"exp_labels": labels} for labels in case.fires],
            }
            for at in case.at
        ],
    }


def part(of: Instrument, labels: Mapping[str, str]) -> str:
    """The end of the name of a histogram's series."""
    if of.kind != "histogram":
        return ""
    return "_bucket" if "le" in labels else "_count"


def in_braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def test_each_alert_has_cases() -> None:
    assert sorted(CASES) == sorted(re.findall(r"- alert: (\w+)", ALERTS.read_text()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should(tool: str, tmp_path: Path, alert: str, form: str) -> None:
    rules, cases = tmp_path / "rules.yml", tmp_path / "cases.yml"
    # The texts are not repeated here: only whether it fires, and for what.
    rules.write_text(re.sub(r"\n {8}annotations:\n(?: {10}.*\n)+", "\n", ALERTS.read_text()))
    # JSON is YAML.
    cases.write_text(
        json.dumps(
            {
                "rule_files": [str(rules)],
                "evaluation_interval": "1m",
                "tests": [in_yaml(case, alert, form) for case in CASES[alert]],
            }
        )
    )
    done = subprocess.run(
        [tool, "test", "rules", str(cases)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
