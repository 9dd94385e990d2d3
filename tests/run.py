"""``python -m tests.run``: runs pytest; in CI, it runs the tests that failed again, one at a time.

    python -m tests.run [arguments of pytest]

Without ``CI`` in the environment, it is pytest. With it, each failed test runs once more with
nothing beside it. The exit code is 0 only if all of them pass then. Each that does is named as
*unstable*, with the reason why it had failed, so that somebody fixes it.

Some failures are no accident of a busy machine, and are never repeated: what is left open or
fails in another thread, because it belongs to any test that runs at that moment; a teardown; and
a run that did not reach all of its tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

MANY = 20
"""More failed tests are not an accident, and are not repeated."""
BELONGS_TO_ANOTHER = (
    "PytestUnhandledThreadExceptionWarning",
    "PytestUnraisableExceptionWarning",
    "ResourceWarning",
)


def is_of_another(text: str) -> bool:
    """Whether a failure may be of a test that passed, which a repetition would hide.

    Not if the garbage collector only met sockets that were not closed: that harms no test, and the
    name of the one that was running is printed as unstable.
    """
    met = text.count("Exception ignored in: ")
    if met and met == text.count("Exception ignored in: <socket.socket "):
        return BELONGS_TO_ANOTHER[0] in text
    return any(name in text for name in BELONGS_TO_ANOTHER)


class Recorder:
    """A plugin: how each test ended, and why the failed ones did.

    It runs where the reports of all workers arrive.
    """

    def __init__(self) -> None:
        self.selected: set[str] = set()
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        self.failed: dict[str, str] = {}
        self.no_accidents: list[str] = []
        self.options: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.selected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.no_accidents.append(f"{report.nodeid} cannot be collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, reason_of(report))
            if report.when == "teardown":
                self.no_accidents.append(f"the teardown of {report.nodeid} failed")
            elif is_of_another(report.longreprtext):
                self.no_accidents.append(f"{report.nodeid} met what another test may have left")
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        config = session.config
        named = set(config.args) if config.args_source is config.ArgsSource.ARGS else set()
        self.options = [arg for arg in config.invocation_params.args if arg not in named]
        if session.shouldstop or session.shouldfail:
            self.no_accidents.append(str(session.shouldstop or session.shouldfail))

    def why_not_again(self) -> str:
        """Why the failed tests must not be repeated; empty if they may."""
        missing = self.selected - self.passed - self.skipped - self.failed.keys()
        if missing:
            return f"{len(missing)} tests did not run, such as {min(missing)}"
        if len(self.failed) > MANY:
            return f"{len(self.failed)} tests failed"
        return self.no_accidents[0] if self.no_accidents else ""


def reason_of(report: pytest.TestReport) -> str:
    """The line of the error that says most."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{report.when}: {lines[0] if crash else lines[-1]}" if lines else report.when or ""


def main(arguments: Sequence[str]) -> int:
    # The tests' own settings must not reach the second run.
    environment, recorder = dict(os.environ), Recorder()
    code = int(pytest.main([*arguments], plugins=[recorder]))
    if code != pytest.ExitCode.TESTS_FAILED or not environment.get("CI"):
        return code
    if refusal := recorder.why_not_again():
        print(f"The failed tests are not repeated: {refusal}.", flush=True)
        return code
    return repeated(recorder, environment)


def repeated(recorder: Recorder, environment: Mapping[str, str]) -> int:
    """Run the failed tests again; 0 if each of them passes."""
    failed = recorder.failed
    print(f"\n== the {len(failed)} that failed, once more, alone", flush=True)
    again = {test: passes(test, recorder.options, environment) for test in failed}
    for test, passed in again.items():
        print(f"{'unstable' if passed else 'failed twice'}: {test}\n    {failed[test]}")
    bad = sum(not passed for passed in again.values())
    good = len(recorder.passed | failed.keys()) - bad
    print(f"{good} passed, {bad} failed, {len(recorder.skipped)} skipped", flush=True)
    return 1 if bad else 0


def passes(test: str, options: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the test runs, and passes, in a pytest of its own."""
    with tempfile.TemporaryDirectory(prefix="dlock-again-") as directory:
        report = Path(directory) / "report.xml"
        # A later option counts: one process, and no other choice of tests.
        alone = ["-v", "-n", "0", "-k", "", "-m", "", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *alone, test]
        if subprocess.run(command, env=environment, check=False).returncode:
            return False
        (suite,) = ET.parse(report).getroot().iter("testsuite")
        ended: dict[str, Any] = {name: int(suite.get(name, "0")) for name in ("tests", "skipped")}
        return ended == {"tests": 1, "skipped": 0}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
