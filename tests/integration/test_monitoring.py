"""The dashboard, the alert rules, and a real Prometheus that reads real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import django_dlock
from django_dlock.metrics.instruments import EVENTS, STORES, Instrument, prometheus_name
from testproject.processes import HOST, free_port
from testproject.servers import RedisServer
from tests.conftest import missing, started
from tests.support.databases import until
from tests.support.prometheus import PrometheusServer, ServerNotFound, promtool
from tests.support.workers import ROOT, Site, result

pytestmark = pytest.mark.extended

FILES = Path(django_dlock.__file__).parent / "metrics" / "monitoring"
ALERTS, DASHBOARD = FILES / "alerts.yml", FILES / "grafana.json"


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
        wrong |= {f"{name}.{label}" for label in labels - set(known[name].labels)}
    allowed = {"le", "instance"}.union(*(set(each.labels) for each in known.values()))
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        wrong |= {label.strip() for label in labels.split(",")} - allowed
    return wrong


def test_the_dashboard_shows_every_metric_and_nothing_else():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
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
    text = ALERTS.read_text()
    expressions = re.findall(r"expr: (?:>-\n)?((?:.+\n(?: {10}>.*\n)?))", text)
    assert len(expressions) == text.count("- alert:")
    assert {one: wrong for one in expressions if (wrong := unknown_in(one))} == {}


@pytest.fixture
def tool() -> str:
    try:
        return promtool()
    except ServerNotFound as error:
        missing(str(error))


def test_promtool_accepts_the_rules(tool):
    done = subprocess.run(
        [tool, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 rules found" in done.stdout


ATTEMPTS = "django_dlock_acquire_attempts_total"
CASES: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    # Alert → series with their values each minute, when it is looked at, and its labels.
    "DlockStoreDown": (
        {'django_dlock_store_up{alias="a"}': "1 0x20"},
        "5m",
        {"alias": "a", "severity": "critical"},
    ),
    "DlockUnavailable": (
        {'django_dlock_acquire_attempts_total{alias="a",outcome="unavailable"}': "0+1x20"},
        "12m",
        {"alias": "a", "severity": "critical"},
    ),
    "DlockLost": (
        {'django_dlock_losses_total{alias="a",group="g",reason="refused"}': "0 0 0 1 1 1 1 1"},
        "6m",
        {"alias": "a", "group": "g", "reason": "refused", "severity": "warning"},
    ),
    "DlockHeldTooLong": (
        {'django_dlock_losses_total{alias="a",group="g",reason="max_hold"}': "0 0 0 1 1 1 1 1"},
        "6m",
        {"alias": "a", "group": "g", "severity": "warning"},
    ),
    "DlockRenewalLate": (
        {'django_dlock_renewal_lateness_seconds{instance="i"}': "3x20"},
        "5m",
        {"instance": "i", "severity": "warning"},
    ),
    "DlockContended": (
        {
            f'{ATTEMPTS}{{alias="a",group="g",outcome="contended"}}': "0+3x60",
            f'{ATTEMPTS}{{alias="a",group="g",outcome="acquired"}}': "0+1x60",
        },
        "45m",
        {"alias": "a", "group": "g", "severity": "info"},
    ),
    "DlockDeadHolders": (
        {'django_dlock_store_holders{alias="a",state="dead"}': "1x20"},
        "10m",
        {"alias": "a", "severity": "warning"},
    ),
}


@pytest.mark.parametrize("fires", [True, False])
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should(tool, tmp_path, alert, fires):
    values, at, labels = CASES[alert]
    if not fires:
        calm = {"DlockStoreDown": "1x60"}.get(alert, "0x60")
        values = dict.fromkeys(values, calm)
    case: dict[str, Any] = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": numbers} for series, numbers in values.items()
                ],
                "alert_rule_test": [
                    {
                        "alertname": alert,
                        "eval_time": at,
                        "exp_alerts": [{"exp_labels": labels}] if fires else [],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "case.yml"
    # The texts are not repeated here: only whether it fires, and for what.
    rules = re.sub(r"\n {8}annotations:\n(?: {10}.*\n)+", "\n", ALERTS.read_text())
    (tmp_path / "rules.yml").write_text(rules)
    case["rule_files"] = [str(tmp_path / "rules.yml")]
    file.write_text(json.dumps(case))
    done = subprocess.run(
        [tool, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


WEB = """
import sys
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF="__main__",
    DLOCKS={"default": {
        "BACKEND": "django_dlock.backends.redis.RedisBackend", "LOCATION": sys.argv[2],
        "KEY_PREFIX": sys.argv[3], "OPTIONS": {"command_timeout": 2.0},
    }},
    DLOCK_METRICS={"EXPORTERS": ["prometheus"], "RECORDS": False, "GROUPS": ["order"]},
)
import django
django.setup()
from wsgiref.simple_server import make_server
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path
from django_dlock import Lock, locked_view
from django_dlock.metrics.prometheus import metrics_view

@locked_view("page:{number}")
def page(request, number):
    return HttpResponse("done")

urlpatterns = [path("metrics", metrics_view), path("page/<int:number>/", page)]
held = Lock("order:held", bound=False)
assert held.acquire()
make_server("127.0.0.1", int(sys.argv[1]), get_wsgi_application()).serve_forever()
"""


@contextlib.contextmanager
def web(redis_url: str, prefix: str, directory: Path) -> Iterator[int]:
    port, script = free_port(), directory / "web.py"
    script.write_text(WEB)
    root = str(Path(django_dlock.__file__).parent.parent)
    with (directory / "web.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(port), redis_url, prefix],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": root},
        )
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def post(port: int, number: int) -> int:
    import urllib.request

    request = urllib.request.Request(f"http://{HOST}:{port}/page/{number}/", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)


def test_a_prometheus_reads_a_site_and_sees_its_store_go_away(own_redis_of_metrics, tmp_path):
    redis = own_redis_of_metrics
    with web(redis.url, "metrics", tmp_path) as port:
        targets = {"site": f"{HOST}:{port}"}
        try:
            server = PrometheusServer(targets, ALERTS)
            server.start()
        except ServerNotFound as error:
            missing(str(error))
        try:
            until(lambda: server.values("django_dlock_store_up") == [1.0], 30)
            for number in range(5):
                assert post(port, number) == 200
            acquired = 'django_dlock_acquire_attempts_total{group="page",outcome="acquired"}'
            until(lambda: server.values(acquired) == [5.0], 30)
            # Releases are counted after acquires, perhaps not before the same scrape.
            held = 'django_dlock_hold_duration_seconds_count{group="page"}'
            until(lambda: server.values(held) == [5.0], 30)
            until(lambda: server.values('django_dlock_held{group="order"}') == [1.0], 30)
            until(lambda: server.values("django_dlock_store_leases") == [1.0], 30)
            rules = server.ask("rules")["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} == {"ok"}
            redis.kill()
            until(lambda: server.values("django_dlock_store_up") == [0.0], 30)
            until(lambda: server.values('django_dlock_losses_total{group="order"}') == [1.0], 60)
        finally:
            server.kill()
            server.stop()


@pytest.fixture
def own_redis_of_metrics():
    yield from started(RedisServer())


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
