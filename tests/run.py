"""``python -m tests.run``: runs pytest; in CI, it runs the tests that failed again, one at a time.

    python -m tests.run [arguments of pytest]

Without ``CI`` in the environment, it is pytest. With it, each failed test runs once more with
nothing beside it. The exit code is 0 only if all of them pass then. Each that does is named as
*unstable*, with the reason why it had failed, so that somebody fixes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

MANY = 20
"""More failed tests are not an accident, and are not repeated."""


class Recorder:
    """A plugin: how many tests ended in which way, and why the failed ones did.

    It runs where the reports of all workers arrive.
    """

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.skipped: set[str] = set()
        self.failed: dict[str, str] = {}
        self.broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, reason_of(report))
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report.nodeid)


def reason_of(report: pytest.TestReport) -> str:
    """The line of the error that says most."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{report.when}: {lines[0] if crash else lines[-1]}" if lines else report.when or ""


def main(arguments: Sequence[str]) -> int:
    recorder = Recorder()
    code = int(pytest.main([*arguments], plugins=[recorder]))
    if code != pytest.ExitCode.TESTS_FAILED or not os.environ.get("CI"):
        return code
    if recorder.broken or not recorder.failed or len(recorder.failed) > MANY:
        return code
    return repeated(recorder)


def repeated(recorder: Recorder) -> int:
    """Run the failed tests again; 0 if each of them passes."""
    failed = recorder.failed
    print(f"\n== the {len(failed)} that failed, once more, alone", flush=True)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-v"]
    again: dict[str, bool] = {}
    for test in failed:
        again[test] = subprocess.run([*command, test], check=False).returncode == 0
    for test, passed in again.items():
        print(f"{'unstable' if passed else 'failed twice'}: {test}\n    {failed[test]}")
    bad = sum(not passed for passed in again.values())
    good = len(recorder.passed | failed.keys()) - bad
    print(f"{good} passed, {bad} failed, {len(recorder.skipped)} skipped", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
