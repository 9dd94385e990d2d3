"""Where a project on SQLite keeps its leases: in a separate file beside the project's.

SQLite lets only one connection write at a time. In the project's own file, a long transaction of
the project would block renewals. The file is created at first use.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

from ... import clock
from .. import sqlite_forks
from . import sqlite
from .connection import Connection, Failure, failure
from .pool import Pool, Urgency

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Linux or macOS
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

SUFFIX = "-dlock"
BESIDE = ("-wal", "-shm")
"""The suffixes of the files that SQLite itself keeps beside the file."""
BUSY = 0.05
"""Seconds for which a statement is repeated while another connection writes."""
PROBE_PAUSE = (0.0005, 0.002)
"""Shortest and longest pause before a statement is tried again, in seconds."""
OPENINGS = 5
"""How often the file may be replaced while it is being opened."""


class LeaseFile:
    """The file of leases of one project.

    Attributes:
        project: The project's own file.
        path: The file of leases.
    """

    def __init__(self, name: object) -> None:
        text = str(name)
        if text.startswith("file:"):
            text = unquote(urlsplit(text).path)
        # Resolve links, so that all paths to the project's file give the same file of leases.
        self.project = Path(text).resolve()
        self.path = self.project.with_name(self.project.name + SUFFIX)

    def identity(self) -> tuple[int, int] | None:
        """Identifies the file at this path, to notice a replacement; ``None`` if there is none."""
        found = _stat(self.path)
        return None if found is None else (found.st_dev, found.st_ino)

    # -- opening -----------------------------------------------------------------------

    def open(self) -> FileConnection:
        """A connection to the file, which is created if there is none.

        Raises:
            Failure: It cannot be opened.
        """
        if sqlite_forks.is_inherited(self.path):
            raise Failure("refused", RuntimeError(f"{self.path}: {INHERITED}"))
        if _is_mount_point(self.project):
            raise Failure(
                "read-only", RuntimeError(f"{self.project} is a mount point"), self._alone
            )
        number = sqlite_forks.announce(self.path)
        raw = None
        try:
            raw, identity = self._open()
            sqlite_forks.note(number, raw)
            raw.execute("PRAGMA synchronous = NORMAL")
            # A version of django-dlock with another format may have created the file.
            sqlite.create_tables(raw, durable=True)
            raw.execute("PRAGMA busy_timeout = 0")
            return FileConnection(raw, number, self, identity)
        except BaseException as error:
            if raw is not None:
                raw.close()
            sqlite_forks.withdraw(number)
            if isinstance(error, sqlite3.Error | OSError):
                raise self.failure(error) from error
            raise

    def _open(self) -> tuple[sqlite3.Connection, tuple[int, int]]:
        for _ in range(OPENINGS):
            found = _stat(self.path)
            if found is None or not found.st_size:
                self._create()
            before = self.identity()
            raw = sqlite.open_database(f"{self.path.as_uri()}?mode=rw", BUSY)
            if before is not None and self.identity() == before:
                return raw, before
            raw.close()
        raise sqlite3.OperationalError("unable to open database file")

    def _create(self) -> None:
        """Create the file, with the owner, group and mode of the project's."""
        with self._directory_locked():
            found = _stat(self.path)
            if found is not None and found.st_size:
                return
            for suffix in BESIDE:
                # They belong to a file that was removed, and would be taken for this one's.
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            uri = f"{self.path.as_uri()}?mode=rwc"
            its = _stat(self.project)
            if its is not None:
                uri += f"&modeof={quote(str(self.project))}"
            with contextlib.closing(sqlite.open_database(uri, BUSY)) as raw:
                if its is not None:
                    with contextlib.suppress(OSError):
                        # Anybody but root can change only the group.
                        os.chown(self.path, -1 if os.geteuid() else its.st_uid, its.st_gid)
                # Before the lock ends, so that no process ever uses a file that is still empty.
                sqlite.create_tables(raw, durable=True)

    @contextlib.contextmanager
    def _directory_locked(self) -> Iterator[None]:
        """Keep other processes from creating the file. The file itself must not be opened here:
        closing it would end the locks that SQLite holds in this process."""
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            if fcntl is not None:
                fcntl.flock(directory, fcntl.LOCK_EX)
            yield
            if fcntl is not None:
                # A child that is being forked may have it open, too.
                fcntl.flock(directory, fcntl.LOCK_UN)
        finally:
            os.close(directory)

    # -- errors ------------------------------------------------------------------------

    def failure(self, error: BaseException) -> Failure:
        """What an error of SQLite or the operating system means."""
        known = error if isinstance(error, Failure) else _failure(error)
        if known.kind in ("transient", "refused") or not (obstacle := self._obstacle()):
            return known
        return Failure("read-only", error, obstacle)

    @property
    def _alone(self) -> str:
        return (
            f"{self.project} is mounted without its directory, so that {self.path.name}, and the "
            "files that SQLite itself writes beside it, would lie where no other container sees "
            f"them; mount {self.project.parent} instead"
        )

    def _obstacle(self) -> str:
        """Why this process cannot use the file, and the cure; empty if it is not known."""
        path, directory, user = self.path, self.path.parent, f"user {os.geteuid()}"
        if os.path.isdir(path):
            return f"{path} is a directory; remove it, so that the file can be created"
        for each in (path, *(path.with_name(path.name + suffix) for suffix in BESIDE)):
            its = _stat(each)
            if its is not None and not _may(each, os.R_OK | os.W_OK):
                mode = f"owner {its.st_uid}, group {its.st_gid}, mode {stat.S_IMODE(its.st_mode):o}"
                return (
                    f"{each} ({mode}) cannot be written by {user}; give it the owner, group and "
                    f"mode of {self.project}"
                )
        if not _may(directory, os.W_OK | os.X_OK):
            return (
                f"no file can be created in {directory} by {user}, and SQLite creates {path.name}, "
                f"{path.name}-wal and {path.name}-shm there; let that user write to the directory"
            )
        return ""


MOUNTS = Path("/proc/self/mountinfo")
"""The mounts that this process sees, on Linux; the fifth word of a line is where it is."""


def _is_mount_point(path: Path) -> bool:
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return False
    # Blanks and the like are written as octal numbers.
    name = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], os.fsencode(path))
    return any(line.split(b" ")[4:5] == [name] for line in lines)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


INHERITED = (
    "this process was forked while its parent had the file open, by a fork without Python's hooks "
    "or during a statement that did not end; fork before the first lock is used (uWSGI: lazy-apps)"
)


def _failure(error: BaseException) -> Failure:
    # The number of an operating system's error is not one of a database's.
    return Failure("unreachable", error) if isinstance(error, OSError) else failure(error)


def _may(path: Path, how: int) -> bool:
    return os.access(path, how, effective_ids=os.access in os.supports_effective_ids)


class FileConnection(Connection):
    """A connection to the file of leases.

    Args:
        number: From ``sqlite_forks.announce``.
        identity: Of the file that is open.
    """

    def __init__(
        self, raw: sqlite3.Connection, number: int, file: LeaseFile, identity: tuple[int, int]
    ) -> None:
        self._number, self._file, self._identity = number, file, identity
        super().__init__(raw, sqlite3, mark="?")

    @property
    def is_current(self) -> bool:
        """Whether the file is still the one that other processes find."""
        return self._file.identity() == self._identity

    def _execute(self, statement: str, parameters: Sequence[Any]) -> None:
        give_up_at = clock.now() + BUSY
        while True:
            try:
                return super()._execute(statement, parameters)
            except Failure as error:
                if error.kind != "transient" or clock.now() >= give_up_at:
                    raise
            # SQLite itself would pause for longer and longer, and a connection that writes often
            # would leave it no chance.
            time.sleep(random.uniform(*PROBE_PAUSE))

    def close(self) -> None:
        super().close()
        if self._pid == os.getpid():
            sqlite_forks.withdraw(self._number)

    __del__ = close


class FilePool(Pool):
    """The connections to the file of leases."""

    def __init__(self, file: LeaseFile, limit: int) -> None:
        super().__init__(file.open, limit)
        self._file = file
        sqlite_forks.close_before_forks(self)

    def run(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T:
        def use_current_file(connection: Connection) -> T:
            one = cast(FileConnection, connection)
            try:
                answer = use(one)
            except Failure as error:
                if one.is_current:
                    raise self._file.failure(error) from error
            else:
                # Checked afterwards: an answer counts only if others use the same file.
                if one.is_current:
                    return answer
            raise Failure("broken", RuntimeError(f"{self._file.path} was removed or replaced"))

        return super().run(use_current_file, deadline, urgency)
