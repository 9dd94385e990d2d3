"""Commands as scripts and operators start them: on pipes that end, and without every character."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from django_dlock import locks
from django_dlock.lease import Lease, LeaseRequest
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured

ROOT = Path(__file__).resolve().parents[2]
MANAGE = [sys.executable, str(ROOT / "manage.py")]
NAME = "café:€:🦊"
ASCII = {"PYTHONIOENCODING": "ascii"}
LATIN_1 = {"PYTHONIOENCODING": "latin-1"}
LOCALE_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def environment(redis: RedisServer, **more: str) -> dict[str, str]:
    changed = {"PYTHONIOENCODING", "PYTHONUNBUFFERED", "COLUMNS"}
    env = {key: value for key, value in os.environ.items() if key not in changed}
    database = str(redis.directory / "empty.sqlite3")
    return {**env, "REDIS_URL": redis.url, "DLOCK_DB": database, **more}


def hold(*names: str) -> None:
    backend = locks["default"]
    for name in names:
        request = LeaseRequest(name=name, owner=f"owner of {name}", ttl=60)
        assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)


@pytest.fixture
def redis(own_redis: RedisServer) -> Iterator[RedisServer]:
    """Also that of ``locks`` in this process."""
    with configured({"default": alias(own_redis.url)}):
        yield own_redis


def run(
    redis: RedisServer,
    *arguments: str,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
    **env: str,
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*MANAGE, *arguments],
        env=environment(redis, **env),
        stdout=stdout,
        stderr=stderr,
        timeout=60,
        check=False,
    )


def on_a_terminal(redis: RedisServer, *arguments: str, **env: str) -> tuple[int, bytes]:
    """Exit code, and what the terminal shows."""
    mine, theirs = pty.openpty()
    env["COLUMNS"] = "60"
    process = subprocess.Popen(
        [*MANAGE, *arguments], stdout=theirs, stderr=theirs, env=environment(redis, **env)
    )
    os.close(theirs)
    shown = b""
    # At the end of the other side, this raises.
    with contextlib.suppress(OSError):
        while data := os.read(mine, 65536):
            shown += data
    os.close(mine)
    return process.wait(60), shown


# -- encodings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(ASCII, id="ascii", marks=pytest.mark.nightly),
        pytest.param(LATIN_1, id="latin-1", marks=pytest.mark.nightly),
        pytest.param(LOCALE_C, id="C"),
    ],
)
def test_a_name_that_cannot_be_encoded_is_escaped(redis: RedisServer, env: dict[str, str]) -> None:
    hold(NAME)
    encoding = env.get("PYTHONIOENCODING", "ascii")
    escaped = NAME.encode(encoding, "backslashreplace")
    told = run(redis, "list_locks", **env)
    assert (told.returncode, told.stderr) == (0, b"")
    head, line = told.stdout.splitlines()
    assert line.startswith(escaped + b"  ")
    assert head.index(b"STATE") == len(escaped) + 2
    told = run(redis, "clear_stale_locks", "--force", "--name", "*", "--format", "json", **env)
    # After it, there is an error: the database of lock events has no tables.
    assert json.loads(told.stdout.decode(encoding))[0]["name"] == NAME
    assert locks["default"].list() == []


def test_a_terminal_that_cannot_encode_a_name_shows_it_escaped_and_cut(redis: RedisServer) -> None:
    hold(f"{NAME}{'x' * 200}")
    code, shown = on_a_terminal(redis, "list_locks", PYTHONIOENCODING="ascii")
    assert code == 0
    head, line = shown.split(b"\r\n")[:2]
    assert line.startswith(b"caf\\xe9:")
    assert b"~x" in line
    assert head.index(b"STATE") == line.index(b"  alive") + 2


def test_watch_shows_as_much_as_fits(redis: RedisServer) -> None:
    hold("x" * 200)
    told = run(redis, "list_locks", COLUMNS="60")
    assert told.returncode == 0
    lines = told.stdout.decode().splitlines()
    assert "x…x" in lines[1]
    assert max(map(len, lines)) <= 60
    told = run(redis, "list_locks", "--format", "json", COLUMNS="60")
    assert json.loads(told.stdout)[0]["name"] == "x" * 200


# -- pipes that end --------------------------------------------------------------------------


@contextlib.contextmanager
def unread() -> Iterator[int]:
    """The end of a pipe that nobody reads any more."""
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        yield theirs
    finally:
        os.close(theirs)


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--format", "json"], marks=pytest.mark.nightly),
    ],
)
def test_nobody_reads_list_locks(redis: RedisServer, more: list[str]) -> None:
    # More than the buffers of Python and of the pipe, so that the error comes while it prints.
    hold(*(f"{number:0200}" for number in range(100)))
    with unread() as pipe:
        told = run(redis, "list_locks", *more, stdout=pipe)
    assert (told.returncode, told.stderr) == (0, b"")


def test_nobody_reads_a_short_list(redis: RedisServer) -> None:
    # The error comes when the output is flushed at the end.
    with unread() as pipe:
        told = run(redis, "list_locks", stdout=pipe)
    assert (told.returncode, told.stderr) == (0, b"")


def test_nobody_reads_errors_either(redis: RedisServer) -> None:
    with unread() as pipe:
        told = run(redis, "list_locks", "--using", "nowhere", stdout=pipe, stderr=pipe)
    assert told.returncode == 2


def test_a_closed_output_changes_nothing_of_what_is_done(redis: RedisServer) -> None:
    hold("order:1")
    command = [*MANAGE, "clear_stale_locks", "--force", "--name", "order:1"]
    told = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        env=environment(redis),
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    # The database of lock events has no tables.
    assert told.stderr.startswith(b"CommandError: The locks are free, but lock events")
    assert locks["default"].list() == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_in_one_line(redis: RedisServer) -> None:
    with open("/dev/full", "wb") as full:
        told = run(redis, "list_locks", stdout=full)
    assert told.returncode == 1
    assert told.stderr.startswith(b"CommandError: The output is not complete: ")
    assert told.stderr.count(b"\n") == 1


# -- errors as JSON --------------------------------------------------------------------------


def test_a_store_that_does_not_answer_is_an_object_with_error(redis: RedisServer) -> None:
    redis.pause()
    told = run(redis, "list_locks", "--using", "default", "--format", "json")
    redis.resume()
    (error,) = json.loads(told.stdout)
    assert error["alias"] == "default"
    assert "no answer" in error["error"].lower()
    assert told.returncode == 1


def test_wrong_usage_is_an_object_with_error(redis: RedisServer) -> None:
    told = run(redis, "list_locks", "--older-than", "x", "--format=json")
    assert told.returncode == 2
    (error,) = json.loads(told.stdout)
    assert error == {"error": "argument --older-than: invalid float value: 'x'"}
    assert b"usage:" in told.stderr
