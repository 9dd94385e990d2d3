"""Which series there are, and how they are called, in Prometheus and in OpenTelemetry."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from django.test import override_settings
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry

from django_dlock import locked, locks
from django_dlock.core import dispatch
from django_dlock.metrics import instruments
from django_dlock.metrics.groups import Groups
from django_dlock.metrics.instruments import EVENTS, STORES, prometheus_name
from django_dlock.metrics.opentelemetry import OpenTelemetryExporter
from django_dlock.metrics.prometheus import PrometheusExporter, StoreCollector
from django_dlock.metrics.recorder import Recorder
from django_dlock.metrics.stores import StoreFacts
from tests.support.prometheus import collector_name
from tests.support.workers import ROOT

LOCAL = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend", "TTL": 3.0}}
COUNTERS = [each for each in EVENTS if each.kind == "counter" and "task" not in each.labels]


def of_prometheus(registry: CollectorRegistry) -> PrometheusExporter:
    return PrometheusExporter(registry, StoreCollector(StoreFacts(records=False)))


def of_opentelemetry(registry: CollectorRegistry) -> OpenTelemetryExporter:
    provider = MeterProvider([PrometheusMetricReader(registry=registry)])
    return OpenTelemetryExporter(provider.get_meter("test"), StoreFacts(records=False))


@pytest.fixture(params=[of_prometheus, of_opentelemetry])
def registry(request: pytest.FixtureRequest):
    """What the exporter shows in Prometheus, after one lock that was acquired and released."""
    with override_settings(DLOCKS=LOCAL):
        locks.reset()
        shown = CollectorRegistry()
        connected = Recorder([request.param(shown)], Groups(listed=["order"]))
        connected.connect()
        locked("order:{number}")(lambda number: None)(1)
        dispatch.flush()
        yield shown
        connected.disconnect()
    locks.reset()


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda each: each.name)
def test_a_counter_of_a_group_begins_with_zero(registry, counter):
    """Prometheus would not notice the first event of a series that begins with 1."""
    group = {"alias": "default", "group": "order"}
    expected = [
        {**{label: group[label] for label in counter.labels if label in group}, **last}
        for last in [{counter.labels[-1]: value} for value in counter.values] or [{}]
    ]
    name = prometheus_name(counter)
    found = [
        {label: sample.labels[label] for label in counter.labels}
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    ]
    key = lambda labels: sorted(labels.items())  # noqa: E731
    assert sorted(found, key=key) == sorted(expected, key=key)


def test_every_reason_of_a_loss_begins_with_zero():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    table = page.partition("### Reasons of a loss")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(instruments.LOSSES.values)


def test_every_reason_of_a_break_begins_with_zero():
    page = (ROOT / "docs" / "reference" / "signals.md").read_text()
    told = re.search(r"^`broken`\n: (.*)$", page, re.MULTILINE)[1].partition("`reason` is")[2]
    reasons = re.findall(r"`(\w+)` \(", told)
    assert set(reasons) == set(instruments.BREAKS.values)


CHILD = """
import os
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    ALLOWED_HOSTS=["*"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    DLOCK_METRICS={
        "EXPORTERS": ["prometheus", "opentelemetry"], "RECORDS": False, "GROUPS": ["order"],
    },
)
import django
django.setup()
from django_dlock import locked
from django_dlock.core import dispatch
@locked("order:{number}")
def run(number):
    pass
run(1)
dispatch.flush()
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
    from django.test import RequestFactory
    from django_dlock.metrics.prometheus import metrics_view
    print(metrics_view(RequestFactory().get("/")).content.decode())
else:
    from opentelemetry import metrics
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import CollectorRegistry, generate_latest
    registry = CollectorRegistry()
    # As the guide says: in each child.
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader(registry=registry)]))
    run(2)
    dispatch.flush()
    print("child:", generate_latest(registry).decode().replace("django_", "child_"), flush=True)
    os._exit(0)
"""


def test_the_counters_of_forked_children_begin_with_zero(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )
    losses = r'_dlock_losses_total\{alias="default",group="order",.*reason="refused"\} 0\.0'
    assert re.search(f"django{losses}", done.stdout), done.stderr
    assert re.search(f"child{losses}", done.stdout), done.stderr
    acquired = 'attempts_total{alias="default",group="order",outcome="acquired"} 2.0'
    assert acquired in done.stdout


@pytest.mark.parametrize("instrument", [*EVENTS, *STORES], ids=lambda each: each.name)
def test_a_metric_has_the_same_name_behind_a_collector(instrument):
    assert collector_name(instrument) == prometheus_name(instrument)


def test_a_metric_has_the_same_name_in_the_exporter_of_opentelemetry(registry):
    """Those that a lock on the local store has."""
    names = {metric.name for metric in registry.collect()}
    expected = {
        prometheus_name(each).removesuffix("_total")
        for each in (*COUNTERS, *STORES, instruments.HELD, instruments.WAITS, instruments.HOLDS)
        if each not in (instruments.STORE_EPOCH, instruments.RECORDS)
    }
    assert expected <= names
