"""The steps of the guide to deploys, with a real worker."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.workers import PATIENCE, ROOT, Site, eventually, result

pytestmark = pytest.mark.extended

GUIDE = Path(ROOT, "docs", "howto", "deploy.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        with RedisServer() as redis, Site(redis, tmp_path_factory.mktemp("deploy")) as site:
            yield site
    except ServerNotFound as error:
        missing(str(error))


def commands(program: str) -> list[str]:
    """The guide's commands that begin with ``program``, in their order."""
    return re.findall(rf"^ *\$ {program} (.*)$", GUIDE.read_text(), re.MULTILINE)


def run(site: Site, module: str, command: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *module.split(),
            *command.replace("-A shop", f"-A {site.tasks}").split(),
        ],
        cwd=ROOT,
        env=site.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_worker_is_drained_and_stopped_and_leaves_no_lock(site, place, order):
    drain, active = commands("celery")
    assert "cancel_consumer" in drain
    worker = site.worker("prefork", 1)
    running = site.send("charge", order, str(place), "go")
    place.wait(f"began-{order}")
    assert "OK" in run(site, "celery", drain)
    assert f"{running.id}" in run(site, "celery", active)
    # The worker takes no further message.
    site.send("charge", order + 1, str(place))
    place.open("go")
    assert result(running) == 1
    eventually(lambda: running.id not in run(site, "celery", active))
    worker.process.terminate()
    assert worker.process.wait(timeout=PATIENCE) == 0
    assert site.effects(order + 1) == 0
    assert site.lease(order) is None
    for command in commands("python manage.py"):
        run(site, "django", command)
    # The next worker finds the message.
    site.worker("prefork", 1)
    eventually(lambda: site.effects(order + 1) == 1)
