"""``python -m tests.celery_own``: which of Celery's own tests differ under a lock and a record.

Takes ``t/integration`` from the source distribution of the installed Celery and runs it three times
with its own servers: unchanged, with the lock alone, and with a record per task id. A test that
passes unchanged must also pass with django-dlock, or be listed in ``explained`` with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import celery

from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer

from .explained import HOWS, LEFT_OUT, explanation

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "plain"
NEEDED = ("cryptography", "pydantic", "sqlalchemy")
"""Packages that the tests import besides Celery; installed only for them."""
AGAIN = 3
"""How often a failed test is repeated alone; Celery itself repeats five times."""

Outcomes = Mapping[str, str]

OK, TESTS_FAILED, NO_TESTS = 0, 1, 5
"""Exit codes of pytest after a complete run."""


class PartDied(Exception):
    """Pytest did not finish its run."""


@dataclass(frozen=True)
class Bench:
    """The directory and the servers for the tests."""

    directory: Path
    sources: Path
    broker: str


@dataclass(frozen=True)
class Portion:
    """A part of the tests, run in one process with its own servers."""

    how: str
    part: str
    tests: tuple[str, ...] = ()
    again: bool = False

    def __str__(self) -> str:
        again = "again-" if self.again else ""
        return f"{self.how}-{again}{self.part.replace('/', 'of')}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.celery_own", description=__doc__)
    parser.add_argument("--how", choices=HOWS, action="append", help="only these, and plain")
    parser.add_argument("--parts", type=int, default=2, help="of each of the three runs")
    parser.add_argument("--part", help="only this one: a number from 1, or apart")
    parser.add_argument("--jobs", type=int, default=6, help="parts that run at the same time")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "celery-own")
    parser.add_argument("--broker", choices=("rabbitmq", "redis"), default="redis")
    parser.add_argument("tests", nargs="*", help="arguments of pytest, after --; default: all")
    options = parser.parse_args(arguments)
    directory: Path = options.directory.resolve()
    bench = Bench(directory, fetched(directory), options.broker)
    parts = ["apart", *(f"{number}/{options.parts}" for number in range(1, options.parts + 1))]
    if options.part:
        parts = [part for part in parts if part.split("/")[0] == options.part]
    hows = (PLAIN, *(options.how or HOWS))
    portions = [Portion(how, part, tuple(options.tests)) for part in parts for how in hows]
    outcomes = run_all(bench, portions, options.jobs)
    unsteady = repeat(bench, outcomes, options.jobs)
    return report(outcomes, unsteady)


def fetched(directory: Path) -> Path:
    """The tests of the installed version, without the copy of Celery beside them."""
    version = celery.__version__
    sources = directory / f"celery-{version}"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not sources.exists():
        download = ["download", "--no-binary", ":all:", "--no-deps", f"celery=={version}"]
        subprocess.run([*pip, *download, "-d", str(directory)], check=True)
        with tarfile.open(directory / f"celery-{version}.tar.gz") as archive:
            inside = [
                member
                for member in archive.getmembers()
                if member.name.split("/")[1:2] in (["t"], ["pyproject.toml"])
            ]
            # Python 3.11.2, which Debian 12 has, does not know the filter.
            filtered: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(directory, inside, **filtered)
    site = directory / "site"
    missing = [name for name in NEEDED if not (site / name).exists()]
    if missing:
        subprocess.run([*pip, "install", "--upgrade", "--target", str(site), *missing], check=True)
    return sources


def run_all(bench: Bench, portions: Sequence[Portion], jobs: int) -> dict[str, dict[str, str]]:
    """Run the portions, some at the same time; return each test's outcome for each way."""
    outcomes: dict[str, dict[str, str]] = {portion.how: {} for portion in portions}
    died: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        began = time.monotonic()
        running = {pool.submit(run, bench, portion): portion for portion in portions}
        for future in as_completed(running):
            portion = running[future]
            try:
                found = future.result()
            except PartDied as error:
                died.append(str(error))
                print(error, flush=True)
                continue
            outcomes[portion.how].update(found)
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:5.1f} min  {portion}: {summary(found)}", flush=True)
    if died:
        # Tests that did not run must not count as tests without differences.
        raise SystemExit("\n".join(died))
    return outcomes


def run(bench: Bench, portion: Portion) -> dict[str, str]:
    """Run one portion; return the outcome of each of its tests."""
    directory = bench.directory
    results, database = directory / f"{portion}.jsonl", directory / f"{portion}.sqlite3"
    results.unlink(missing_ok=True)
    for file in directory.glob(f"{database.name}*"):
        file.unlink()
    with ExitStack() as servers:
        redis = servers.enter_context(RedisServer())
        url = redis.url
        if bench.broker == "rabbitmq":
            url = servers.enter_context(RabbitServer()).url
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, bench.sources, directory / "site"))),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "WORKER_LOGLEVEL": "INFO",
            "DJANGO_SETTINGS_MODULE": "tests.celery_own.settings",
            "DLOCK_DB": str(database),
            "REDIS_URL": redis.url,
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(redis.port),
            "TEST_BROKER": url,
            "TEST_BACKEND": redis.url,
            "CELERY_OWN": portion.how,
            "CELERY_OWN_PART": "" if portion.again else portion.part,
            "CELERY_OWN_RERUNS": str(AGAIN if portion.again else 1),
            "CELERY_OWN_RESULTS": str(results),
        }
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:django", "-p", "no:xdist"]
        command += ["-p", "celery.contrib.pytest", "-p", "tests.celery_own.plugin"]
        command += ["--timeout", "300", "--durations", "20"]
        command += [f"--ignore={path}" for path in LEFT_OUT]
        command += portion.tests or ["t/integration"]
        with (directory / f"{portion}.log").open("wb") as log:
            ended = subprocess.run(
                command,
                cwd=bench.sources,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
    found = {}
    if results.exists():
        for line in results.read_text().splitlines():
            entry = json.loads(line)
            found[entry["test"]] = entry["outcome"]
    if ended.returncode not in (OK, TESTS_FAILED, NO_TESTS):
        raise PartDied(
            f"{portion} ended with {ended.returncode}; see {directory / str(portion)}.log"
        )
    return found


def repeat(
    bench: Bench, outcomes: Mapping[str, dict[str, str]], jobs: int
) -> list[tuple[str, str]]:
    """Run failed tests again, one by one; return those that then pass, with the way they ran.

    On a busy machine, tests that wait for a second fail, and a failed test disturbs the next one.
    """
    plain = outcomes[PLAIN]
    portions = []
    for how, found in outcomes.items():
        failed = [test for test in plain if found.get(test) not in ("passed", "skipped")]
        if how != PLAIN:
            failed = [
                test for test in failed if plain[test] != "skipped" and not explanation(how, test)
            ]
        if failed:
            print(f"{how}: {len(failed)} again, one by one", flush=True)
        portions += [
            Portion(how, str(number), (test,), again=True) for number, test in enumerate(failed, 1)
        ]
    if not portions:
        return []
    unsteady = []
    for how, found in run_all(bench, portions, min(jobs, 2)).items():
        for test, outcome in found.items():
            if outcome == "passed":
                unsteady.append((how, test))
            outcomes[how][test] = outcome
    return unsteady


def summary(outcomes: Outcomes) -> str:
    kinds = sorted(set(outcomes.values()))
    return ", ".join(f"{list(outcomes.values()).count(kind)} {kind}" for kind in kinds)


def report(outcomes: Mapping[str, Outcomes], unsteady: Sequence[tuple[str, str]] = ()) -> int:
    """Print the differences and the table; return 1 if something is not explained."""
    plain = outcomes[PLAIN]
    passed = [test for test, outcome in sorted(plain.items()) if outcome == "passed"]
    for test, outcome in sorted(plain.items()):
        if outcome not in ("passed", "skipped"):
            print(f"{PLAIN}: {test} {outcome}; not counted")
    for how, test in sorted(unsteady):
        print(f"{how}: {test} failed, and passed when it was run again alone")
    rows, all_unexplained = [], 0
    for how in (how for how in outcomes if how != PLAIN):
        explained = unexplained = 0
        for test in passed:
            why, outcome = explanation(how, test), outcomes[how].get(test, "missing")
            if outcome != "passed":
                print(f"{how}: {test} {outcome}; {why or 'NOT EXPLAINED'}")
                explained += bool(why)
                unexplained += not why
            elif why:
                print(f"{how}: {test} passes, though it is explained why not: {why}")
        rows.append((how, explained + unexplained, explained, unexplained))
        all_unexplained += unexplained
    for path, why in LEFT_OUT.items():
        print(f"left out: {path}: {why}")
    print(f"\n{len(plain)} tests: {summary(plain)} as they are")
    print(f"{'':8}{'differ':>12}{'explained':>12}{'unexplained':>12}")
    for how, *counts in rows:
        print(f"{how:8}" + "".join(f"{count:12}" for count in counts))
    if not passed:
        print("Nothing passes even without ours; see the logs")
    return 1 if all_unexplained or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
