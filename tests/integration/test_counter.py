"""G1 and G15: many processes increment a number under one lock, and the total is exact."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from testproject.servers import RedisServer
from tests.conftest import missing
from tests.support.aliases import alias
from tests.support.postgres import PostgresNotFound, database, settings_for

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
PROCESSES, THREADS, TOTAL = 8, 8, 2000


def count_up(redis: RedisServer, **job: Any) -> None:
    """Let 8 processes with 8 threads each increment the number, 2000 times in all."""
    dlocks = {"default": alias(redis.url, TTL=30.0, OPTIONS={"command_timeout": 5.0})}
    # 2000 is not a multiple of 64, so the first processes do one more round.
    rounds, rest = divmod(TOTAL, THREADS)
    shares = [rounds // PROCESSES + (n < rounds % PROCESSES) for n in range(PROCESSES)]
    assert rest == 0
    assert sum(shares) * THREADS == TOTAL
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.counting"),
                json.dumps({"dlocks": dlocks, "threads": THREADS, "times": times, **job}),
            ],
            cwd=ROOT,
        )
        for times in shares
    ]
    try:
        assert [process.wait(200) for process in processes] == [0] * PROCESSES
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_g1_2000_increments_of_8_processes_with_8_threads_are_2000(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    count_up(own_redis, file=str(counter))
    assert counter.read_text() == str(TOTAL)


CREATE = "CREATE TABLE counter (value INTEGER)"
INSERT = "INSERT INTO counter VALUES (0)"


def test_g15_2000_increments_inside_transactions_on_sqlite_are_2000(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    path = tmp_path / "counter.sqlite3"
    # Deferred, because an immediate transaction would protect the number by itself.
    options = {**settings.DATABASES["default"]["OPTIONS"], "transaction_mode": "DEFERRED"}
    entry = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path), "OPTIONS": options}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(CREATE)
        connection.execute(INSERT)
    count_up(own_redis, databases={"default": entry})
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT value FROM counter").fetchone() == (TOTAL,)


def test_g15_2000_increments_inside_transactions_on_postgresql_are_2000(
    own_redis: RedisServer,
) -> None:
    try:
        with database() as url:
            import psycopg

            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(CREATE)
                connection.execute(INSERT)
                count_up(own_redis, databases={"default": settings_for(url)})
                row = connection.execute("SELECT value FROM counter").fetchone()
    except PostgresNotFound as error:
        missing(str(error))
    assert row == (TOTAL,)
