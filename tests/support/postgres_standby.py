"""A PostgreSQL with a streaming standby, which takes over."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from testproject.postgres import PostgresServer, find_postgres, settings_for
from testproject.processes import HOST


class Pair:
    """Both servers; a client that names both finds the one that takes writes."""

    def __init__(self, primary: PostgresServer, standby: PostgresServer) -> None:
        self.primary, self.standby = primary, standby

    @property
    def settings(self) -> dict[str, Any]:
        """An entry of ``DATABASES`` with both servers."""
        return {
            **settings_for(self.primary.url),
            "HOST": f"{HOST},{HOST}",
            "PORT": f"{self.primary.port},{self.standby.port}",
            "OPTIONS": {"target_session_attrs": "read-write"},
        }

    def until_replayed(self) -> None:
        """Block until the standby has everything that the primary has."""
        with psycopg.connect(self.primary.url, autocommit=True) as connection:
            (position,) = one(connection, "SELECT pg_current_wal_lsn()::text")
        give_up = time.monotonic() + 30
        with psycopg.connect(self.standby.url, autocommit=True) as connection:
            missing = f"SELECT pg_last_wal_replay_lsn() < '{position}'"
            while one(connection, missing) != (False,):
                assert time.monotonic() < give_up, "the standby does not follow"
                time.sleep(0.02)

    def fail_over(self) -> None:
        """Kill the primary, and let the standby take over."""
        self.primary.kill()
        self.standby.start()
        with psycopg.connect(self.standby.url, autocommit=True) as connection:
            assert one(connection, "SELECT pg_promote(true, 60)") == (True,)


def one(connection: psycopg.Connection[Any], statement: str) -> tuple[Any, ...]:
    row = connection.execute(statement).fetchone()  # type: ignore[call-overload]
    assert row is not None
    return tuple(row)


@contextmanager
def pair() -> Iterator[Pair]:
    """Raises ``ServerNotFound`` if there is no PostgreSQL."""
    with PostgresServer() as primary:
        standby = PostgresServer()
        try:
            programs = find_postgres()
            assert programs is not None
            # Owned by the user that the servers run as, with rights that PostgreSQL accepts.
            owner = (primary.directory / "data").stat()
            data = standby.directory / "data"
            data.mkdir(mode=0o700)
            for path in (standby.directory, data):
                if path.stat().st_uid != owner.st_uid:
                    subprocess.run(["chown", f"{owner.st_uid}:{owner.st_gid}", path], check=True)
            command = [
                programs / "pg_basebackup",
                "-d",
                primary.url,
                "-D",
                data,
                "-R",
                "-X",
                "stream",
            ]
            subprocess.run(
                [*command, "--checkpoint=fast", "--no-sync"],
                user=owner.st_uid,
                cwd=standby.directory,
                check=True,
                timeout=60,
            )
            with standby:
                yield Pair(primary, standby)
        finally:
            standby.stop()
