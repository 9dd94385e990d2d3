"""Processes that are killed in the middle of an idempotent view, behind a real server."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

KILLED = "killed"


class Site:
    """The site in ``tests/support/dying_site.py``."""

    def __init__(self, port: int, file: Path) -> None:
        self._port, self._dies = port, Path(f"{file}.dies")

    def kills(self, yes: bool) -> None:
        """Whether its views kill their process."""
        self._dies.touch() if yes else self._dies.unlink()

    def post(self, path: str) -> int | str:
        """The status of the answer, or ``KILLED`` if there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("POST", path, b"{}", {"Idempotency-Key": "k"})
            return connection.getresponse().status
        except (http.client.RemoteDisconnected, ConnectionResetError):
            return KILLED
        finally:
            connection.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    file = tmp_path_factory.mktemp("site") / "project.sqlite3"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.dying_site", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            yield Site(int(server.stdout.readline()), file)
        finally:
            server.kill()


@pytest.mark.parametrize("view", ["pay", "apay"])
def test_a_view_that_kills_its_process_runs_no_more_until_an_operator_acts(
    site: Site, view: str
) -> None:
    site.kills(True)
    assert [site.post(f"/{view}") for _ in range(5)] == [KILLED] * 5
    # Also when it would not die any more: nobody knows what it has done so far.
    assert site.post(f"/{view}") == 500
    site.kills(False)
    assert [site.post(f"/{view}") for _ in range(3)] == [500] * 3
    assert site.post(f"/forget/{view}") == 200
    assert [site.post(f"/{view}") for _ in range(2)] == [201, 201]
