"""The disk of the database is full: what is asked is refused, and what is held is not lost.

The leases are moved to a tablespace on a file system of a few megabytes, which the test fills.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connections
from pytest_django import DjangoDbBlocker

from django_dlock.backends.database import DatabaseBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.models import LeaseRecord
from testproject.postgres import PostgresServer, settings_for
from testproject.servers import ServerNotFound
from tests.conftest import missing
from tests.support import databases
from tests.support.database_bed import Bed, grant, release, renew, request

ALIAS = "small"
PAGE = 8192


class SmallDisk:
    """A file system of 4 MiB in memory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._filler = place / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * PAGE)

    def clear(self) -> None:
        self._filler.unlink()


@pytest.fixture
def small_disk() -> Iterator[SmallDisk]:
    with tempfile.TemporaryDirectory(prefix="dlock-disk-") as name:
        # The server runs as another user, who must be able to enter the directory.
        Path(name).chmod(0o755)
        place = Path(name, "disk")
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0777", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
            missing("a small file system can be mounted by root only")
        yield SmallDisk(place)
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def leases_on_it(small_disk: SmallDisk, django_db_blocker: DjangoDbBlocker) -> Iterator[SmallDisk]:
    try:
        server = PostgresServer().start()
    except ServerNotFound as error:
        missing(str(error))
    space = small_disk.place / "leases"
    space.mkdir(mode=0o700)
    owner = pwd.getpwuid(server.directory.stat().st_uid)
    os.chown(space, owner.pw_uid, owner.pw_gid)
    with (
        django_db_blocker.unblock(),
        databases.added(ALIAS, settings_for(server.url)),
    ):
        call_command("migrate", database=ALIAS, verbosity=0)
        table = LeaseRecord._meta.db_table
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
            cursor.execute(f"ALTER TABLE {table} SET TABLESPACE small")
            cursor.execute(f"ALTER TABLE {table} ALTER metadata SET STORAGE PLAIN")
        yield small_disk
    server.stop()


def refusal(call: Callable[[], object]) -> str:
    """Why the database refuses the call; empty if it does not."""
    try:
        call()
    except BackendUnavailable as error:
        return str(error.__cause__ or error)
    return ""


def fill(backend: DatabaseBackend) -> tuple[str, str]:
    """Acquire new names until the disk refuses one; its name, and why."""
    for number in range(2000):
        attempt = request(f"n{number}", metadata='{"text": "' + "x" * 2000 + '"}')
        if why := refusal(lambda attempt=attempt: grant(backend, attempt)):
            return attempt.name, why
    raise AssertionError("the disk did not become full")


def test_g5_a_full_disk_grants_nothing_by_halves_and_everything_goes_on_afterwards(
    bed: Bed, leases_on_it: SmallDisk
) -> None:
    backend = bed.backend(ALIAS, command_timeout=5.0)
    lease = grant(backend, request(ttl=300.0))
    leases_on_it.fill()
    refused, why = fill(backend)
    assert "No space left on device" in why
    outcomes: list[str] = []
    # "No answer" is no loss. (PostgreSQL may find room for a new version of a row.)
    refusals = {refusal(lambda: outcomes.extend(renew(backend, lease))) for _ in range(20)}
    assert all("No space left on device" in why for why in refusals if why)
    assert set(outcomes) <= {"renewed"}
    assert backend.get(refused) is None
    leases_on_it.clear()
    assert renew(backend, lease) == ["renewed"]
    again = grant(backend, request(refused))
    assert release(backend, again) == "released"
    assert release(backend, lease) == "released"
