"""``python -m tests.supported``: which versions the tests ran on, for the documentation.

    python -m tests.supported record [arguments of pytest]    run tests, and store the versions
    python -m tests.supported                                 write docs/reference/supported.md

``record`` asks the interpreter, the installed packages and the servers for their versions, and
stores them in ``tests/runs.json`` only if no test failed. The classifiers in ``setup.cfg`` must be
those of the stored runs of a whole level; a test compares them.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import itertools
import json
import os
import platform
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.run import Recorder, repeated

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "tests" / "runs.json"
PAGE = ROOT / "docs" / "reference" / "supported.md"
HEADING = "## What the tests ran on\n"

PACKAGES = {
    "Django": "Django",
    "celery": "Celery",
    "redis": "redis-py",
    "django-redis": "django-redis",
}
"""Distribution → its column."""
SYSTEMS = {"Linux": "POSIX :: Linux", "Darwin": "MacOS"}
"""What ``platform`` calls a system → its classifier."""


class Run(NamedTuple):
    """One run of the tests in which none failed.

    Attributes:
        tests: A level of ``tests/levels.py``, or the files and options that chose the tests.
        packages: Column → version.
        stores: Name and version of each.
        passed: How many tests passed; ``None`` for a run from before this was counted.
        note: What else a reader must know.
    """

    date: str | None
    system: str
    python: str
    packages: Mapping[str, str]
    stores: Sequence[str]
    tests: str
    passed: int | None
    skipped: int | None
    note: str = ""

    @property
    def whole(self) -> bool:
        return self.tests in ("quick", "all")


# -- recording -----------------------------------------------------------------------------


def record(arguments: Sequence[str]) -> int:
    """Run the tests, and store their versions if none failed.

    Returns:
        The exit code of pytest.
    """
    # The tests' own settings must not reach a second run.
    environment, recorder = dict(os.environ), Recorder()
    code = int(pytest.main([*arguments], plugins=[recorder]))
    if code == pytest.ExitCode.TESTS_FAILED and not recorder.why_not_again():
        code = repeated(recorder, environment)
    passed = recorder.passed | recorder.failed.keys()
    if code or not passed:
        print("Not recorded.")
        return code or 1
    run = Run(
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        system=platform.system(),
        python=platform.python_version(),
        packages={
            column: importlib.metadata.version(name)
            for name, column in PACKAGES.items()
            if any(importlib.metadata.distributions(name=name))
        },
        stores=[
            asked() for name, asked in STORES.items() if any(ran_on(name, test) for test in passed)
        ],
        tests=chosen(arguments),
        passed=len(passed),
        skipped=len(recorder.skipped),
    )
    # A later run of the same tests on the same versions replaces the earlier one.
    kept = [old for old in runs() if what_ran(old) != what_ran(run)]
    written = [each._asdict() for each in [*kept, run]]
    RUNS.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    print(f"Recorded in {RUNS}: {run}")
    return 0


def chosen(arguments: Sequence[str]) -> str:
    """The level, or what else the arguments say about which tests run."""
    level, rest = "all", []
    words = iter(arguments)
    for word in words:
        name, _, value = word.partition("=")
        if name == "--level":
            level = value or next(words)
        elif name in ("-n", "--dist", "--timeout", "-p"):
            value or next(words)
        elif name not in ("-q", "-v", "--no-loadscope-reorder"):
            rest.append(word)
    # These tests are the same on all versions.
    if rest == ["-m", "not project"]:
        rest = []
    return " ".join(rest) or level


def ran_on(store: str, test: str) -> bool:
    """Whether a test that passed had this store, which its parameters or its file tell."""
    name = store.removesuffix("QL")
    found = re.search(rf"\[[^]]*{name}|^tests/backends/test_{name}", test, re.IGNORECASE)
    # Unit tests start no server; the project of all tests keeps its rows in SQLite.
    return (bool(found) and not test.startswith("tests/unit/")) or store == "SQLite"


def _postgresql() -> str:
    import psycopg

    from tests.support import postgres

    with postgres.database() as url, psycopg.connect(url) as connection:
        version = connection.info.parameter_status("server_version") or ""
        return f"PostgreSQL {version.split()[0]}"


def _mariadb() -> str:
    import django
    from django.conf import settings

    from tests.support import databases, mariadb

    if not settings.configured:
        settings.configure()
        django.setup()
    with mariadb.database() as url, databases.added("mariadb", mariadb.settings_for(url)) as alias:
        from django.db import connections

        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT version()")
            version, _, kind = str(cursor.fetchone()[0]).partition("-")
            return f"{'MariaDB' if kind.startswith('MariaDB') else 'MySQL'} {version}"


def _redis() -> str:
    import redis

    from testproject.servers import RedisServer

    server = RedisServer().start()
    try:
        with redis.Redis.from_url(server.url) as client:
            about: Any = client.info("server")
            valkey = about.get("valkey_version")
            return f"Valkey {valkey}" if valkey else f"Redis {about['redis_version']}"
    finally:
        server.stop()


def _etcd() -> str:
    # Here, because it chooses Django's settings, which pytest must find unchosen.
    from tests.support.etcd import EtcdServer

    server = EtcdServer()
    server.start()
    try:
        return f"etcd {server.call('maintenance/status')['version']}"
    finally:
        server.stop()


def _zookeeper() -> str:
    from tests.support.zookeeper import ZooKeeperServer

    server = ZooKeeperServer()
    server.start()
    try:
        # "Zookeeper version: 3.8.0-5a02a05eddb59aee6ac762f7ea82e92a68eb9c0f, built on …"
        return f"ZooKeeper {re.split('[:-]', server.ask('srvr'))[1].strip()}"
    finally:
        server.stop()


STORES: dict[str, Callable[[], str]] = {
    "SQLite": lambda: f"SQLite {sqlite3.sqlite_version}",
    "Redis": _redis,
    "PostgreSQL": _postgresql,
    "MariaDB": _mariadb,
    "etcd": _etcd,
    "ZooKeeper": _zookeeper,
}
"""Store → asks a running server what it is."""


def what_ran(run: Run) -> Collection[object]:
    return run.system, run.python, sorted(run.packages.items()), run.tests


# -- the page ------------------------------------------------------------------------------


def runs() -> list[Run]:
    return [Run(**each) for each in json.loads(RUNS.read_text())]


def earned() -> set[str]:
    """The classifiers that the stored runs of a whole level allow."""
    found = set()
    for run in filter(lambda run: run.whole, runs()):
        found.add(f"Operating System :: {SYSTEMS[run.system]}")
        found.add(f"Programming Language :: Python :: {minor(run.python)}")
        found.add(f"Framework :: Django :: {minor(run.packages['Django'])}")
    return found


def claimed() -> set[str]:
    """The classifiers of ``setup.cfg`` that name a system or a version."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = (
        r"Operating System :: .*|(Programming Language :: Python|Framework :: Django) :: \d\.\d+"
    )
    listed = setup["metadata"]["classifiers"].split("\n")
    return {each for each in listed if re.fullmatch(named, each)}


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def environments() -> list[str]:
    """The environments of ``tox.ini`` that choose versions."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    found = []
    for line in tox["tox"]["env_list"].split():
        parts = re.split(r"\{([\d,]+)\}", line)
        choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
        found += ["".join(each) for each in itertools.product(*choices)]
    return [each for each in found if each.startswith("py")]


def factors(run: Run) -> set[str]:
    """What ``tox.ini`` calls the versions of a run."""
    versions = {
        "py": run.python,
        "django": run.packages["Django"],
        "celery": run.packages["Celery"],
    }
    return {name + minor(version).replace(".", "") for name, version in versions.items()}


def not_run() -> list[str]:
    """The environments of ``tox.ini`` with versions on which no stored run of a whole level was."""
    whole = [factors(run) for run in runs() if run.whole]
    asked = [(each, set(each.split("-")[:3])) for each in environments()]
    return [each for each, versions in asked if not any(versions <= run for run in whole)]


def section() -> str:
    """What the page says below its heading."""
    table = [
        f"| Python | {' | '.join(PACKAGES.values())} | stores | tests |",
        f"| --- |{' --- |' * (len(PACKAGES) + 2)}",
    ]
    for run in sorted(runs(), key=lambda run: [int(part) for part in run.python.split(".")]):
        packages = [run.packages.get(column, "–") for column in PACKAGES.values()]
        passed = "" if run.passed is None else f": {run.passed} passed, {run.skipped} skipped"
        note = f"; {run.note}" if run.note else ""
        tests = f"`{run.tests}`" if not run.whole else run.tests
        cells = [
            f"{run.python}, {run.system}",
            *packages,
            ", ".join(run.stores),
            f"{tests}{passed}{note}",
        ]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            "",
            "A line stands for one run in which no test failed.",
            "`quick` is what `make test` runs, `all` what `make test-all` runs.",
            "The classifiers of the package name the versions of these two kinds of lines.",
            "",
            *table,
            "",
            "`tox.ini` also names these, on which no whole run is recorded:",
            f"{', '.join(f'`{each}`' for each in not_run())}.",
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["record"]:
        return record(arguments[1:])
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(before + HEADING + section())
    print(f"Written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
