"""Workers that a real uWSGI has forked after it has loaded the project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from django_dlock import Lock, locks
from django_dlock.checks import uwsgi
from testproject.processes import HOST, free_port
from testproject.servers import RedisServer
from tests.conftest import missing
from tests.support.aliases import TTL, alias, configured
from tests.support.workers import eventually

SERVER = Path(sys.executable).with_name("uwsgi")
OPTIONS = ("--master", "--processes", "2", "--enable-threads")


@contextmanager
def site(redis: RedisServer, release: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of a site that uWSGI runs."""
    if not SERVER.exists():
        missing("uWSGI is not installed: pip install pyuwsgi")
    port = free_port()
    with log.open("wb") as told:
        process = subprocess.Popen(
            [
                *(SERVER, "--http-socket", f"{HOST}:{port}", "--die-on-term", "--need-app"),
                *("--module", "tests.support.uwsgi_site:application", *OPTIONS, *options),
            ],
            env={**os.environ, "REDIS_URL": redis.url, "RELEASE": str(release)},
            stdout=told,
            stderr=told,
        )
    try:
        eventually(lambda: b"spawned uWSGI worker 2" in log.read_bytes())
        yield f"http://{HOST}:{port}/"
    finally:
        process.terminate()
        process.wait(20)


def ask(url: str) -> object:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "fork"),
        pytest.param(("--py-call-osafterfork",), "fork", marks=pytest.mark.nightly),
        (("--lazy-apps",), None),
    ],
)
def test_g8_two_requests_in_uwsgi_do_not_hold_at_once(
    options: tuple[str, ...], reason: str | None, own_redis: RedisServer, tmp_path: Path
) -> None:
    release, log = tmp_path / "release", tmp_path / "log"
    with (
        configured({"default": alias(own_redis.url, OPTIONS={"command_timeout": 0.6})}),
        site(own_redis, release, log, *options) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(ask, url)
        eventually(lambda: locks["default"].get("it") is not None)
        # Longer than the lease lasts if nobody renews it.
        assert not Lock("it").acquire(timeout=2 * TTL)
        second = ask(url)
        release.touch()
        answers = [first.result(60), second]
        if reason is None:
            # Each worker has loaded the project itself, and one of them holds the lock of that.
            assert [answer[0] for answer in answers] == ["held", "contended"]
        else:
            assert answers == [["held", reason], ["contended", reason]]
    assert (b"W025" in log.read_bytes()) == (not options)
    assert b"W024" not in log.read_bytes()


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({b"master": True, b"processes": b"4"}, ["W024", "W025"]),
        ({b"enable-threads": True, b"workers": [b"2", b"3"]}, ["W025"]),
        ({b"threads": b"2", b"lazy-apps": True, b"master": True}, []),
        ({b"enable-threads": b"true", b"py-call-osafterfork": True, b"processes": b"2"}, []),
        # One process, which nobody has forked.
        ({b"enable-threads": True}, []),
    ],
)
def test_what_uwsgi_lacks_is_reported(
    options: dict[bytes, object], ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("uwsgi")
    module.opt = options  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uwsgi", module)
    assert [found.id for found in uwsgi.check_uwsgi()] == [f"django_dlock.{each}" for each in ids]
