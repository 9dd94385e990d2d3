"""What happened, line by line, in a file that no transaction rolls back.

Every process appends to the same file, each line in one ``write``, so that lines never mix and a
process that is killed leaves no half one. Times are ``time.monotonic()``, which on one machine is
one clock for all processes.

The events, all with ``event`` and ``at``:

* ``sent``, ``final``: a message (``kind``, ``key``, ``delivery``) was published, and the
  ``state`` in which its result ended;
* ``begin``, ``end``: the span of a body (``run``, ``kind``, ``key``, ``delivery``, ``pid``,
  ``token``, ``owner``, ``attempt``, ``long``), and ``how`` it ended;
* ``lost``: the body knew that its lock was, or would have known, had it not been stopped;
* ``committed``: its transaction was;
* ``followed``: a task that a guarded body had sent (``by``, ``key``) was delivered under the id
  ``delivery``;
* ``pending``: so many follow-ups (``count``) were not published at the end;
* ``command``: ``publish_pending_followups`` ended with ``code``, and said how many it published;
* ``struck``: a body met its own fault; ``fault``: the driver made one (``what``, ``pids``);
* ``death``: a process that had run a body is gone; ``freed``: the lock of a body of it was free;
* ``effect``: a row that is in the database at the end;
* ``restarted``: a worker had ended by itself (``log``), and another was started;
* ``stuck``: something did not come to its end (``what``).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["EVERYBODY", "Event", "Journal", "gate"]

Event: TypeAlias = dict[str, Any]

EVERYBODY = "go"
"""The gate that is open to all who wait."""


def gate(kind: str, key: int) -> str:
    """Where the body of a key waits."""
    return f"go-{kind}-{key}"


class Journal:
    """A file of JSON lines; for writing in any process, for reading in one.

    Args:
        path: Of the file; ``first`` makes further files beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._rest = b""

    def write(self, event: str, *, at: float | None = None, **facts: Any) -> None:
        """Append one line, by default of now."""
        line = {"event": event, "at": time.monotonic() if at is None else at, **facts}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def first(self, what: str) -> bool:
        """Whether nobody has asked this before; decided by the file system."""
        try:
            self.path.with_name(f"{self.path.name}.{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def open(self, gate: str) -> None:
        """Let those that ``wait`` at this gate continue."""
        self.path.with_name(f"{self.path.name}.{gate}").touch()

    def is_open(self, gate: str) -> bool:
        """Whether anybody has opened it."""
        return self.path.with_name(f"{self.path.name}.{gate}").exists()

    def new(self) -> list[Event]:
        """The events since the last call, whole lines only."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
