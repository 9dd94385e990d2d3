"""A PostgreSQL for the tests: one named by URL, else one started from installed binaries."""

from __future__ import annotations

import glob
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from testproject.servers import free_port

URL = "DLOCK_TEST_POSTGRES_URL"
"""Names a running server, as in ``postgresql://postgres@127.0.0.1:5432/postgres``."""


class PostgresNotFound(RuntimeError):
    """There is no PostgreSQL to use; the message says where it was looked for."""


@contextmanager
def database() -> Iterator[str]:
    """The URL of a new, empty database that is dropped at the end.

    Raises:
        PostgresNotFound: Neither a URL nor the programs of a server, or no driver.
    """
    try:
        import psycopg
    except ImportError as error:
        raise PostgresNotFound(f"psycopg is not installed: {error}") from error
    named = os.environ.get(URL)
    with _given(named) if named else _started() as url:
        name = f"dlock_test_{secrets.token_hex(4)}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def settings_for(url: str) -> dict[str, Any]:
    """The entry of ``DATABASES`` for a URL."""
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
    }


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


@contextmanager
def _started() -> Iterator[str]:
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    program = found[-1] if found else shutil.which("initdb")
    if program is None:
        raise PostgresNotFound(
            f"no PostgreSQL: name a running server in {URL}, or install the postgresql package"
        )
    programs = Path(program).parent
    directory = Path(tempfile.mkdtemp(prefix="dlock-postgres-"))
    # PostgreSQL refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        try:
            os.chown(directory, pwd.getpwnam(user).pw_uid, -1)
        except KeyError as error:
            raise PostgresNotFound("PostgreSQL does not run as root, and has no user") from error
    port = free_port()

    def run(*command: str) -> None:
        subprocess.run(
            command, user=user, cwd=directory, check=True, stdout=subprocess.DEVNULL, timeout=60
        )

    data, log = str(directory / "data"), str(directory / "log")
    control = str(programs / "pg_ctl")
    run(str(programs / "initdb"), "-D", data, "-U", "postgres", "--auth=trust", "--no-sync")
    options = f"-p {port} -h 127.0.0.1 -k {directory} -c fsync=off"
    run(control, "-D", data, "-l", log, "-w", "-o", options, "start")
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        run(control, "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(directory, ignore_errors=True)
