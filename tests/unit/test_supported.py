"""What the project claims to support is what its tests ran on."""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests import supported

# The same on all versions.
pytestmark = pytest.mark.project


def test_the_page_is_what_the_command_writes() -> None:
    told = supported.PAGE.read_text().partition(supported.HEADING)[2]
    assert told == supported.section(), "run: python -m tests.supported"


def test_the_classifiers_are_those_of_recorded_runs() -> None:
    assert supported.claimed() == supported.earned()


def test_the_command_leaves_the_choice_of_settings_to_pytest() -> None:
    code = "import os, tests.supported; print(os.environ.get('DJANGO_SETTINGS_MODULE'))"
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    told = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=supported.ROOT, env=environment
    )
    assert told.strip() == "None"


UNTESTED = ("MySQL", "macOS")
"""There is code for these; the page says that nobody has run it."""


def test_no_page_promises_what_was_not_tested() -> None:
    assert f"This goes for {' and '.join(UNTESTED)}, too" in supported.PAGE.read_text()
    root = supported.ROOT
    first = [root / name for name in ("README.md", "DESCRIPTION.md", "CHANGELOG.md", "SECURITY.md")]
    for page in [*first, *(root / "docs").rglob("*.md")]:
        for line in page.read_text().splitlines():
            for name in UNTESTED:
                # Elsewhere, a version is a promise, and what it does differently is not.
                said = re.search(name if page in first else rf"{name} \d", line)
                assert not said or "not tested" in line, (page.name, line)


def test_environments_of_tox_are_told_apart() -> None:
    assert "py310-django52-celery57" in supported.environments()
    assert "py311-django52-celery55-redis52" in supported.environments()
    assert "lint" not in supported.environments()


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        (["-n", "8", "--dist", "loadscope", "--level", "quick"], "quick"),
        (["--level=all", "-m", "not project"], "all"),
        (["-q"], "all"),
        (["-q", "-n", "2", "tests/unit", "-k", "lock"], "tests/unit -k lock"),
        (["--level", "quick", "tests/unit"], "tests/unit"),
    ],
)
def test_only_a_level_without_other_choices_is_whole(arguments: list[str], tests: str) -> None:
    assert supported.chosen(arguments) == tests


@pytest.mark.parametrize(
    ("store", "test", "used"),
    [
        ("PostgreSQL", "tests/backends/test_awkward.py::test_a_name[postgres-1]", True),
        ("PostgreSQL", "tests/unit/test_checks.py::test_it[postgres]", False),
        ("Redis", "tests/backends/test_redis_acl.py::test_it", True),
        ("MariaDB", "tests/backends/test_redis_acl.py::test_it", False),
    ],
)
def test_a_store_counts_if_a_test_ran_on_it(store: str, test: str, used: bool) -> None:
    assert supported.ran_on(store, test) is used


RECORD = """
import sys
from pathlib import Path
from tests import supported
supported.RUNS = Path("runs.json")
sys.exit(supported.record(sys.argv[1:]))
"""


@pytest.mark.parametrize(("body", "times"), [("pass", 1), ("assert False", 0)])
def test_only_a_run_without_a_failure_is_recorded(body: str, times: int, tmp_path: Path) -> None:
    kept = tmp_path / "runs.json"
    kept.write_text("[]")
    (tmp_path / "test_sample.py").write_text(f"def test_it():\n    {body}\n")
    command = [sys.executable, "-c", RECORD, "-q", "-n", "0", "--rootdir", str(tmp_path), "."]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**outside(), "PYTHONPATH": str(supported.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    stored = json.loads(kept.read_text())
    assert len(stored) == times, done.stdout + done.stderr
    assert (done.returncode == 0) == bool(times)
    for run in stored:
        assert (run["passed"], run["python"]) == (1, platform.python_version())
        assert run["stores"] == [f"SQLite {sqlite3.sqlite_version}"]


def outside() -> dict[str, str]:
    """The environment without what belongs to this run of the tests."""
    own = ("DJANGO_", "PYTEST_", "REDIS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}
