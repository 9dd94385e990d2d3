"""Which tests belong to ``make test``, ``make test-all`` and ``make nightly``.

Levels: ``quick`` is what ``make test`` runs, ``rest`` what ``make test-all`` adds, ``all`` is both,
and ``nightly`` is what ``make nightly`` adds.

A test has the level ``rest`` if it is in one of ``FOLDERS``, if it needs a server besides Redis or
a browser, which its fixtures and parameters tell, or if it has the mark ``extended``. A file of
these folders with the mark ``quick`` runs in ``make test``, except its tests that need another
server. The mark ``nightly`` is for tests that take minutes, and for those whose subject is real
time, which a busy machine can upset.
"""

from __future__ import annotations

import re

import pytest

LEVELS = ("quick", "rest", "all", "nightly")

NEED_SERVERS = {
    "browser",
    "etcd_server",
    "mariadb_url",
    "own_etcd",
    "pooler",
    "postgres_url",
    "rabbit_server",
    "zookeeper_server",
}
"""Fixtures that start more than a Redis."""
NAMES_SERVER = re.compile(r"\[.*(etcd|mariadb|mysqlclient|pooled|postgres|rabbit|zookeeper)")
"""Parameters for which a fixture starts one, as they stand in the names of the tests."""
FOLDERS = ("tests/backends/", "tests/browser/", "tests/faults/")
ORDER = ("tests/faults/", "tests/integration/", "tests/browser/", "tests/backends/")
"""The folders whose files take longest come first, so that none is left for the end alone."""


def level_of(item: pytest.Item) -> str:
    """``quick``, which ``make test`` runs; ``rest``, which ``make test-all`` adds; ``nightly``."""
    if item.get_closest_marker("nightly"):
        return "nightly"
    if (
        item.get_closest_marker("extended")
        or NEED_SERVERS.intersection(getattr(item, "fixturenames", ()))
        or (NAMES_SERVER.search(item.name) and item.nodeid.startswith(ORDER))
        or (item.nodeid.startswith(FOLDERS) and not item.get_closest_marker("quick"))
    ):
        return "rest"
    return "quick"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--level",
        choices=LEVELS,
        default="all",
        help="quick: what make test runs; all: what make test-all runs; rest: all but quick; "
        "nightly: only what make nightly adds. Tests whose files are named run at every level.",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    if _names_files(config):
        return
    wanted = config.getoption("--level")
    levels = {"quick", "rest"} if wanted == "all" else {wanted}
    kept = [item for item in items if level_of(item) in levels]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def _names_files(config: pytest.Config) -> bool:
    """Whether the tests were chosen by file, and not by folder."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return False
    paths = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return all(path.is_file() for path in paths)


def pytest_report_header(config: pytest.Config) -> str:
    return "" if _names_files(config) else f"level: {config.getoption('--level')}"


def _place(item: pytest.Item) -> int:
    folders = [item.nodeid.startswith(folder) for folder in ORDER]
    return folders.index(True) if any(folders) else len(ORDER)
