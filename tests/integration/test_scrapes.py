"""What sites answer to Prometheus over HTTP, from processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from testproject.processes import HOST
from tests.support.databases import until
from tests.support.metrics_site import LOCAL, read, series, site
from tests.support.postgres import settings_for
from tests.support.proxy import Proxy


def test_a_site_has_the_same_series_however_many_processes_and_names(tmp_path):
    metrics = {"EXPORTERS": ["prometheus"], "RECORDS": False, "GROUPS": ["order"]}
    counts = tmp_path / "counts"
    counts.mkdir()
    env = {"PROMETHEUS_MULTIPROC_DIR": str(counts)}
    with site(tmp_path, {"DLOCKS": LOCAL, "DLOCK_METRICS": metrics}, env=env) as port:
        read(port, "recycle/1/1")
        few = series(read(port))
        read(port, "recycle/4/30")
        many = series(read(port))
    assert many.keys() == few.keys()
    granted = 'django_dlock_wait_duration_seconds_count{{alias="default",group="{}"}}'
    found = {group: many[granted.format(group)] for group in ("other", "{slug}", "order")}
    assert found == {"other": 121, "{slug}": 121, "order": 5}


@pytest.fixture
def silent():
    """A database that accepts connections and says nothing."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener


def connections(listener: socket.socket) -> int:
    """How many clients have connected and not been accepted yet."""
    listener.setblocking(False)
    found = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            found += 1
    return found


def postgres_at(port: int) -> dict[str, object]:
    engine = "django.db.backends.postgresql"
    return {"ENGINE": engine, "HOST": HOST, "PORT": port, "NAME": "x", "USER": "x", "PASSWORD": "x"}


def left_out(page: dict[str, float]) -> dict[str, float]:
    name = r'django_dlock_scrape_left_out\{alias="(.*)",part="(.*)"\}'
    found = ((re.fullmatch(name, key), value) for key, value in page.items())
    return {f"{match[2]} {match[1]}".strip(): value for match, value in found if match}


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_silent_database_holds_up_no_scrape(tmp_path, silent, several):
    settings = {
        "DATABASES": {"default": postgres_at(silent.getsockname()[1])},
        "DLOCKS": LOCAL,
        "DLOCK_METRICS": {"EXPORTERS": ["prometheus"]},
    }
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if several else {}
    with site(tmp_path, settings, env=env) as port, ThreadPoolExecutor(6) as clients:
        pages = [series(page) for page in clients.map(read, [port] * 6)]
        asked = connections(silent)
    for page in pages:
        assert page['django_dlock_store_up{alias="default"}'] == 1
        assert left_out(page) | {"processes": 0} == {
            "processes": 0,
            "records": 1,
            "store default": 0,
        }
        assert "django_dlock_records" not in "".join(page)
    # One question for all of them.
    assert asked == 1


def test_a_database_that_goes_silent_in_a_statement_holds_up_no_scrape(tmp_path, postgres_url):
    entry = settings_for(postgres_url)
    with Proxy(entry["HOST"], int(entry["PORT"]), speaks="postgres") as proxy:
        proxy.always("swallow", of="SELECT")
        settings = {
            "DATABASES": {"default": {**entry, "HOST": HOST, "PORT": proxy.port}},
            "DLOCKS": LOCAL,
            "DLOCK_METRICS": {"EXPORTERS": ["prometheus"]},
        }
        with site(tmp_path, settings) as port:
            for _ in range(2):
                page = series(read(port))
                assert left_out(page) == {"records": 1, "store default": 0}
        assert proxy.count("SELECT") == 1


def test_all_processes_of_a_site_share_what_was_asked(tmp_path):
    counts, statements = tmp_path / "counts", tmp_path / "statements"
    counts.mkdir()
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
    settings = {
        "DATABASES": {"default": database},
        "DLOCKS": LOCAL,
        "DLOCK_METRICS": {"EXPORTERS": ["prometheus"]},
    }
    env = {"PROMETHEUS_MULTIPROC_DIR": str(counts), "SITE_STATEMENTS": str(statements)}
    with (
        site(tmp_path, settings, env={**env, "SITE_MIGRATE": "1"}) as first,
        site(tmp_path, settings, env=env) as second,
        ThreadPoolExecutor(6) as clients,
    ):
        statements.write_text("")
        pages = [series(page) for page in clients.map(read, [first, second] * 3)]
    asked = [line for line in statements.read_text().splitlines() if "idempotencyrecord" in line]
    assert len(asked) == 1
    assert {page['django_dlock_records{state="running"}'] for page in pages} == {0}
    # Each question would take another time.
    assert len({page['django_dlock_store_latency_seconds{alias="default"}'] for page in pages}) == 1
    assert left_out(pages[0]) == {"processes": 0, "records": 0, "store default": 0}


def test_a_process_that_is_killed_while_it_makes_its_file_hides_no_other(tmp_path):
    counts = tmp_path / "counts"
    counts.mkdir()
    # As prometheus-client leaves it.
    (counts / "counter_1.db").touch()
    settings = {"DLOCKS": LOCAL, "DLOCK_METRICS": {"EXPORTERS": ["prometheus"], "RECORDS": False}}
    with site(tmp_path, settings, env={"PROMETHEUS_MULTIPROC_DIR": str(counts)}) as port:
        read(port, "recycle/1/1")
        page = series(read(port))
    assert page['django_dlock_wait_duration_seconds_count{alias="default",group="{slug}"}'] == 1
    assert left_out(page) == {"processes": 0, "store default": 0}


def test_a_site_without_its_directory_serves_the_rest(tmp_path):
    settings = {
        "DLOCKS": LOCAL,
        "DLOCK_METRICS": {"EXPORTERS": ["prometheus"], "RECORDS": False},
    }
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "nowhere")}
    with site(tmp_path, settings, env=env) as port:
        page = series(read(port))
    assert left_out(page) == {"processes": 1, "store default": 0}
    assert page['django_dlock_store_up{alias="default"}'] == 1


LATENESS = "django_dlock_renewal_lateness_seconds"


@pytest.mark.parametrize("lost", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_suspended_process_is_late_whether_its_lock_survives_or_not(tmp_path, lost):
    counts = tmp_path / "counts"
    counts.mkdir()
    # Renewed every second, or every 4 seconds.
    locks = {"default": {**LOCAL["default"], "TTL": 3.0 if lost else 12.0}}
    settings = {
        "DLOCKS": locks,
        "DLOCK_METRICS": {"EXPORTERS": ["prometheus"], "RECORDS": False},
    }
    env = {"PROMETHEUS_MULTIPROC_DIR": str(counts)}

    def now() -> dict[str, float]:
        return series(read(reader))

    with site(tmp_path, settings, env=env) as holder, site(tmp_path, settings, env=env) as reader:
        pid = int(read(holder, "hold/order:1"))
        until(lambda: now().get('django_dlock_renewals_total{alias="default"}', 0) >= 1)
        os.kill(pid, signal.SIGSTOP)
        # The subject is time that passes without the process.
        time.sleep(3.2 if lost else 6.2)
        os.kill(pid, signal.SIGCONT)
        losses = 'django_dlock_losses_total{alias="default",group="other",reason="expired"}'
        if lost:
            until(lambda: now().get(losses, 0) == 1)
        until(lambda: now()[f"{LATENESS}_count"] - now()[f'{LATENESS}_bucket{{le="2.0"}}'] == 1)
        # Short locks afterwards, of a process that is not late.
        read(holder, "recycle/1/1")
        assert now()[f"{LATENESS}_count"] - now()[f'{LATENESS}_bucket{{le="2.0"}}'] == 1
        assert now().get(losses, 0) == int(lost)
