"""Runs mutants: each is one changed copy of the tree, in which its tests should fail."""

from __future__ import annotations

import compileall
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tests.mutants.mutant import BrokenMutant, Mutant
from tests.mutants.node_ids import Suite
from tests.mutants.places import Package

PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
PATIENCE = 75.0
"""Seconds for the tests of one mutant; a mutant may hang."""
LEFT_OUT = (
    *(".*", "__pycache__", "*.egg-info", "*.sqlite3*"),
    *("_build", "build", "carried", "dist", "node_modules", "venv"),
)

Verdict = Literal["red", "red alone", "hung", "GREEN", "BROKEN"]
GOOD: tuple[Verdict, ...] = ("red", "red alone", "hung")


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    verdict: Verdict
    seconds: float
    output: str


@dataclass(frozen=True)
class Found:
    """What running a mutant needs."""

    texts: Mapping[str, str]
    """The path of each file that it changes, and the file's text then."""
    tests: tuple[str, ...]
    """As pytest takes them."""


class Run:
    """Runs of mutants beside each other, in copies of one tree."""

    def __init__(self, tree: Path, package: Package, suite: Suite, count: int) -> None:
        self._tree = tree
        self._package = package
        self._suite = suite
        self._count = count
        self._done = 0
        self._printing = threading.Lock()

    def of(self, mutant: Mutant) -> Result:
        result = self._result(mutant)
        with self._printing:
            self._done += 1
            print(
                f"[{self._done}/{self._count}] {mutant.guarantee} {mutant.name}: "
                f"{result.verdict} ({result.seconds:.0f} s)",
                flush=True,
            )
            if result.verdict not in GOOD:
                print(result.output[-3000:], flush=True)
        return result

    def alone(self, result: Result) -> Result:
        """The mutant's second try, with nothing beside it."""
        again = self._result(result.mutant)
        print(f"{again.mutant.name}, alone: {again.verdict} ({again.seconds:.0f} s)", flush=True)
        return replace(again, verdict="red alone") if again.verdict in GOOD else again

    def _result(self, mutant: Mutant) -> Result:
        started = time.monotonic()
        try:
            found = find(mutant, self._package, self._suite)
        except BrokenMutant as error:
            return Result(mutant, "BROKEN", time.monotonic() - started, str(error))
        with tempfile.TemporaryDirectory(prefix="dlock-mutant-") as directory:
            copy = Path(directory) / "tree"
            shutil.copytree(self._tree, copy)
            for path, text in found.texts.items():
                (copy / path).write_bytes(text.encode())
            verdict, output = tested(found.tests, copy)
        return Result(mutant, verdict, time.monotonic() - started, output)


def find(mutant: Mutant, package: Package, suite: Suite) -> Found:
    """
    Raises:
        BrokenMutant: The place of a change, or a test, is not found.
    """
    tests = tuple(test.node_id for test in suite.of(mutant))
    return Found(package.changed(mutant), tests)


def run_all(mutants: Sequence[Mutant], root: Path, jobs: int) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="dlock-mutants-") as directory:
        # Later edits of the tree change nothing.
        tree = Path(directory) / "tree"
        shutil.copytree(root, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        place = imported_from(tree)
        if not place.startswith(str(tree)):
            raise SystemExit(f"the copy's tests would import {place}, not the copy")
        package, suite = Package.read(tree), Suite(tree)
        compile_once(tests_of(mutants, suite), tree)
        run = Run(tree, package, suite, len(mutants))
        with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            results = list(pool.map(run.of, mutants))
        # On a busy machine, a test of a race may miss its mutant, so it runs again alone.
        return [run.alone(result) if result.verdict == "GREEN" else result for result in results]


def tests_of(mutants: Sequence[Mutant], suite: Suite) -> set[str]:
    """The tests of all mutants but the broken ones."""
    found: set[str] = set()
    for mutant in mutants:
        with contextlib.suppress(BrokenMutant):
            found |= {test.node_id for test in suite.of(mutant)}
    return found


def tested(tests: Sequence[str], tree: Path) -> tuple[Verdict, str]:
    """Whether pytest fails in ``tree``, and its output."""
    # Into a file: a process left behind by a killed test would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            # One failure is enough.
            [*PYTEST, "-p", "no:rerunfailures", *tests],
            cwd=tree,
            env=environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(PATIENCE)
            verdict: Verdict = {0: "GREEN", 1: "red"}.get(code, "BROKEN")  # type: ignore[assignment]
        except subprocess.TimeoutExpired:
            verdict = "hung"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        output.seek(0)
        return verdict, output.read()


def compile_once(tests: set[str], tree: Path) -> None:
    """Compile the files of ``tree`` once, so that its copies find them compiled.

    Raises:
        SystemExit: A test does not exist, or its file cannot be imported.
    """
    # Also what is imported only later, by a test or a process that it starts.
    for folder in ("django_dlock", "testproject", "tests/support"):
        compileall.compile_dir(tree / folder, quiet=2)
    # The tests themselves are compiled by pytest.
    collected = subprocess.run(
        [*PYTEST, "--collect-only", *sorted(tests)],
        cwd=tree,
        env={**environment(tree), "PYTHONDONTWRITEBYTECODE": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if tests and collected.returncode:
        raise SystemExit(f"{collected.stdout[-3000:]}\nthe mutants' tests cannot be collected")


def imported_from(tree: Path) -> str:
    """The directory from which the tests in ``tree`` would import the package."""
    return subprocess.run(
        [sys.executable, "-c", "import django_dlock; print(django_dlock.__file__)"],
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


def environment(tree: Path) -> dict[str, str]:
    """Use ``tree`` before an installed package, also in processes that the tests start."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
