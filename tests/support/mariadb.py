"""A MariaDB for the tests: one named by a URL, or one started from installed programs."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from testproject.servers import free_port

URL = "DLOCK_TEST_MARIADB_URL"
"""Names a running server, as in ``mysql://root@127.0.0.1:3306/``."""


class MariadbNotFound(RuntimeError):
    """No MariaDB was found; the message says where it was searched for."""


@contextmanager
def database() -> Iterator[str]:
    """The URL of a new, empty database that is dropped at the end.

    Raises:
        MariadbNotFound: There is neither a URL nor an installed server.
    """
    named = os.environ.get(URL)
    with _given(named) if named else _started() as url:
        name = f"dlock_test_{secrets.token_hex(4)}"
        _execute(url, f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            _execute(url, f"DROP DATABASE {name}")


ENGINES = {
    "pymysql": "tests.support.pymysql_engine",
    "mysqlclient": "django.db.backends.mysql",
}
"""Driver → engine in ``DATABASES``."""


def settings_for(url: str, driver: str = "pymysql") -> dict[str, Any]:
    """The settings in ``DATABASES`` for a URL."""
    return {
        "ENGINE": ENGINES[driver],
        "NAME": urlsplit(url).path.lstrip("/"),
        **{name.upper(): str(value) for name, value in _parameters(url).items()},
    }


def _parameters(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "host": parts.hostname or "",
        "port": parts.port or 3306,
    }


def _execute(url: str, statement: str) -> None:
    import pymysql

    connection = pymysql.connect(**_parameters(url), connect_timeout=5)
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(statement)


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


@contextmanager
def _started() -> Iterator[str]:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    install = shutil.which("mariadb-install-db", path=path)
    server = shutil.which("mariadbd", path=path)
    if install is None or server is None:
        raise MariadbNotFound(
            f"no MariaDB: name a running server in {URL}, or install the mariadb-server package"
        )
    directory = Path(tempfile.mkdtemp(prefix="dlock-mariadb-"))
    # MariaDB refuses to run as root.
    user = "mysql" if os.geteuid() == 0 else None
    if user is not None:
        try:
            os.chown(directory, pwd.getpwnam(user).pw_uid, -1)
        except KeyError as error:
            raise MariadbNotFound("MariaDB does not run as root, and has no user") from error
    data, log = f"--datadir={directory / 'data'}", directory / "log"
    # A server that starts deletes the temporary tables of all others that share its folder.
    environment = {**os.environ, "TMPDIR": str(directory)}
    subprocess.run(
        # Use only these settings; root logs in without a password.
        [install, "--no-defaults", data, "--auth-root-authentication-method=normal"],
        user=user,
        cwd=directory,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    port = free_port()
    url = f"mysql://root@127.0.0.1:{port}/"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(server, "--no-defaults", data, f"--port={port}", "--bind-address=127.0.0.1"),
                *(f"--socket={directory / 'socket'}", f"--pid-file={directory / 'pid'}"),
                # The data need not survive a crash of the machine.
                *("--innodb-flush-method=nosync", "--innodb-flush-log-at-trx-commit=0"),
                *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M"),
                # As on a server with replicas.
                *(f"--log-bin={directory / 'binlog'}", "--binlog-format=MIXED"),
            ],
            user=user,
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        _wait_for(process, url, log)
        yield url
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + 60
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"MariaDB did not start: {log.read_text()}")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    import pymysql

    try:
        _execute(url, "SELECT 1")
    except pymysql.OperationalError:
        return False
    return True
