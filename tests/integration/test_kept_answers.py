"""The files in which the processes of a site keep what the stores have said, when they are bad."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
from django.test import override_settings

from django_dlock import clock, locks
from django_dlock.metrics import instruments
from django_dlock.metrics.stores import StoreFacts
from tests.support.metrics_site import LOCAL, ROOT, read, series, site

UP, LATENCY = instruments.STORE_UP.name, instruments.STORE_LATENCY.name


def test_what_another_version_or_a_crash_has_left_is_asked_again(tmp_path):
    counts = tmp_path / "counts"
    counts.mkdir()
    now = clock.now()
    left = {
        "empty": b"",
        "half": json.dumps([now, [[UP, 0, {"alias": "half"}]]]).encode()[:-9],
        "bytes": b"\xff\x00",
        "time": json.dumps(["now", []]).encode(),
        "labels": json.dumps([now, [[LATENCY, 1, {}], [UP, 0, {}]]]).encode(),
        "list": json.dumps([now, [[UP, 0, ["alias"]]]]).encode(),
        "value": json.dumps([now, [[UP, None, {"alias": "value"}]]]).encode(),
        "deep": b"[" * 100_000,
        "metric": json.dumps([now, [["django_dlock.gone", 0, {}]]]).encode(),
    }
    for alias, content in left.items():
        (counts / f"django_dlock-store-{alias}.json").write_bytes(content)
    settings = {
        "DLOCKS": dict.fromkeys(left, LOCAL["default"]),
        "DLOCK_METRICS": {"EXPORTERS": ["prometheus"], "RECORDS": False},
    }
    with site(tmp_path, settings, env={"PROMETHEUS_MULTIPROC_DIR": str(counts)}) as port:
        page = series(read(port))
    up = {alias: page.get(f'django_dlock_store_up{{alias="{alias}"}}') for alias in left}
    assert up == dict.fromkeys(left, 1)


@pytest.fixture
def facts(tmp_path):
    with override_settings(DLOCKS=LOCAL):
        locks.reset()
        yield StoreFacts(records=False, directory=tmp_path)
    locks.reset()


def test_a_file_system_without_locks_hides_no_store(facts, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    found = {sample.instrument.name: sample.value for sample in facts.samples()}
    assert found[UP] == 1
    assert found[instruments.LEFT_OUT.name] == 0


FULL = """
import resource, sys
from pathlib import Path
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
)
import django
django.setup()
from django_dlock.metrics.stores import StoreFacts
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
for sample in StoreFacts(records=False, directory=Path(sys.argv[1])).samples():
    print(sample.instrument.name, sample.value)
"""


def test_a_full_disk_hides_no_store(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = dict(line.split() for line in done.stdout.splitlines())
    assert (found[UP], found[instruments.LEFT_OUT.name]) == ("1", "0"), done.stderr
