"""What sites answer to Prometheus over HTTP, from processes of their own."""

from __future__ import annotations

from tests.support.metrics_site import LOCAL, read, series, site


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
