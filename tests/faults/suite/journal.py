"""The events of a run, line by line, in a file that no transaction rolls back.

All processes append to the same file, each line in one ``write``. So lines never mix, and a killed
process leaves no partial line. Times are ``time.monotonic()``, which on one machine is the same
clock for all processes.

The events, all with ``event`` and ``at``:

* ``sent``, ``final``: a message (``kind``, ``key``, ``delivery``) was published; its result ended
  in ``state``;
* ``begin``, ``end``: the start and end of a body (``run``, ``kind``, ``key``, ``delivery``,
  ``pid``, ``token``, ``owner``, ``attempt``, ``long``), and ``how`` it ended;
* ``lost``: the body knew that its lock was lost, or would have known if it had not been stopped;
* ``committed``: its transaction was committed;
* ``followed``: a task sent by a guarded body (``by``, ``key``) was delivered under the id
  ``delivery``;
* ``pending``: so many follow-ups (``count``) were not published at the end;
* ``command``: ``publish_pending_followups`` ended with ``code``, and reported how many it
  published;
* ``hit``: a body met its own fault; ``fault``: the driver made one (``what``, ``pids``);
* ``death``: a process that had run a body is dead; ``freed``: the lock of one of its bodies was
  free;
* ``effect``: a row that is in the database at the end;
* ``restarted``: a worker had ended by itself (``log``), and another one was started;
* ``stuck``: something did not finish (``what``).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]

EVERYBODY = "go"
"""The gate at which everybody may wait."""


def gate(kind: str, key: int) -> str:
    """The gate at which the body of a key waits."""
    return f"go-{kind}-{key}"


class Journal:
    """A file of JSON lines; any process may write, one process reads.

    Args:
        path: Of the file; ``first`` creates further files beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._rest = b""

    def write(self, event: str, *, at: float | None = None, **facts: Any) -> None:
        """Append one line; its time is now by default."""
        line = {"event": event, "at": time.monotonic() if at is None else at, **facts}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def first(self, what: str) -> bool:
        """Whether this is the first call with this argument in any process, by the file system."""
        try:
            self.path.with_name(f"{self.path.name}.{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def open(self, gate: str) -> None:
        """Let everybody that waits at this gate continue."""
        self.path.with_name(f"{self.path.name}.{gate}").touch()

    def is_open(self, gate: str) -> bool:
        """Whether the gate has been opened."""
        return self.path.with_name(f"{self.path.name}.{gate}").exists()

    def new(self) -> list[Event]:
        """The events since the last call; only complete lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
