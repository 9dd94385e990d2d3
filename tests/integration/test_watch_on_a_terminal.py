"""``list_locks --watch`` as an operator starts it: on a terminal, and before a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_dlock import Lock
from django_dlock.management.screen import CLOSE, HOME, OPEN
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured

ROOT = Path(__file__).resolve().parents[2]
MANAGE = [sys.executable, str(ROOT / "manage.py"), "list_locks", "--using", "default"]

CONTROLLED = """
import os, signal, sys
# A shell starts what runs in the background with this signal ignored.
signal.signal(signal.SIGINT, signal.SIG_DFL)
# The first terminal that a session opens controls it, so that Ctrl-C becomes a signal.
os.close(os.open(os.ttyname(0), os.O_RDWR))
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment(server: RedisServer) -> dict[str, str]:
    return {
        **os.environ,
        "REDIS_URL": server.url,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
        "LINES": "20",
    }


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._mine, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, pattern: str, patience: float = 20.0) -> None:
        """Read until the last whole picture has the pattern."""
        ends = time.monotonic() + patience
        while not re.search(pattern, self.text.split(HOME)[-1], re.DOTALL):
            assert time.monotonic() < ends, f"never shown: {pattern}\n{self.text[-2000:]}"
            self._read(0.2)

    def _read(self, timeout: float) -> bool:
        if not select.select([self._mine], [], [], timeout)[0]:
            return True
        try:
            data = os.read(self._mine, 65536)
        except OSError:
            return False
        self.text += data.decode()
        return bool(data)

    def type(self, keys: bytes) -> None:
        os.write(self._mine, keys)

    def end(self) -> int:
        """Its exit code; reads what is left."""
        ends = time.monotonic() + 20
        while self._read(0.2) and time.monotonic() < ends:
            if self.process.poll() is not None and not select.select([self._mine], [], [], 0)[0]:
                break
        return self.process.wait(10)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._mine)


@pytest.fixture
def watched(own_redis: RedisServer) -> Iterator[Terminal]:
    terminal = Terminal([*MANAGE, "--watch", "0.2"], environment(own_redis))
    yield terminal
    terminal.close()


def test_a_watch_goes_on_while_redis_is_away_and_ends_with_ctrl_c(
    own_redis: RedisServer, watched: Terminal
) -> None:
    with configured({"default": alias(own_redis.url, TTL=60.0)}):
        watched.read_until("No lock is held")
        assert watched.text.startswith(OPEN)
        with Lock("order:1"):
            watched.read_until("1 lock at .*order:1")
        watched.read_until("No lock is held")
        own_redis.kill()
        watched.read_until("DOWN: alias 'default' since .*\r\n.*No answer")
        own_redis.restart()
        watched.read_until("No lock is held")
        with Lock("order:2"):
            watched.read_until("order:2")
    watched.type(b"\x03")
    assert watched.end() == 0
    assert watched.text.rstrip().endswith(CLOSE)
    assert "Traceback" not in watched.text


def test_a_paused_redis_is_shown_as_down(own_redis: RedisServer, watched: Terminal) -> None:
    watched.read_until("No lock is held")
    own_redis.pause()
    watched.read_until("DOWN: alias 'default'")
    watched.type(b"\x03")
    assert watched.end() == 0
    own_redis.resume()


def test_a_watch_that_is_terminated_gives_the_terminal_back(watched: Terminal) -> None:
    watched.read_until("No lock is held")
    watched.process.send_signal(signal.SIGTERM)
    assert watched.end() == 128 + signal.SIGTERM
    assert watched.text.rstrip().endswith(CLOSE)


def test_a_pipe_that_is_closed_ends_the_watch_without_an_error(own_redis: RedisServer) -> None:
    process = subprocess.Popen(
        [*MANAGE, "--watch", "0.1", "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(own_redis),
        text=True,
    )
    assert process.stdout
    assert process.stderr
    with process.stdout, process.stderr:
        assert json.loads(process.stdout.readline()) == []
        assert json.loads(process.stdout.readline()) == []
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
