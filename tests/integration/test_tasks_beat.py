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
from tests.support.workers import PATIENCE, ROOT, Place, Site, eventually

pytestmark = pytest.mark.extended

AHEAD = 2
"""Seconds by which the clock of one of them is ahead."""


class Beat:
    """One ``celery beat``."""

    def __init__(
        self, site: Site, directory: Path, env: dict[str, str], command: list[str] | None = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.log = directory / "log"
        if command is None:
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

    @classmethod
    def locked(cls, site: Site, directory: Path) -> Beat:
        """One that waits for its lock, as in the guide."""
        directory.mkdir(exist_ok=True)
        guide = (ROOT / "docs/howto/one-run-per-tick.md").read_text()
        _, _, sample = guide.partition("```python\n# shop/management/commands/locked_beat.py\n")
        script = sample.partition("```")[0].replace("shop.celery", site.tasks)
        # The app of the tests sets Django up when it is imported.
        script = f"import {site.tasks}\n{script}\nCommand().handle()\n"
        return cls(site, directory, {}, [sys.executable, "-c", script])

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


@pytest.mark.parametrize("task", ["plain", "requeued", "hasty", "unique"])
def test_without_min_hold_a_short_task_runs_once_per_beat(place, task):
    """So the clocks did differ, and both beats did send."""
    assert 2 in runs_per_tick(place, task)


def test_a_record_under_one_key_lets_only_the_first_tick_run(place):
    assert sum(runs_per_tick(place, "recorded")) == 1


def test_the_second_message_of_a_tick_is_never_requeued_to_run_late(site, place):
    assert "is requeued" not in site.workers[0].output


def test_only_one_beat_in_a_lock_publishes_and_another_takes_over(site):
    site.env["TASKS_PLACE"] = str(site.place())
    first = Beat.locked(site, site.directory / "first")
    try:
        eventually(lambda: site.locks.get("celery-beat"), why="the first one begins")
        second = Beat.locked(site, site.directory / "second")
        third = None
        try:
            eventually(lambda: site.locks.get("celery-beat").waiting, why="the second one waits")
            eventually(lambda: first.sent("often") >= 2)
            assert second.log.read_text() == ""
            first.kill()
            eventually(lambda: second.sent("often") >= 2, why="it takes over")
            third = Beat.locked(site, site.directory / "third")
            eventually(lambda: site.locks.get("celery-beat").waiting, why="the third one waits")
            # As if the backend had lost it.
            site.locks.break_("celery-beat", owner=site.locks.get("celery-beat").owner)
            assert second.process.wait(PATIENCE) != 0
            eventually(lambda: third.sent("often"), why="it takes over")
            third.process.terminate()
            assert third.process.wait(PATIENCE) == 0
            assert site.locks.get("celery-beat") is None
        finally:
            second.kill()
            if third:
                third.kill()
    finally:
        first.kill()
