"""Two ``celery beat`` with one schedule, whose clocks differ: one run per tick."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.faketime import LIBRARY, clock_ahead, library
from tests.support.tasks_beat import INTERVAL
from tests.support.workers import ROOT, Place, Site, eventually

pytestmark = pytest.mark.extended

AHEAD = 2
"""Seconds by which the clock of one of them is ahead."""


class Beat:
    """One ``celery beat``."""

    def __init__(self, site: Site, directory: Path, env: dict[str, str]) -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "log"
        command = [sys.executable, "-m", "celery", "-A", site.tasks, "beat", "-l", "INFO"]
        command += ["--pidfile", "", "-s", str(directory / "schedule")]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**site.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def sent(self, task: str) -> int:
        return self.log.read_text(errors="replace").count(f"Sending due task {task} ")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        with (
            RedisServer() as redis,
            Site(redis, tmp_path_factory.mktemp("beat"), tasks="tests.support.tasks_beat") as site,
        ):
            yield site
            for worker in site.workers:
                worker.kill()
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture(scope="module")
def place(site: Site) -> Place:
    """What the tasks noted while both beats ran for some ticks, and then the slower one alone."""
    preload = library()
    if preload is None:
        missing(f"libfaketime is not installed: there is no {LIBRARY}")
    place = site.place()
    site.env["TASKS_PLACE"] = str(place)
    site.worker("threads", 10)
    slow = Beat(site, site.directory / "slow", {})
    fast = Beat(site, site.directory / "fast", clock_ahead(preload, AHEAD))
    try:
        eventually(lambda: min(fast.sent("short"), slow.sent("short")) >= 2)
        fast.kill()
        before = slow.sent("short")
        # The first tick may be the one that the other beat has already sent.
        eventually(lambda: slow.sent("short") >= before + 3)
    finally:
        fast.kill()
        slow.kill()
    eventually(lambda: nothing_waits(site, place), why="only long ones still run")
    return place


def nothing_waits(site: Site, place: Place) -> bool:
    running = len(place.lines("began-long")) - len(place.lines("ended-long"))
    with site.app.connection_for_read() as connection:
        client = connection.default_channel.client
        return (client.llen("celery"), client.hlen("unacked")) == (0, running)


def runs_per_tick(place: Place, task: str) -> list[int]:
    """How often the task began in each tick of the faster clock, in order."""
    began = [float(line) for line in place.lines(f"began-{task}")]
    found = collections.Counter(int((moment + AHEAD) // INTERVAL) for moment in began)
    return [found[tick] for tick in range(min(found), max(found) + 1)]


def test_skip_and_min_hold_give_one_run_per_tick(place):
    """While both beats send, and after the faster one has died."""
    found = runs_per_tick(place, "short")
    assert len(found) >= 4
    assert set(found) == {1}


def test_a_run_longer_than_the_interval_skips_ticks_and_doubles_none(place):
    found = runs_per_tick(place, "long")
    assert sum(found) >= 2
    assert 0 in found
    assert max(found) == 1
    began, ended = place.lines("began-long"), place.lines("ended-long")
    assert all(float(end) < float(begin) for end, begin in zip(ended, began[1:], strict=False))


def test_without_min_hold_a_short_task_runs_once_per_beat(place):
    """So the clocks did differ, and both beats did send."""
    assert 2 in runs_per_tick(place, "hasty")


def test_the_second_message_of_a_tick_is_never_requeued_to_run_late(site, place):
    assert "is requeued" not in site.workers[0].output
