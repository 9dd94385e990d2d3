"""How the tests are chosen and, in CI, repeated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import levels, run

# The same on all versions.
pytestmark = pytest.mark.project

ROOT = Path(__file__).resolve().parents[2]

STEADY = "def test_steady():\n    pass\n"
UNSTABLE = """
from pathlib import Path

def test_fails_once():
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first, "the server was slow"
"""
BROKEN = "def test_broken():\n    assert False, 'always'\n"


def pytest_says(
    directory: Path, *sources: str, ci: bool = True, options: tuple[str, ...] = ("-n", "1")
) -> tuple[int, str]:
    """The exit code and the output of a run of a small suite."""
    for number, source in enumerate(sources):
        (directory / f"test_{number}.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.run", *options, f"--rootdir={directory}", str(directory)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CI": "true" if ci else ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_fails_among_others_and_passes_alone_is_unstable(tmp_path: Path) -> None:
    code, output = pytest_says(tmp_path, STEADY, UNSTABLE)
    assert code == 0, output
    assert re.search(r"^unstable: test_1.py::test_fails_once\n +call: .*slow", output, re.MULTILINE)
    assert output.endswith("2 passed, 0 failed, 0 skipped\n")


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    code, output = pytest_says(tmp_path, STEADY, UNSTABLE, BROKEN)
    assert code == 1
    assert "unstable: test_1.py::test_fails_once" in output
    assert "failed twice: test_2.py::test_broken" in output
    assert output.endswith("2 passed, 1 failed, 0 skipped\n")


def test_nothing_is_repeated_at_home(tmp_path: Path) -> None:
    code, output = pytest_says(tmp_path, UNSTABLE, ci=False)
    assert code == 1
    assert "once more" not in output


def test_a_file_that_cannot_be_imported_is_not_repeated(tmp_path: Path) -> None:
    code, output = pytest_says(tmp_path, STEADY, "import no_such_module")
    assert code != 0
    assert "once more" not in output


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    many = f"@pytest.mark.parametrize('number', range({run.MANY + 1}))"
    code, output = pytest_says(
        tmp_path, f"import pytest\n\n{many}\ndef test_broken(number):\n    assert False\n"
    )
    assert code == 1
    assert "once more" not in output


SKIPPED_LATER = """
from pathlib import Path
import pytest

def test_fails_once():
    seen = Path(__file__).with_name("skipped")
    if seen.exists():
        pytest.skip("there is nothing to test any more")
    seen.touch()
    assert False
"""
TORN_DOWN = """
import pytest
from pathlib import Path

@pytest.fixture
def server():
    yield
    seen = Path(__file__).with_name("torn")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_it(server):
    pass
"""
IN_A_THREAD = """
import threading
from pathlib import Path

def test_it():
    seen = Path(__file__).with_name("threads")
    if not seen.exists():
        seen.touch()
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
"""
CRASHING = """
import os

def test_crashes():
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(9)

def test_behind_it():
    assert False
"""


def test_a_test_that_is_skipped_when_it_is_repeated_has_not_passed(tmp_path: Path) -> None:
    code, output = pytest_says(tmp_path, SKIPPED_LATER)
    assert code == 1
    assert "failed twice: test_0.py::test_fails_once" in output


LEAVES_A_SOCKET = """
import pathlib, socket

def test_meets_it():
    left = pathlib.Path(__file__).with_name("left")
    if not left.exists():
        left.touch()
        socket.socket()
"""


def test_a_test_that_met_a_socket_that_was_not_closed_is_repeated(tmp_path: Path) -> None:
    warnings = ("-W", "error::ResourceWarning")
    warnings += ("-W", "error::pytest.PytestUnraisableExceptionWarning")
    code, output = pytest_says(tmp_path, LEAVES_A_SOCKET, options=("-n", "0", *warnings))
    assert code == 0, output
    assert "unstable: test_0.py::test_meets_it" in output


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (TORN_DOWN, ()),
        (IN_A_THREAD, ("-W", "error::pytest.PytestUnhandledThreadExceptionWarning")),
        (CRASHING, ("--dist", "loadscope", "--max-worker-restart", "1")),
        (UNSTABLE + BROKEN, ("-n", "0", "-x")),
    ],
    ids=["teardown", "thread", "crash", "first failure"],
)
def test_what_may_hide_more_is_not_repeated(
    tmp_path: Path, source: str, options: tuple[str, ...]
) -> None:
    code, output = pytest_says(tmp_path, source, options=("-n", "1", *options))
    assert code != 0
    assert "The failed tests are not repeated: " in output
    assert "unstable" not in output


def test_the_repetition_has_the_options_of_the_run(tmp_path: Path) -> None:
    warns = "import warnings\n\ndef test_it():\n    warnings.warn('slow', RuntimeWarning)\n"
    options = ("-n", "0", "-W", "error::RuntimeWarning")
    code, output = pytest_says(tmp_path, warns, options=options)
    assert code == 1
    assert "failed twice: test_0.py::test_it" in output


# -- levels ----------------------------------------------------------------------------------


def item(nodeid: str, *marks: str, fixtures: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        nodeid=nodeid,
        name=nodeid.rpartition("::")[2],
        fixturenames=fixtures,
        get_closest_marker=lambda mark: mark if mark in marks else None,
    )


@pytest.mark.parametrize(
    ("test", "level"),
    [
        (item("tests/unit/test_x.py::test_it"), "quick"),
        (item("tests/unit/test_x.py::test_it[postgres]"), "quick"),
        (item("tests/integration/test_x.py::test_it", fixtures=("own_redis",)), "quick"),
        (item("tests/integration/test_x.py::test_it", fixtures=("rabbit_server",)), "rest"),
        (item("tests/integration/test_x.py::test_it[sqlite]"), "quick"),
        (item("tests/integration/test_x.py::test_it[a-postgres]"), "rest"),
        (item("tests/integration/test_x.py::test_the_postgres_page[a]"), "quick"),
        (item("tests/integration/test_x.py::test_it", "extended"), "rest"),
        (item("tests/integration/test_x.py::test_it", "extended", "nightly"), "nightly"),
        (item("tests/backends/test_x.py::test_it"), "rest"),
        (item("tests/backends/test_x.py::test_it", "quick"), "quick"),
        (item("tests/backends/test_x.py::test_it[mariadb]", "quick"), "rest"),
        (item("tests/faults/test_x.py::test_it"), "rest"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.nodeid,
)
def test_a_test_has_one_level(test: Any, level: str) -> None:
    assert levels.level_of(test) == level
