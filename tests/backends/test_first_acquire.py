"""A first acquire, during which another thread may fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("store", ["redis", "sqlite"])
def test_g8_the_first_acquire_imports_nothing(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # A child that is forked while another thread imports a module waits for that module for ever.
    project = tmp_path / "project.sqlite3"
    project.touch()
    command = [sys.executable, "-m", "tests.support.first_acquire", str(project)]
    if store == "redis":
        # By name, as most projects do.
        url = request.getfixturevalue("redis_server").url
        command.append(url.replace("127.0.0.1", "localhost"))
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["imported:"]
