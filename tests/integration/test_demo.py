"""The demonstration as ``make demo`` runs it, in a process independent of the tests."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = (sys.executable, "-m", "testproject.demo")

pytestmark = [
    pytest.mark.project,  # long, and the same on all versions
    pytest.mark.extended,
    pytest.mark.usefixtures("redis_server"),  # for its reason to skip
]


@pytest.fixture
def directory() -> Iterator[Path]:
    """The directory for the demonstration's files."""
    with tempfile.TemporaryDirectory(prefix="dlock-test-") as name:
        # PostgreSQL may run as another user, who must be able to enter the directory.
        Path(name).chmod(0o755)
        yield Path(name)


def environment(directory: Path) -> dict[str, str]:
    """Nearly empty, because the settings of the tests must not reach the demonstration."""
    return {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(directory)}


def left_behind(directory: Path) -> list[psutil.Process]:
    """Processes that this run started and that still exist."""
    return [process for process in psutil.process_iter() if _is_of(process, directory)]


def _is_of(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.environ().get("TMPDIR", "").startswith(str(directory))
    except psutil.Error:
        return False


def row(output: str, name: str) -> list[str]:
    """The cells of one line of the table: plain, lock alone, lock and record."""
    # The first cell belongs to the table; the second explains the row.
    line, _meaning = re.findall(rf"^{name}  +(.*)$", output, re.MULTILINE)
    return re.split(r"  +", line.strip())


@pytest.mark.parametrize(
    "kind",
    [
        "redis",
        # The same with another store takes half a minute each.
        pytest.param("sqlite", marks=pytest.mark.nightly),
        pytest.param("postgresql", marks=pytest.mark.nightly),
    ],
)
def test_the_demonstration_shows_what_it_promises_and_leaves_nothing_behind(
    directory: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "postgresql":
        # For its reason to skip.
        request.getfixturevalue("postgres_url")
    done = subprocess.run(
        (*COMMAND, *(("--metrics",) if kind == "redis" else ("--database", kind))),
        cwd=ROOT,
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    plain, locked, record = row(output, "double effects")
    assert int(plain) > 0
    assert int(locked) > 0, "the lock alone does not stop a later duplicate"
    assert int(record) == 0
    plain, locked, _ = row(output, "two runs of one order at once")
    assert int(plain) > 0
    assert int(locked) == 0
    assert row(output, "lost orders")[2] == "0"
    assert row(output, "orders")[2] == row(output, "effects")[2]
    for kill in ("child", "worker"):
        for cell in row(output, f"next run after a {kill} is killed"):
            assert re.fullmatch(r"\d+\.\d s", cell)
    assert output.count("killed the whole worker") == 3
    assert ("Redis runs on port" in output) == (kind == "redis")
    if kind == "redis":
        # What Prometheus would read agrees with the journal and with the lock events.
        compared = re.findall(r"^lock \S.*: locks .*?(\d+)(.) +(\d+)  ", output, re.MULTILINE)
        assert len(compared) == 8
        assert all(sign == "≥" or int(seen) == int(counted) for seen, sign, counted in compared)
        assert any(int(seen) > 0 for seen, _, _ in compared)
    # The progress, and the total.
    assert re.search(r" \d+ of \d+ messages are done", output)
    assert left_behind(directory) == []
    assert list(directory.iterdir()) == []


def held_locks(redis: str) -> list[dict[str, Any]]:
    """The locks that an operator sees."""
    command = (sys.executable, "manage.py", "list_locks", "--format", "json")
    env = {"PATH": os.environ.get("PATH", os.defpath), "REDIS_URL": redis}
    found: list[dict[str, Any]] = json.loads(subprocess.check_output(command, cwd=ROOT, env=env))
    return found


def lock_events(directory: Path) -> set[str]:
    """Which events the site's database has."""
    (database,) = directory.glob("dlock-demo-*/shop.sqlite3")
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        return {row[0] for row in connection.execute("SELECT event FROM django_dlock_lockevent")}


def statistics(directory: Path) -> int:
    """How many rows the pictures of the admin are made of."""
    (database,) = directory.glob("dlock-demo-*/shop.sqlite3")
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        query = "SELECT count(*) FROM django_dlock_lockstatistics"
        return int(connection.execute(query).fetchone()[0])


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demonstration_stops_what_it_started(
    directory: Path, end: signal.Signals
) -> None:
    demo = subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "killed the child" in line:
                break
        assert len(left_behind(directory)) > 10
        demo.send_signal(end)
        rest = demo.stdout.read()
    patience = time.monotonic() + 20
    while left_behind(directory) and time.monotonic() < patience:
        time.sleep(0.1)
    assert left_behind(directory) == []
    if end is not signal.SIGKILL:
        assert demo.returncode == 130, rest
        assert list(directory.iterdir()) == []


def test_the_site_and_its_workers_run_until_they_are_stopped(directory: Path) -> None:
    serve = subprocess.Popen(
        (*COMMAND, "serve"),
        cwd=ROOT,
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with serve:
        assert serve.stdout is not None
        said = ""
        for line in serve.stdout:
            said += line
            if "Ctrl-C" in line:
                break
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/admin/", said)
        with urllib.request.urlopen(address, timeout=10) as page:
            assert page.url == f"{address}login/?next=/admin/"
            assert page.status == 200
        (redis,) = re.findall(r"redis://\S+", said)
        # A minute, and the same again for a busy machine.
        patience = time.monotonic() + 120
        wanted = {
            "statistics",
            "waiting",
            "alive",
            "dead",
            "silent",
            "taken_over",
            "long_wait",
            "blocked",
        }
        seen: set[str] = set()
        while not wanted <= seen and time.monotonic() < patience:
            found = held_locks(redis)
            seen = {lock["holder_state"] for lock in found} | lock_events(directory)
            seen |= {"statistics"} if statistics(directory) else set()
            seen |= {"waiting"} if any(lock["waiting"] >= 2 for lock in found) else set()
            blocked = {lock["name"] for lock in found if lock["waiting"]}
            seen |= {"blocked"} if {"transfer:a", "transfer:b"} <= blocked else set()
        assert wanted <= seen
        serve.send_signal(signal.SIGINT)
        serve.stdout.read()
    assert serve.returncode == 0
    assert left_behind(directory) == []
    assert list(directory.iterdir()) == []
