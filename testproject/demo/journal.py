"""The events, line by line, in a file that no transaction rolls back.

All processes append to the same file, each line in one ``write``. So lines never mix, and a killed
process leaves no partial line. Times are those of ``django_dlock.clock``, which is the same for
all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from django_dlock import clock

Kind = Literal[
    "ready", "received", "start", "effect", "end",
    "killed", "worker_killed", "killed_beside", "stopped", "woken", "done",
]  # fmt: skip
"""``killed``: the child that ran the body. ``worker_killed``: its whole worker. ``killed_beside``:
a body that ended because another one's worker was killed. ``done``: a message, whose id is the run,
came to its end."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line.

    Attributes:
        column: Which of the three columns of the table; empty for a worker's ``ready``.
        run: One execution of a body; no two have the same.
        first: Whether the order's body runs for the first time in this column.
        at: Seconds on ``django_dlock.clock``.
    """

    kind: Kind
    column: str = ""
    order: int = 0
    run: str = ""
    pid: int = 0
    first: bool = False
    at: float = 0.0


class Journal:
    """A directory with the journal's file; for writing in any process, for reading in one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = directory / "journal"
        self._read = 0

    def write(self, event: Event) -> None:
        line = json.dumps(asdict(event)) + "\n"
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def note(
        self,
        kind: Kind,
        *,
        column: str = "",
        order: int = 0,
        run: str = "",
        pid: int | None = None,
        first: bool = False,
        at: float | None = None,
    ) -> None:
        """Write an event; by default for this process and this moment."""
        pid = os.getpid() if pid is None else pid
        self.write(Event(kind, column, order, run, pid, first, clock.now() if at is None else at))

    def is_first(self, column: str, order: int) -> bool:
        """Whether this is the first call for it in any process; the file system decides."""
        try:
            (self.directory / f"{column}-{order}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def body(self, column: str, order: int) -> Iterator[Body]:
        """The span of a body, from its first line to its last, however it ends."""
        first = self.is_first(column, order)
        body = Body(self, column, order, f"{os.getpid()}@{clock.now():.6f}", first)
        body.note("start")
        try:
            yield body
        finally:
            body.note("end")

    def new(self) -> list[Event]:
        """The events since the last call, whole lines only."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read += sum(len(line) for line in whole)
        return [Event(**json.loads(line)) for line in whole]


@dataclass(frozen=True, slots=True)
class Body:
    """One running body."""

    journal: Journal
    column: str
    order: int
    run: str
    first: bool

    def note(self, kind: Kind) -> None:
        self.journal.note(
            kind, column=self.column, order=self.order, run=self.run, first=self.first
        )
