"""What is counted, in prometheus-client and in OpenTelemetry."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import subprocess
import sys
import threading
from typing import Any
from unittest import mock

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.utils import ConnectionHandler
from django.test import RequestFactory, override_settings
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from django_dlock import Lock, clock, locks
from django_dlock.checks import check_metrics
from django_dlock.core import dispatch
from django_dlock.exceptions import BackendUnavailable, LeaseLost, LockNotAcquired
from django_dlock.lease import RenewalResult
from django_dlock.metrics import config, instruments, recorder
from django_dlock.metrics.config import LONGEST_GROUP, MOST_GROUPS
from django_dlock.metrics.groups import OTHER, Groups
from django_dlock.metrics.opentelemetry import OpenTelemetryExporter
from django_dlock.metrics.prometheus import PrometheusExporter, StoreCollector, metrics_view
from django_dlock.metrics.recorder import Recorder
from django_dlock.metrics.stores import StoreFacts
from django_dlock.operators import audit
from django_dlock.operators.inspection import break_lease
from django_dlock.testing import local_locks
from tests.support.databases import until

LOCAL = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend", "TTL": 3.0}}


class Prometheus:
    """Reads values of prometheus-client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.exporter = PrometheusExporter(self.registry, None)

    def value(self, name: str, **labels: str) -> float:
        name = f"django_dlock_{name}".replace(".", "_")
        return self.registry.get_sample_value(name, labels) or 0.0

    def counter(self, name: str, **labels: str) -> float:
        return self.value(f"{name}_total", **labels)

    def count(self, name: str, **labels: str) -> float:
        return self.value(f"{name}_seconds_count", **labels)

    def gauge(self, name: str, **labels: str) -> float:
        return self.value(name, **labels)


class OpenTelemetry:
    """Reads values of OpenTelemetry's SDK."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        facts = StoreFacts(records=False)
        self.exporter = OpenTelemetryExporter(self.provider.get_meter("test"), facts)

    def point(self, name: str, labels: dict[str, str]) -> Any:
        data: Any = self.reader.get_metrics_data()
        for metric in data.resource_metrics[0].scope_metrics[0].metrics if data else ():
            if metric.name == f"django_dlock.{name}":
                for point in metric.data.data_points:
                    if dict(point.attributes) == labels:
                        return point
        return None

    def counter(self, name: str, **labels: str) -> float:
        point = self.point(name, labels)
        return 0.0 if point is None else point.value

    gauge = counter

    def count(self, name: str, **labels: str) -> float:
        point = self.point(name, labels)
        return 0.0 if point is None else point.count


@pytest.fixture(params=[Prometheus, OpenTelemetry])
def seen(request: pytest.FixtureRequest):
    with override_settings(DLOCKS=LOCAL):
        locks.reset()
        made = request.param()
        connected = Recorder([made.exporter], Groups(listed=["order"]))
        connected.connect()
        yield made
        connected.disconnect()
        if isinstance(made, OpenTelemetry):
            made.provider.shutdown()
        locks.reset()


ORDER = {"alias": "default", "group": "order"}


def test_a_lock_is_counted_from_its_acquire_to_its_release(seen):
    with Lock("order:1"):
        dispatch.flush()
        assert seen.gauge("held", **ORDER) == 1
    dispatch.flush()
    assert seen.counter("acquire.attempts", **ORDER, outcome="acquired") == 1
    assert seen.count("wait.duration", **ORDER) == 1
    assert seen.count("hold.duration", **ORDER, end="released") == 1
    assert seen.gauge("held", **ORDER) == 0


def test_a_lock_that_is_held_by_another_is_counted(seen):
    with Lock("order:1"):
        assert not Lock("order:1", bound=False).acquire(blocking=False)
        # The holder itself does not wait for itself.
        assert not Lock("order:1").acquire(blocking=False)
        dispatch.flush()
        assert seen.gauge("waiting", **ORDER) == 0
    assert seen.counter("acquire.attempts", **ORDER, outcome="contended") == 2
    assert seen.counter("acquire.contentions", **ORDER) == 1


@pytest.mark.parametrize("end", ["granted", "gave up", "interrupted"])
def test_a_waiter_is_counted_until_its_wait_ends(seen, monkeypatch, end):
    held, ended, errors = Lock("order:1", bound=False), threading.Event(), []
    assert held.acquire()
    if end == "interrupted":

        def interrupted(*args, **kwargs):
            assert ended.wait(20)
            raise KeyboardInterrupt

        monkeypatch.setattr(locks["default"], "wait", interrupted)

    def acquire():
        try:
            with Lock("order:1", wait=0.5 if end == "gave up" else 20):
                pass
        except (LockNotAcquired, KeyboardInterrupt) as error:
            errors.append(error)

    waiter = threading.Thread(target=acquire)
    waiter.start()
    until(lambda: seen.gauge("waiting", **ORDER) == 1)
    if end == "granted":
        held.release()
    ended.set()
    waiter.join(30)
    until(lambda: seen.gauge("waiting", **ORDER) == 0)
    assert len(errors) == (end != "granted")
    if end != "granted":
        held.release()


def test_threads_that_share_a_handle_are_counted_each(seen, monkeypatch):
    """What one of them has met says nothing about the others."""
    held, shared = Lock("order:1", bound=False), Lock("order:1", wait=20)
    assert held.acquire()
    wait = locks["default"].wait

    def other_thread():
        assert shared.acquire(blocking=False)
        shared.release()

    def overtaken(*args, **kwargs):
        held.release()
        other = threading.Thread(target=other_thread)
        other.start()
        other.join(20)
        return wait(*args, **kwargs)

    monkeypatch.setattr(locks["default"], "wait", overtaken)
    with shared:
        dispatch.flush()
    assert seen.counter("acquire.contentions", **ORDER) == 1
    assert seen.gauge("waiting", **ORDER) == 0


def test_a_backend_that_does_not_answer_is_counted(seen, monkeypatch):
    def acquire(request, *, deadline):
        raise BackendUnavailable("gone", request.name, "default")

    monkeypatch.setattr(locks["default"], "acquire", acquire)
    with pytest.raises(BackendUnavailable):
        Lock("order:1", wait=0).acquire()
    dispatch.flush()
    assert seen.counter("acquire.attempts", **ORDER, outcome="unavailable") == 1


@pytest.mark.parametrize("outcome", ["unanswered", "unknown"])
def test_a_lock_is_held_no_longer_after_a_release_of_unknown_outcome(seen, monkeypatch, outcome):
    def release(*args, **kwargs):
        if outcome == "unanswered":
            raise BackendUnavailable("No answer", "order:7", "default")
        return outcome

    lock = Lock("order:7")
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(locks["default"], "release", release)
        with contextlib.suppress(BackendUnavailable):
            lock.release()
    dispatch.flush()
    end = {"unanswered": "unanswered", "unknown": "released"}[outcome]
    assert seen.gauge("held", **ORDER) == 0
    assert seen.count("hold.duration", **ORDER, end=end) == 1


def test_a_lost_lock_is_counted_with_its_reason(seen):
    lock = Lock("order:1")
    assert lock.acquire()
    info = locks["default"].get("order:1")
    assert break_lease(info, reason="command")
    until(lambda: lock.lost)
    dispatch.flush()
    assert seen.counter("losses", **ORDER, reason="broken") == 1
    assert seen.counter("breaks", **ORDER, reason="command") == 1
    assert seen.count("hold.duration", **ORDER, end="lost") == 1
    assert seen.gauge("held", **ORDER) == 0


def test_renewals_and_doubts_are_counted(seen, monkeypatch):
    # On a stalled machine, the lease may be lost in the end.
    with contextlib.suppress(LeaseLost), Lock("order:1"):
        until(lambda: seen.counter("renewals", alias="default") >= 1)
        backend = locks["default"]
        unanswered = lambda renewals, **_: [RenewalResult("unanswered")] * len(renewals)  # noqa: E731
        monkeypatch.setattr(backend, "renew", unanswered)
        until(lambda: seen.counter("doubts", **ORDER) == 1)
        monkeypatch.undo()


@pytest.mark.parametrize("options", [{}, {"renew": False}, {"reentrant": True}], ids=str)
def test_renewals_by_the_holder_are_counted_as_the_store_counts_them(seen, options):
    # So long that the watchdog renews nothing meanwhile.
    with contextlib.ExitStack() as held:
        for _ in range(2 if options.get("reentrant") else 1):
            lock = held.enter_context(Lock("order:1", ttl=600, **options))
        for _ in range(3):
            lock.renew()
        asyncio.run(lock.arenew())
        lock.renew(300)
        assert locks["default"].get("order:1").renewals == 5
    dispatch.flush()
    assert seen.counter("renewals", alias="default") == 5


def test_a_refused_renewal_by_the_holder_is_a_loss_and_no_renewal(seen):
    lock = Lock("order:1", ttl=600)
    assert lock.acquire()
    assert locks["default"].break_silently("order:1", owner=lock.owner)
    with pytest.raises(LeaseLost):
        lock.renew()
    dispatch.flush()
    assert seen.counter("renewals", alias="default") == 0
    assert seen.counter("losses", **ORDER, reason="broken") == 1


@pytest.mark.parametrize("ways", ["a thread", "a coroutine"])
def test_a_break_by_the_projects_code_is_counted_once(seen, ways):
    with contextlib.suppress(LeaseLost), Lock("order:1", ttl=600) as lock:
        break_ = functools.partial(locks["default"].break_, "order:1")
        if ways == "a coroutine":
            assert asyncio.run(asyncio.to_thread(break_, owner=lock.owner))
        else:
            assert break_(owner=lock.owner)
        assert not break_(owner=lock.owner)
    dispatch.flush()
    assert seen.counter("breaks", **ORDER, reason="code") == 1
    assert seen.counter("losses", **ORDER, reason="broken") == 1


def test_an_exporter_that_fails_harms_no_lock(caplog):
    class Broken:
        def add(self, instrument, value, labels):
            raise RuntimeError("no exporter")

        def close(self):
            pass

    connected = Recorder([Broken()], Groups())
    connected.connect()
    try:
        with override_settings(DLOCKS=LOCAL), caplog.at_level(logging.CRITICAL):
            locks.reset()
            with Lock("order:1") as lock:
                dispatch.flush()
                assert lock.held
    finally:
        connected.disconnect()
        locks.reset()


def test_only_listed_groups_are_made_from_names(caplog):
    with caplog.at_level(logging.INFO, "django_dlock"):
        groups = Groups(listed=["order"])
        found = {groups.of(f"kind-{number}:x") for number in range(1000)}
    assert found == {OTHER}
    assert groups.of("order:1") == "order"
    assert groups.of("0b6b0d9a-any-name") == OTHER
    # So that whoever misses a group learns where to list it.
    assert caplog.text.count("not in DLOCK_METRICS['GROUPS']") == 1


def test_the_locks_of_idempotent_views_are_a_group():
    assert Groups().of("idempotent:0b6b0d9a") == "idempotent"


def test_a_rule_of_the_project_makes_the_groups(caplog):
    def rule(name):
        return {"a": "first"}[name]

    groups = Groups(rule, ["first"])
    assert groups.of("a") == "first"
    assert groups.of("b") == groups.of("c") == OTHER
    assert caplog.text.count("DLOCK_METRICS['GROUP'] failed") == 1


# -- the stores ------------------------------------------------------------------------------


def test_the_stores_are_asked_when_metrics_are_read():
    with override_settings(DLOCKS=LOCAL):
        locks.reset()
        registry = CollectorRegistry()
        registry.register(StoreCollector(StoreFacts(records=False)))
        with Lock("order:1"):
            value = registry.get_sample_value
            assert value("django_dlock_store_leases", {"alias": "default"}) == 1
            assert value("django_dlock_store_up", {"alias": "default"}) == 1
            labels = {"alias": "default", "state": "alive"}
            assert value("django_dlock_store_holders", labels) == 1
    locks.reset()


def test_a_store_is_not_asked_for_each_reader(monkeypatch):
    asked = []
    with override_settings(DLOCKS=LOCAL):
        locks.reset()
        backend = locks["default"]
        monkeypatch.setattr(backend, "locked", lambda name, deadline: asked.append(name))
        facts = StoreFacts(records=False)
        for _ in range(5):
            facts.samples()
        assert len(asked) == 1
        now = clock.now()
        monkeypatch.setattr(clock, "now", lambda: now + 11)
        facts.samples()
        assert len(asked) == 2
    locks.reset()


def test_a_store_that_is_away_is_reported_and_hides_no_other(monkeypatch):
    two = {**LOCAL, "away": {**LOCAL["default"]}}
    with override_settings(DLOCKS=two):
        locks.reset()

        def locked(name, *, deadline):
            raise BackendUnavailable("gone", name, "away")

        monkeypatch.setattr(locks["away"], "locked", locked)
        samples = StoreFacts(records=False).samples()
        up = {
            sample.labels["alias"]: sample.value
            for sample in samples
            if sample.instrument is instruments.STORE_UP
        }
        assert up == {"default": 1, "away": 0}
    locks.reset()


def test_what_a_store_said_before_it_went_away_is_told_once(monkeypatch):
    with local_locks():

        def listed(*args, **kwargs):
            raise BackendUnavailable("gone", "", "default")

        monkeypatch.setattr(locks["default"], "list", listed)
        samples = StoreFacts(records=False).samples()
    of_it = [sample for sample in samples if sample.labels["alias"] == "default"]
    values = [(sample.instrument, sample.value) for sample in of_it]
    assert values.count((instruments.STORE_UP, 1)) == 1
    assert (instruments.STORE_UP, 0) not in values
    assert (instruments.STORE_LEASES, 0) in values
    assert (instruments.LEFT_OUT, 1) in values


def test_a_child_forked_while_the_stores_are_asked_can_ask_them(monkeypatch):
    """In the child, the thread that asks does not exist."""
    began, go = threading.Event(), threading.Event()
    with local_locks():
        facts = StoreFacts(records=False)

        def locked(name, *, deadline):
            began.set()
            assert go.wait(30)

        with monkeypatch.context() as patch:
            patch.setattr(locks["default"], "locked", locked)
            asking = threading.Thread(target=facts.samples)
            asking.start()
            assert began.wait(30)
            patch.undo()
            pid = os.fork()
            if not pid:
                os._exit(len(facts.samples()) == 0)
            go.set()
            asking.join(30)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_project_without_a_database_has_no_records_to_count():
    nowhere = ConnectionHandler({"default": {"ENGINE": "django.db.backends.dummy"}})
    with mock.patch.object(audit, "connections", nowhere), local_locks():
        samples = StoreFacts().samples()
    assert {sample.instrument for sample in samples} >= {instruments.STORE_UP}
    assert instruments.RECORDS not in {sample.instrument for sample in samples}


@pytest.mark.django_db
def test_records_are_counted_by_state():
    samples = StoreFacts().samples()
    counts = {
        sample.labels["state"]: sample.value
        for sample in samples
        if sample.instrument is instruments.RECORDS
    }
    assert counts == {"running": 0, "waiting": 0, "succeeded": 0, "failed": 0}


# -- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["prometheus"], "it takes a dict"),
        ({"EXPORTER": []}, r"has \['EXPORTER'\]"),
        ({"EXPORTER": [], 7: 1}, r"has \['EXPORTER', 7\]"),
        ({"EXPORTERS": [{}]}, "it takes a list of"),
        ({"EXPORTERS": "prometheus"}, "it takes a list of"),
        ({"EXPORTERS": ["statsd"]}, "it takes a list of"),
        ({"GROUP": "nowhere.at_all"}, r"DLOCK_METRICS\['GROUP'\]"),
        ({"GROUP": 7}, "it takes a function"),
        ({"GROUP": len}, "GROUP without GROUPS"),
        ({"GROUPS": "order"}, "it takes a list of at most 100 texts"),
        ({"GROUPS": [7]}, "it takes a list of at most 100 texts"),
        ({"GROUPS": ["x" * (LONGEST_GROUP + 1)]}, "of 1 to 64 characters"),
        ({"GROUPS": ["x"] * (MOST_GROUPS + 1)}, "it takes a list of at most 100 texts"),
        ({"RECORDS": 1}, "it takes True or False"),
    ],
)
def test_wrong_settings_are_reported(value, message):
    with override_settings():
        from django.conf import settings

        settings.DLOCK_METRICS = value
        with pytest.raises(ImproperlyConfigured, match=message):
            config.read()
        (error,) = check_metrics()
    assert error.id == "django_dlock.E014"
    assert re.search(message, error.msg)


def test_with_wrong_settings_a_process_starts_and_logs_them():
    script = """
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    DLOCK_METRICS={"EXPORTERS": ["statsd"]},
    DLOCK_TRACING="yes",
)
import django
django.setup()
from django_dlock import Lock
with Lock("order:1"):
    print("locked")
from django.core.management import call_command
call_command("check")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "locked\n"
    assert "Metrics are off: DLOCK_METRICS['EXPORTERS'] is ['statsd']" in done.stderr
    assert "Tracing is off: DLOCK_TRACING is 'yes'" in done.stderr
    assert "(django_dlock.E014)" in done.stderr
    assert "(django_dlock.E015)" in done.stderr


@pytest.mark.parametrize("name", [name for name, (_, extra) in config.EXPORTERS.items() if extra])
def test_a_missing_library_is_reported_with_the_extra_that_installs_it(name, monkeypatch):
    path, package = config.EXPORTERS[name]
    for module in [each for each in sys.modules if each == path or each.startswith(package)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    settings = config.MetricsSettings((name,), None, True)
    with pytest.raises(ImproperlyConfigured, match=rf"pip install \"django-dlock\[{name}\]\""):
        recorder.connect(settings)
    monkeypatch.setattr(config, "read", lambda: settings)
    (error,) = check_metrics()
    assert error.id == "django_dlock.E014"


def test_the_setting_switches_counting_on_and_off():
    with override_settings(DLOCKS=LOCAL):
        locks.reset()
        wanted = {"EXPORTERS": ["prometheus"], "RECORDS": False, "GROUPS": ["switched"]}
        with override_settings(DLOCK_METRICS=wanted):
            with Lock("switched:1"):
                pass
            dispatch.flush()
            shown = metrics_view(RequestFactory().get("/metrics")).content.decode()
            assert 'attempts_total{alias="default",group="switched",outcome="acquired"} 1' in shown
            assert 'django_dlock_store_up{alias="default"} 1' in shown
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            response = metrics_view(RequestFactory().get("/metrics", headers=accept))
            assert response.content.endswith(b"# EOF\n")
            assert "openmetrics" in response["Content-Type"]
        assert "django_dlock" not in generate_latest().decode()
    locks.reset()


def test_opentelemetry_uses_the_provider_of_the_project():
    script = """
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    DLOCK_METRICS={"EXPORTERS": ["opentelemetry"], "RECORDS": False},
)
import django
django.setup()
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
# Set after the app is ready, as projects do.
metrics.set_meter_provider(MeterProvider([reader]))
from django_dlock import Lock
from django_dlock.core import dispatch
with Lock("order:1"):
    pass
dispatch.flush()
found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
print(sorted(metric.name for metric in found))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "django_dlock.acquire.attempts" in done.stdout, done.stderr
    assert "django_dlock.store.up" in done.stdout


def test_several_processes_are_counted_together(tmp_path):
    script = """
import os
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    ALLOWED_HOSTS=["*"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    DLOCK_METRICS={"EXPORTERS": ["prometheus"], "RECORDS": False, "GROUPS": ["order"]},
)
import django
django.setup()
from django.test import RequestFactory
from django_dlock import Lock
from django_dlock.core import dispatch
from django_dlock.metrics.prometheus import metrics_view
with Lock("order:1"):
    pass
dispatch.flush()
pids = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        with Lock("order:1"):
            pass
        dispatch.flush()
        os._exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
print(metrics_view(RequestFactory().get("/")).content.decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )
    line = 'attempts_total{alias="default",group="order",outcome="acquired"} 3.0'
    assert line in done.stdout, done.stderr
    assert 'django_dlock_held{alias="default",group="order"} 0.0' in done.stdout


COMMAND = """
import sys
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    DLOCK_METRICS={"EXPORTERS": ["prometheus"], "RECORDS": False},
)
import django
django.setup()
from django.core.management import call_command
call_command("list_locks")
if sys.argv[1:] == ["lock"]:
    from django_dlock import Lock
    with Lock("order:1"):
        pass
"""


def run_command(directory: Any, *arguments: str) -> str:
    """Run a command of a project in a process of its own; returns what it logs."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_without_its_directory_a_process_starts_and_logs_that(tmp_path, what):
    directory = tmp_path / "counts"
    if what == "a file":
        directory.write_text("")
    logged = run_command(directory, "lock")
    assert f"Metrics are off: PROMETHEUS_MULTIPROC_DIR is '{directory}'" in logged
    assert "Traceback" not in logged


def test_a_command_leaves_no_file_behind_unless_it_locks(tmp_path):
    run_command(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run_command(tmp_path, "lock")
    # Totals count after the end of a process, but it holds nothing.
    kinds = {file.name.rpartition("_")[0] for file in tmp_path.iterdir()}
    assert kinds == {"counter", "histogram"}
