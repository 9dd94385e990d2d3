"""Breaks one mechanism per guarantee and checks that the guarantee's tests notice.

    python -m tests.mutants [--list] [--jobs N] [G1 … | NAME …]

The head of each patch, such as ``g05/own_grant_unknown.patch``, says which guarantee it breaks,
how, and which tests must then fail. The patch is applied to a copy of the working tree; the tree
itself stays unchanged. The exit code is 0 only if every mutant went red.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q")
PATIENCE = 75.0
"""Seconds for the tests of one mutant; a mutant may hang."""
LEFT_OUT = (
    *(".*", "__pycache__", "*.egg-info", "*.sqlite3*"),
    *("_build", "build", "carried", "dist", "node_modules", "venv"),
)

Verdict = Literal["red", "red alone", "hung", "GREEN", "BROKEN"]
GOOD: tuple[Verdict, ...] = ("red", "red alone", "hung")


@dataclass(frozen=True)
class Mutant:
    """One patch and the contents of its head."""

    patch: Path
    guarantee: str
    what: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, patch: Path) -> Mutant:
        head = patch.read_text().split("\n--- ", 1)[0].split("\ndiff ", 1)[0]
        fields = dict(re.findall(r"^(Guarantee|Breaks): (.+)$", head, re.MULTILINE))
        tests = re.findall(r"^Test: (\S+)$", head, re.MULTILINE)
        if set(fields) != {"Guarantee", "Breaks"} or not tests:
            raise SystemExit(f"{patch.name}: its head must say Guarantee:, Breaks: and Test:")
        return cls(patch, fields["Guarantee"], fields["Breaks"], tuple(tests))

    def answers_to(self, word: str) -> bool:
        """Whether ``word`` is its guarantee, or a part of its name."""
        return word.upper() == self.guarantee or (
            word.upper() not in ("COST", *(f"G{number}" for number in range(1, 16)))
            and word in self.patch.stem
        )


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    verdict: Verdict
    seconds: float
    output: str


def run(mutant: Mutant, tree: Path) -> Result:
    """Apply the patch to a copy of ``tree`` and run its tests there."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dlock-mutant-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(tree, copy)
        applied = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", str(mutant.patch)],
            cwd=copy,
            # Do not treat it as part of a repository above the directory.
            env={**os.environ, "GIT_CEILING_DIRECTORIES": directory},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if applied.returncode:
            return Result(mutant, "BROKEN", time.monotonic() - started, applied.stdout)
        verdict, output = tested(mutant.tests, copy)
        return Result(mutant, verdict, time.monotonic() - started, output)


def tested(tests: Sequence[str], tree: Path) -> tuple[Verdict, str]:
    """Whether pytest fails in ``tree``, and its output."""
    # Into a file: a process left behind by a killed test would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            # One failure is enough.
            [*PYTEST, "-p", "no:cacheprovider", "-p", "no:rerunfailures", *tests],
            cwd=tree,
            # Use this tree before an installed django_dlock, also in processes that the tests
            # start.
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
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
    collected = subprocess.run(
        [*PYTEST, "-p", "no:cacheprovider", "--collect-only", *sorted(tests)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if collected.returncode:
        raise SystemExit(f"{collected.stdout[-3000:]}\nthe mutants' tests cannot be collected")


def imported_from(tree: Path) -> str:
    """The directory from which the tests in ``tree`` would import the package."""
    return subprocess.run(
        [sys.executable, "-c", "import django_dlock; print(django_dlock.__file__)"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "wanted",
        nargs="*",
        metavar="G1|NAME",
        help="only those of a guarantee, or with this in their name (default: all)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    options = parser.parse_args(arguments)
    # New mutants may be tried first as plain files beside this one.
    patches = sorted([*HERE.glob("*/*.patch"), *HERE.glob("*.patch")])
    mutants = [Mutant.read(patch) for patch in patches]
    for word in options.wanted:
        if not any(mutant.answers_to(word) for mutant in mutants):
            parser.error(f"no mutant of {word}")
    mutants = [
        mutant
        for mutant in mutants
        if not options.wanted or any(mutant.answers_to(word) for word in options.wanted)
    ]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.guarantee:<4} {mutant.what}")
            print(*(f"       {test}" for test in mutant.tests), sep="\n")
        return 0
    results = run_all(mutants, options.jobs)
    show(results)
    return 0 if all(result.verdict in GOOD for result in results) else 1


def run_all(mutants: Sequence[Mutant], jobs: int) -> list[Result]:
    mouth, done = threading.Lock(), 0
    with tempfile.TemporaryDirectory(prefix="dlock-mutants-") as directory:
        # Later edits of the tree change nothing.
        tree = Path(directory) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        place = imported_from(tree)
        if not place.startswith(str(tree)):
            raise SystemExit(f"the copy's tests would import {place}, not the copy")
        compile_once({test for mutant in mutants for test in mutant.tests}, tree)

        def one(mutant: Mutant) -> Result:
            nonlocal done
            result = run(mutant, tree)
            with mouth:
                done += 1
                print(
                    f"[{done}/{len(mutants)}] {mutant.guarantee} {mutant.patch.stem}: "
                    f"{result.verdict} ({result.seconds:.0f} s)",
                    flush=True,
                )
                if result.verdict not in GOOD:
                    print(result.output[-3000:], flush=True)
            return result

        with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            results = list(pool.map(one, mutants))
        # On a busy machine, a test of a race may miss its mutant, so it runs again alone.
        return [alone(result, tree) if result.verdict == "GREEN" else result for result in results]


def alone(result: Result, tree: Path) -> Result:
    """The mutant's second try, with nothing beside it."""
    again = run(result.mutant, tree)
    print(f"{result.mutant.patch.stem}, alone: {again.verdict} ({again.seconds:.0f} s)", flush=True)
    return replace(again, verdict="red alone") if again.verdict in GOOD else again


def show(results: Sequence[Result]) -> None:
    print("\nguarantee  taken out                                                       went")
    print("---------  --------------------------------------------------------------  ------")
    for result in results:
        print(f"{result.mutant.guarantee:<9}  {result.mutant.what:<62}  {result.verdict}")
    unnoticed = [result for result in results if result.verdict not in GOOD]
    print(f"\n{len(results) - len(unnoticed)} of {len(results)} mutants went red")
    # By name at the very end, where a reader of a long log looks.
    for result in unnoticed:
        patch = result.mutant.patch
        print(f"not noticed: {patch.parent.name}/{patch.name} ({result.verdict})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
