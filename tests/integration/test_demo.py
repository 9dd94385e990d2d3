"""The demonstration, as ``make demo`` runs it: in a process that knows nothing of the tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = (sys.executable, "-m", "testproject.demo")

pytestmark = [
    pytest.mark.project,  # long, and the same on all versions
    pytest.mark.usefixtures("redis_server"),  # for its reason to skip
]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where the demonstration puts its files."""
    with tempfile.TemporaryDirectory(prefix="dlock-test-") as name:
        yield Path(name)


def environment(directory: Path) -> dict[str, str]:
    """Nearly none: what the tests set must not reach it."""
    return {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(directory)}


def left_behind(directory: Path) -> list[psutil.Process]:
    """Processes that were started for this run and are still there."""
    return [process for process in psutil.process_iter() if _is_of(process, directory)]


def _is_of(process: psutil.Process, directory: Path) -> bool:
    try:
        return process.environ().get("TMPDIR", "").startswith(str(directory))
    except psutil.Error:
        return False


def row(output: str, name: str) -> list[str]:
    """The cells of one line of the table: plain, lock alone, lock and record."""
    (line,) = re.findall(rf"^{name}  +(.*)$", output, re.MULTILINE)
    return re.split(r"  +", line.strip())


def test_the_demonstration_shows_what_it_promises_and_leaves_nothing_behind(
    directory: Path,
) -> None:
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    plain, locked, record = row(output, "double effects")
    assert int(plain) > 0
    assert int(locked) > 0, "the lock alone does not stop a later duplicate"
    assert int(record) == 0
    plain, locked, _ = row(output, "overlaps of bodies per key")
    assert int(plain) > 0
    assert int(locked) == 0
    assert row(output, "lost orders")[2] == "0"
    assert row(output, "orders")[2] == row(output, "effects")[2]
    for cell in row(output, "take-over after a kill"):
        assert re.fullmatch(r"\d+\.\d s", cell)
    assert left_behind(directory) == []
    assert list(directory.iterdir()) == []


def held_locks(redis: str) -> int:
    """How many locks an operator sees, once there is one; waits for at most 20 s."""
    command = (sys.executable, "manage.py", "list_locks", "--format", "json")
    env = {"PATH": os.environ.get("PATH", os.defpath), "REDIS_URL": redis}
    patience = time.monotonic() + 20
    found = 0
    while not found and time.monotonic() < patience:
        found = len(json.loads(subprocess.check_output(command, cwd=ROOT, env=env)))
    return found


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
            if "killed a worker" in line:
                break
        assert len(left_behind(directory)) > 10
        demo.send_signal(end)
        demo.stdout.read()
    patience = time.monotonic() + 20
    while left_behind(directory) and time.monotonic() < patience:
        time.sleep(0.1)
    assert left_behind(directory) == []
    if end is not signal.SIGKILL:
        assert demo.returncode == 130
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
        assert held_locks(redis) >= 1
        serve.send_signal(signal.SIGINT)
        serve.stdout.read()
    assert serve.returncode == 0
    assert left_behind(directory) == []
    assert list(directory.iterdir()) == []
