"""What a server knows of the processes that hold leases or wait for them.

A script may touch no key but those that its caller has declared, and which process holds a name is
known only when the name was read. So processes are read by a request of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from ... import clock
from ...lease import Contention
from ...process import ProcessIdentity, current
from ..holder_state import process_from_json
from .commands import EXACTLY, Ask, Command, Ticket
from .keys import Keys
from .scripts import READ_PROCESSES

MOST_HOLDERS = 1000
"""Identities that are remembered; beyond that, all are forgotten."""
UNKNOWN_FOR = 5.0
"""Seconds after which a process that was not known is asked for again. A living one introduces
itself as often."""


class StoredProcess(NamedTuple):
    """What the server has stored of one process.

    Attributes:
        identity: JSON; empty if the process is not known.
        beat: Its last heartbeat as stored, in milliseconds.
        listeners: The number of its subscriptions.
    """

    identity: str = ""
    beat: str = ""
    listeners: int = 0


def read_processes(ask: Ask, keys: Keys, processes: Sequence[str]) -> dict[str, StoredProcess]:
    """What the server has stored of these processes, by their ids."""

    def read(answer: Any, sent_at: float) -> dict[str, StoredProcess]:
        said = zip(answer[::2], answer[1::2], strict=True)
        return dict(zip(processes, itertools.starmap(_stored, said), strict=True))

    words = [keys.processes + process for process in processes]
    channels = [keys.channels + process for process in processes]
    found: dict[str, StoredProcess] = ask(READ_PROCESSES, words, channels, read)
    return found


class Holders:
    """Knows the processes of those who hold what this process wants.

    The identity of a process never changes, so the server is asked once for each.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._known: dict[str, tuple[ProcessIdentity | None, float]] = {}

    def identified(self, contention: Contention) -> Contention | None:
        """The contention with the holder's process; ``None`` if the server must be asked."""
        process = cast(Ticket, contention.ticket).process
        if not process:
            return contention
        if process == current().id:
            return contention._replace(process=current())
        identity, asked_at = self._known.get(process, (None, float("-inf")))
        if identity is None and clock.now() - asked_at > UNKNOWN_FOR:
            return None
        return contention._replace(process=identity)

    def knows(self, contention: Contention) -> bool:
        """Whether the holder's process is known; of several servers, one may not know it."""
        known = self.identified(contention)
        return known is not None and known.process is not None

    def command(self, contention: Contention) -> Command[None]:
        """Asks the server for the holder's process, and remembers the answer."""
        process = cast(Ticket, contention.ticket).process

        def read(answer: Any, sent_at: float) -> None:
            known = process_from_json(_stored(*answer).identity)
            if len(self._known) >= MOST_HOLDERS:
                self._known.clear()
            # Of several servers, one may not know it.
            if known is not None or self._known.get(process, (None, 0.0))[0] is None:
                self._known[process] = known, sent_at

        return Command(READ_PROCESSES, [self._keys.processes + process], [], read)


def _stored(said: bytes, listeners: int) -> StoredProcess:
    beat, _, identity = said.decode(*EXACTLY).partition(" ")
    return StoredProcess(identity, beat, listeners)
