"""The dashboard, the alert rules, and a real Prometheus that reads real processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_dlock.metrics.instruments import EVENTS, STORES, Instrument, prometheus_name
from testproject.processes import HOST, free_port
from testproject.servers import RedisServer
from tests.conftest import missing
from tests.support.databases import until
from tests.support.prometheus import ALERTS, DASHBOARD, PrometheusServer, ServerNotFound
from tests.support.workers import ROOT, Site, result

pytestmark = pytest.mark.extended


def series() -> dict[str, Instrument]:
    """The name of each series in Prometheus, and its instrument."""
    found: dict[str, Instrument] = {}
    for each in (*EVENTS, *STORES):
        name = prometheus_name(each)
        ends = ("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",)
        found |= {f"{name}{end}": each for end in ends}
    return found


def unknown_in(expression: str) -> set[str]:
    """What an expression names that does not exist."""
    known, wrong = series(), set()
    for name, selector in re.findall(r"(django_dlock_\w+)(\{[^}]*\})?", expression):
        if name not in known:
            wrong.add(name)
            continue
        labels = set(re.findall(r"(\w+)\s*(?:=|!)", selector))
        bound = {"le"} if name.endswith("_bucket") else set()
        wrong |= {f"{name}.{label}" for label in labels - bound - set(known[name].labels)}
    allowed = {"le", "instance"}.union(*(set(each.labels) for each in known.values()))
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        wrong |= {label.strip() for label in labels.split(",")} - allowed
    return wrong


def test_the_dashboard_shows_every_metric_and_nothing_else():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [
        each["query"]["query"]
        for each in dashboard["templating"]["list"]
        if "label" in each and each["name"] == "alias"
    ]
    assert {query: wrong for query in queries if (wrong := unknown_in(query))} == {}
    shown = {name for query in queries for name in re.findall(r"django_dlock_\w+", query)}
    instruments = series()
    assert {instruments[name] for name in shown} == {*EVENTS, *STORES}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_the_reference_lists_every_metric():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    told = re.findall(
        r"^\| `(django_dlock[^`]*)` \| (\w+) \| `([^`]*)` \| (.*) \| (.*) \|$", page, re.MULTILINE
    )
    kinds = {"up_down": "sum"}
    expected = [
        (
            each.name,
            kinds.get(each.kind, each.kind),
            each.unit,
            ", ".join(f"`{label}`" for label in each.labels) or "–",
            each.description,
        )
        for each in (*EVENTS, *STORES)
    ]
    assert told == expected


def test_the_guide_explains_every_alert():
    page = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    told = re.findall(r"^\| `(Dlock\w+)` \|", page, re.MULTILINE)
    assert told == re.findall(r"- alert: (\w+)", ALERTS.read_text())


def test_the_alerts_name_metrics_that_exist():
    assert unknown_in(ALERTS.read_text()) == set()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    settings = {"DLOCK_METRICS": {"EXPORTERS": ["prometheus"], "RECORDS": False}}
    try:
        with (
            RedisServer() as redis,
            Site(
                redis, tmp_path / "site", settings=settings, tasks="tests.support.tasks_metrics"
            ) as made,
        ):
            made.env |= {
                "PROMETHEUS_MULTIPROC_DIR": str(metrics),
                "METRICS_PORT": str(free_port()),
            }
            made.worker("prefork", 2)
            yield made
    except ServerNotFound as error:
        missing(str(error))


def test_a_worker_serves_the_metrics_of_its_children(site):
    """The parent of a prefork pool, as the guide shows; read by a real Prometheus."""
    place, port = site.place(), site.env["METRICS_PORT"]
    orders = [7_000_000 + number for number in range(6)]
    done = [site.send("locked", order, str(place)) for order in orders]
    held = site.send("locked", orders[0] + 100, str(place), "go")
    place.wait(f"began-{orders[0] + 100}")
    twin = site.send("locked", orders[0] + 100, str(place))
    for each in done:
        result(each)
    try:
        server = PrometheusServer({"worker": f"{HOST}:{port}"}, ALERTS)
        server.start()
    except ServerNotFound as error:
        missing(str(error))
    try:
        acquired = 'django_dlock_acquire_attempts_total{group="order",outcome="acquired"}'
        until(lambda: server.values(acquired) == [7.0], 30)
        requeued = 'sum(django_dlock_task_requeues_total{reason="contended"})'
        until(lambda: sum(server.values(requeued)) >= 1, 30)
        until(lambda: server.values('django_dlock_held{group="order"}') == [1.0], 30)
        place.open("go")
        result(held)
        result(twin)
        until(lambda: server.values(acquired) == [8.0], 30)
        until(lambda: server.values('django_dlock_held{group="order"}') == [0.0], 30)
    finally:
        place.open("go")
        server.kill()
        server.stop()
