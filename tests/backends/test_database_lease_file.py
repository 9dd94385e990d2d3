"""The file of leases beside a project's SQLite file: removed, replaced, or not to be written."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.lease_file import LeaseFile
from django_dlock.exceptions import BackendRefused
from django_dlock.lease import Contention
from tests.support.database_bed import store_of
from tests.support.lease_files import (
    Child,
    MakeBackend,
    ask,
    grant,
    integrity,
    release,
    renew,
    request,
)


@pytest.mark.parametrize(
    "how", ["removed", "removed alone", "replaced by an empty file", "replaced by a copy"]
)
def test_g2_a_holder_is_told_when_the_file_of_leases_is_gone(
    how: str, make_backend: MakeBackend, project_file: Path
) -> None:
    backend, other, path = make_backend(), make_backend(), LeaseFile(project_file).path
    copy = path.with_name("copy")
    grant(other, request("other"))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", [str(copy)])
    lease = grant(backend, request())
    if how == "replaced by a copy":
        copy.replace(path)
    else:
        path.unlink()
    if how != "removed alone":
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink()
    if how == "replaced by an empty file":
        path.touch()
    # Both use the new file.
    successor = grant(other, request())
    assert renew(backend, lease) == ["refused"]
    assert release(backend, lease) == "refused"
    assert isinstance(ask(backend, request()), Contention)
    assert successor.token > lease.token
    assert release(other, successor) == "released"
    assert integrity(project_file) == "ok"


def test_g1_an_answer_from_a_file_that_was_replaced_meanwhile_does_not_count(
    make_backend: MakeBackend, project_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other, path = make_backend(), make_backend(), LeaseFile(project_file).path
    release(backend, grant(backend, request()))
    dialect = store_of(backend).dialect
    acquire = dialect.acquire

    def acquire_too_late(*args: Any) -> Any:
        monkeypatch.undo()
        token = acquire(*args)
        path.unlink()
        grant(other, request())
        return token

    monkeypatch.setattr(dialect, "acquire", acquire_too_late)
    assert isinstance(ask(backend, request()), Contention)


def test_an_operation_looks_at_the_file_once(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, looks = make_backend(), list[object]()
    release(backend, grant(backend, request()))
    identity = LeaseFile.identity
    monkeypatch.setattr(LeaseFile, "identity", lambda it: looks.append(it) or identity(it))
    release(backend, grant(backend, request()))
    assert len(looks) == 2


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_the_file_of_leases_can_be_used_by_whoever_can_use_the_projects(
    make_backend: MakeBackend, project_file: Path
) -> None:
    project_file.touch()
    project_file.chmod(0o664)
    if os.geteuid() == 0:
        os.chown(project_file, 12345, 23456)
    its, path = project_file.stat(), LeaseFile(project_file).path
    with umask(0o077):
        grant(make_backend(), request())
    for each in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        found = each.stat()
        facts = (found.st_mode & 0o777, found.st_uid, found.st_gid)
        assert facts == (0o664, its.st_uid, its.st_gid), each


def as_another_user(work: Callable[[], object]) -> Any:
    """What ``work`` returns if it runs as a user who, unlike root, is bound by file modes."""

    def step() -> object:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(12345)
            os.setuid(12345)
        return work()

    child = Child(step)
    try:
        return child.step()
    finally:
        child.end()


def refusal(backend: DatabaseBackend) -> str:
    try:
        ask(backend, request())
    except BackendRefused as error:
        return str(error)
    return "granted"


def in_the_way(obstacle: str, project_file: Path) -> tuple[str, str]:
    """Create the obstacle; return the two parts of the error: what failed, and the cure."""
    path = LeaseFile(project_file).path
    if obstacle == "directory":
        path.mkdir()
        return f"{path} is a directory", "remove it"
    if obstacle == "file":
        path.touch(mode=0o444)
        path.chmod(0o444)
        path.parent.chmod(0o777)
        return f"{path} (owner ", f"give it the owner, group and mode of {project_file}"
    path.parent.chmod(0o555)
    return f"no file can be created in {path.parent}", "let that user write to the directory"


@pytest.mark.parametrize("obstacle", ["directory", "file", "directory of the project"])
def test_a_file_that_cannot_be_used_is_named_with_the_cure(
    obstacle: str, make_backend: MakeBackend, project_file: Path
) -> None:
    project_file.touch()
    backend = make_backend()
    what, cure = in_the_way(obstacle, project_file)
    try:
        said = as_another_user(lambda: refusal(backend))
        assert what in said
        assert cure in said
        assert "DATABASES['file']" in said
        checked = as_another_user(lambda: [it.id for it in backend.store_problems()])
        assert checked == ["E011"]
    finally:
        project_file.parent.chmod(0o755)


def test_a_file_that_becomes_read_only_is_named_with_the_cure(
    make_backend: MakeBackend, project_file: Path
) -> None:
    project_file.touch()
    project_file.parent.chmod(0o777)
    path, backend = LeaseFile(project_file).path, make_backend()
    grant(backend, request("before"))
    for each in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        each.chmod(0o444)
    said = as_another_user(lambda: refusal(backend))
    assert f"{path} (owner " in said
    assert "cannot be written" in said


ALONE = """
import django
from django.conf import settings
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": PATH}
settings.configure(DATABASES={"default": database}, INSTALLED_APPS=["django_dlock"], USE_TZ=True)
django.setup()
from django_dlock import Lock, locks
print([problem.id for problem in locks["default"].store_problems()])
Lock("it").acquire()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_project_file_that_is_mounted_without_its_directory_is_refused(tmp_path: Path) -> None:
    """As ``docker run -v ./db.sqlite3:/app/db.sqlite3``: each container would have leases alone."""
    outside, inside = tmp_path / "outside", tmp_path / "in side.sqlite3"
    for each in (outside, inside):
        each.touch()
    mount = f"mount --bind '{outside}' '{inside}' && exec '{sys.executable}' -c \"$0\""
    code = ALONE.replace("PATH", repr(str(inside)))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, code], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine forbids mounts: {done.stderr}")
    assert done.stdout == "['E011']\n"
    last = done.stderr.splitlines()[-1]
    assert "BackendRefused" in last
    assert f"mount {tmp_path} instead" in last
    assert not list(tmp_path.glob("*-dlock"))
