"""Every alert fires on the first event that it is for, and every panel has data.

A real Prometheus reads a site with web workers, two kinds of Celery workers, and stores of which
one goes away. A second counts for a minute, in the rules and in the queries of the dashboard.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from testproject.processes import HOST, free_port
from testproject.servers import RedisServer
from tests.conftest import missing
from tests.support.prometheus import (
    ALERTS,
    DASHBOARD,
    PrometheusServer,
    ServerNotFound,
    in_seconds,
)
from tests.support.workers import ROOT, Site, Worker, eventually, result

pytestmark = pytest.mark.extended

DATABASE = "django_dlock.backends.database.DatabaseBackend"
REDIS = "django_dlock.backends.redis.RedisBackend"
FAILOVER = "django_dlock.backends.failover.FailoverBackend"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
LATE = 6.5
"""Seconds for which a worker is stopped."""


def stores(redis: RedisServer, doomed: RedisServer) -> dict[str, Any]:
    quick = {"command_timeout": 0.3}
    return {
        "default": {"BACKEND": REDIS, "LOCATION": redis.url, "TTL": 6.0},
        "table": {"BACKEND": DATABASE, "TTL": 6.0},
        "doomed": {"BACKEND": REDIS, "LOCATION": doomed.url, "TTL": 2.0, "OPTIONS": quick},
        "both": {
            "BACKEND": FAILOVER,
            "TTL": 2.0,
            "OPTIONS": {
                **quick,
                "primary": "doomed",
                "standby": "table",
                "view_ttl": 1.0,
                "failover_after": 1.0,
            },
        },
    }


def shared_by(site: Site, name: str) -> str:
    """An empty directory for the counts of several processes."""
    path = site.directory / name
    path.mkdir()
    return str(path)


class Web:
    """Two workers of gunicorn; a context manager."""

    def __init__(self, site: Site) -> None:
        if importlib.util.find_spec("gunicorn") is None:
            missing("gunicorn is not installed: pip install gunicorn")
        self.port, self.log = free_port(), site.directory / "web.log"
        guide = (ROOT / "docs" / "howto" / "metrics.md").read_text()
        config = re.search(r"```python\n(# gunicorn\.conf\.py\n.*?)```", guide, re.DOTALL)
        assert config is not None
        file = site.directory / "gunicorn.conf.py"
        file.write_text(config[1])
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gunicorn", "testproject.wsgi", "--config", str(file)),
                    *("--bind", f"{HOST}:{self.port}", "--workers", "2", "--threads", "6"),
                    *("--graceful-timeout", "1"),
                ],
                cwd=ROOT,
                env={**site.env, MULTIPROCESS: shared_by(site, "web")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Web:
        # With this alias, so that its epoch is known when the stores are asked for the first time.
        eventually(lambda: self.get("attempt/both/a:1"), why=f"an answer; see {self.log}")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def get(self, path: str) -> str | None:
        """The page; ``None`` if the worker has ended, or the site has."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/{path}", timeout=60) as answer:
                return answer.read().decode()
        except (OSError, urllib.error.URLError):
            return None


class Scene:
    """All that runs, and what happens in it."""

    def __init__(
        self, site: Site, web: Web, doomed: RedisServer, prometheus: PrometheusServer
    ) -> None:
        self.site, self.web, self.doomed, self.prometheus = site, web, doomed, prometheus
        self.place, self.began = site.place(), time.time()
        self._over = threading.Event()

    def play(self, threads: Worker) -> None:
        """Let everything happen that an alert is for."""
        os.kill(int(self._hold("default/dead:1?ttl=600")), signal.SIGKILL)
        self._hold("default/slow:1?max_hold=1")
        for lock in ("default/busy:1", "doomed/gone:1", "both/moved:1"):
            self._hold(lock)
        # Waits, and is asked for again and again.
        self._repeat("attempt/default/busy:1?wait=60")
        for lock in ("default/busy:1", "doomed/gone:2", "both/moved:2"):
            self._repeat(f"attempt/{lock}")
        self._work()
        self.place.wait("holds-late:1")
        # Only what is added to a known number is an increase.
        self._see("django_dlock_renewal_lateness_seconds_count{job='threads'}")
        threads.pause()
        until = time.monotonic() + LATE
        self._see("django_dlock_acquire_attempts_total{alias='both'}")
        self._see("django_dlock_held{alias='doomed'}")
        self._see("django_dlock_store_epoch")
        self.doomed.kill()
        time.sleep(max(0.0, until - time.monotonic()))
        threads.resume()

    def _work(self) -> None:
        """Tasks that are run, requeued, recorded, broken, held too long, and killed."""
        site, place = self.site, str(self.place)
        site.send("hold", "default", "child:1", place, {}, queue="prefork")
        site.send("hold", "table", "slow:1", place, {"max_hold": 1}, queue="threads")
        # Renewed every 4 seconds, so by a thread that wakes too late after the pause.
        site.send("hold", "default", "late:1", place, {"ttl": 12}, queue="threads")
        for _ in range(2):
            task = "tests.support.tasks_metrics.locked"
            site.app.send_task(task, (1, place, "go"), queue="threads")
        self.place.wait("holds-child:1")
        self._see("django_dlock_held{group='child'}")
        lease = site.locks.get("child:1")
        assert lease is not None
        assert site.locks.break_(lease.name, owner=lease.owner)
        site.send("lose_and_die", "brief:1", queue="prefork")

    def _hold(self, lock: str) -> str:
        """The id of the process that holds it from now on."""
        holder = self.web.get(f"hold/{lock}")
        assert holder is not None, lock
        return holder

    def _see(self, query: str) -> None:
        """Block until Prometheus has read it."""
        eventually(lambda: self.prometheus.values(query), 30, query)

    def _repeat(self, path: str) -> None:
        def run() -> None:
            while not self._over.wait(0.2):
                self.web.get(path)

        threading.Thread(target=run, daemon=True).start()

    def end(self) -> None:
        self._over.set()
        for worker in self.site.workers:
            worker.kill()

    def fired(self) -> list[dict[str, str]]:
        """The labels of each alert that fires or has fired."""
        query = 'last_over_time(ALERTS{alertstate="firing"}[1h])'
        return [each["metric"] for each in self.prometheus.ask("query", query=query)["result"]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("alerts")
    with contextlib.ExitStack() as stack:
        try:
            redis, doomed = (stack.enter_context(RedisServer()) for _ in range(2))
            settings = {
                "DLOCKS": stores(redis, doomed),
                "DLOCK_METRICS": {"EXPORTERS": ["prometheus"]},
                "ROOT_URLCONF": "tests.support.alerting_site",
            }
            tasks = "tests.support.tasks_alerting"
            site = Site(redis, directory / "site", settings=settings, tasks=tasks)
            stack.enter_context(site)
            web = stack.enter_context(Web(site))
            targets, workers = {"web": f"{HOST}:{web.port}"}, {}
            for pool in ("threads", "prefork"):
                port = free_port()
                site.env |= {"METRICS_PORT": f"{port}", MULTIPROCESS: shared_by(site, pool)}
                workers[pool] = site.worker(pool, 4)
                targets[pool] = f"{HOST}:{port}"
            # Before the records are counted, which happens only once a minute.
            charged = site.app.send_task("tests.support.tasks_app.charge", (2, str(site.place())))
            assert result(charged) == 1
            prometheus = stack.enter_context(PrometheusServer(targets, ALERTS))
        except ServerNotFound as error:
            missing(str(error))
        made = Scene(site, web, doomed, prometheus)
        stack.callback(made.end)
        made.play(workers["threads"])
        yield made


FIRE = [
    {"alertname": "DlockHeldTooLong", "alias": "default", "group": "slow"},
    {"alertname": "DlockHeldTooLong", "alias": "table", "group": "slow"},
    {"alertname": "DlockLost", "alias": "default", "group": "child", "reason": "broken"},
    {"alertname": "DlockLost", "alias": "default", "group": "brief", "reason": "expired"},
    {"alertname": "DlockLost", "alias": "doomed", "group": "gone", "reason": "unreachable"},
    {"alertname": "DlockStoreDown", "alias": "doomed"},
    {"alertname": "DlockUnavailable", "alias": "doomed"},
    {"alertname": "DlockStoreSwitched", "alias": "both"},
    {"alertname": "DlockDeadHolders", "alias": "default"},
    {"alertname": "DlockRenewalLate"},
    {"alertname": "DlockContended", "alias": "default", "group": "busy"},
]


@pytest.mark.parametrize("labels", FIRE, ids=lambda labels: "-".join(labels.values()))
def test_an_alert_fires_on_the_first_event_that_it_is_for(
    scene: Scene, labels: dict[str, str]
) -> None:
    eventually(
        lambda: any(labels.items() <= fired.items() for fired in scene.fired()), 40, f"{labels}"
    )


def test_every_alert_is_provoked() -> None:
    names = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    assert sorted({each["alertname"] for each in FIRE}) == sorted(names)


def test_a_store_that_answers_is_not_reported(scene: Scene) -> None:
    down = {each["alias"] for each in scene.fired() if each["alertname"] == "DlockStoreDown"}
    assert not down & {"default", "table"}
    health = {each["health"] for each in scene.prometheus.ask("rules")["groups"][0]["rules"]}
    assert health == {"ok"}


QUERIES = [
    (panel["title"], target["expr"])
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    for target in panel["targets"]
]


def test_the_dashboard_knows_every_alias(scene: Scene) -> None:
    found = scene.prometheus.ask("label/alias/values", **{"match[]": "django_dlock_store_up"})
    assert set(found) == {"default", "table", "doomed", "both"}


@pytest.mark.parametrize(
    ("title", "query"), QUERIES, ids=[f"{title}-{i}" for i, (title, _) in enumerate(QUERIES)]
)
def test_every_panel_of_the_dashboard_has_data(scene: Scene, title: str, query: str) -> None:
    if title == "Ended by others":
        eventually(lambda: scene.web.get("attempt/default/dead:1") == "acquired", 20)
    query = in_seconds(query.replace("$__rate_interval", "4m").replace("$alias", ".*"))

    def drawn() -> bool:
        found = scene.prometheus.ask(
            "query_range", query=query, start=f"{scene.began}", end=f"{time.time()}", step="0.5"
        )
        values = [float(value) for each in found["result"] for _, value in each["values"]]
        return any(value > 0 for value in values)

    eventually(drawn, 15, query)
