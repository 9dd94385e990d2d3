"""Workers of each pool serve their metrics with what the guide prints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testproject.processes import free_port
from testproject.servers import RedisServer
from tests.support.databases import until
from tests.support.metrics_site import read, series
from tests.support.workers import Site, result

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def site(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    settings = {"DLOCK_METRICS": {"EXPORTERS": ["prometheus"], "RECORDS": False}}
    tasks = "tests.support.tasks_metrics"
    place = tmp_path_factory.mktemp("workers") / "site"
    with Site(redis_server, place, settings=settings, tasks=tasks) as made:
        yield made


# A Prometheus reads a worker of prefork in test_monitoring.py.
PREFORK = pytest.param("prefork", marks=pytest.mark.nightly)


@pytest.mark.parametrize("pool", [PREFORK, "solo", "threads"])
def test_a_worker_of_each_pool_serves_its_metrics(site, tmp_path, pool):
    port, place = free_port(), site.place()
    site.env["METRICS_PORT"] = str(port)
    site.env.pop("PROMETHEUS_MULTIPROC_DIR", None)
    if pool == "prefork":
        counts = tmp_path / "counts"
        counts.mkdir()
        site.env["PROMETHEUS_MULTIPROC_DIR"] = str(counts)
    site.worker(pool, 2)
    for order in (1, 2):
        result(site.send("locked", order, str(place), queue=pool))
    granted = 'django_dlock_wait_duration_seconds_count{alias="default",group="order"}'
    until(lambda: series(read(port)).get(granted) == 2)
    page = series(read(port))
    assert page['django_dlock_store_up{alias="default"}'] == 1
    assert page['django_dlock_scrape_left_out{alias="default",part="store"}'] == 0
