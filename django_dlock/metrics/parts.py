"""The parts of a scrape: each is asked on a thread of its own, and left out if it is late.

So a store or a database that does not answer costs a scrape a few seconds, the next ones nothing,
and the site one thread of each process; and it hides no other part.
"""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from django.db import Error

from .. import clock, process
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..log import logger
from .instruments import STORES, Instrument

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Linux or macOS
    fcntl = None  # type: ignore[assignment]

PATIENCE = 5.0
"""Seconds that a scrape waits for a part; Prometheus itself usually waits for ten."""
AGAIN = 10.0
"""Seconds after which a part that did not answer is asked again."""
TURN = 0.05
"""Seconds between two looks whether another process has the answer."""

_BY_NAME = {each.name: each for each in STORES}


class Sample(NamedTuple):
    """One value."""

    instrument: Instrument
    value: float
    labels: dict[str, str]


class Part:
    """What is asked together.

    Args:
        labels: What the part is called.
        every: Seconds for which an answer is kept.
        ask: Yields the values; may raise.
        file: Keeps the answer for all processes of the site; ``None`` for this process alone.
    """

    def __init__(
        self,
        labels: dict[str, str],
        every: float,
        ask: Callable[[], Iterable[Sample]],
        file: Path | None,
    ) -> None:
        self.labels, self.every, self.ask, self.file = labels, every, ask, file
        self._round: Round | None = None

    @property
    def alias(self) -> str | None:
        return self.labels["alias"] or None

    def __str__(self) -> str:
        return " ".join(filter(None, self.labels.values()))

    def begin(self) -> Round:
        """The round that is under way or whose answer still counts, else a new one.

        Not safe for threads.
        """
        if self._round is None or self._round.is_over:
            self._round = Round(self)
            self._round.start()
        return self._round


class Round:
    """One time that a part is asked.

    Attributes:
        found: The values so far.
        complete: Whether these are all.
    """

    def __init__(self, part: Part) -> None:
        self.part, self.began = part, clock.now()
        self.found: list[Sample] = []
        self.complete = False
        self._until = 0.0
        self._done = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether its answer counts no longer; never while it is under way."""
        return self._done.is_set() and clock.now() >= self._until

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="dlock-scrape", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can start: too many, or the interpreter is ending.
            self._done.set()

    def wait(self) -> None:
        """Return when it has ended, or has taken ``PATIENCE`` seconds since it began."""
        self._done.wait(max(0.0, self.began + PATIENCE - clock.now()))

    def _run(self) -> None:
        try:
            asked_at = self._answer()
            self.complete = True
            self._until = asked_at + self.part.every
        except (BackendUnavailable, Error, InvalidLockBackend, TimeoutError) as error:
            logger.info("Left out of the metrics: %s: %s", self.part, error, alias=self.part.alias)
        except BaseException:
            logger.exception("Left out of the metrics: %s", self.part, alias=self.part.alias)
        if not self.complete:
            self._until = clock.now() + AGAIN
        self._done.set()
        # After the answer, because this waits for a fork.
        process.thread_ends()

    def _answer(self) -> float:
        """Find the values; returns when they were asked for."""
        with self._turn() as file:
            if file is not None and (kept := _read(file, self.part.every)) is not None:
                asked_at, self.found = kept
                return asked_at
            asked_at = clock.now()
            for sample in self.part.ask():
                self.found.append(sample)
            if file is not None:
                _write(file, asked_at, self.found)
        return asked_at

    @contextlib.contextmanager
    def _turn(self) -> Iterator[IO[bytes] | None]:
        """Only one process of the site asks at a time; yields the file with its answer.

        ``None`` if this process asks for itself, because there is no such file, or no lock on it.
        """
        file = None if self.part.file is None or fcntl is None else _opened(self.part.file)
        if file is None:
            yield None
            return
        with file:
            yield file if self._is_locked(file) else None

    def _is_locked(self, file: IO[bytes]) -> bool:
        """Wait for the turn; ``False`` if there are no locks, as on some network file systems.

        Raises:
            TimeoutError: Another process has not finished.
        """
        # Tried again and again: a thread that waits in the call would wait as long as the process
        # that asks. And not ``flock``, which a forked child would keep.
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    _tell_not_kept(error)
                    return False
                if clock.now() >= self.began + PATIENCE:
                    raise TimeoutError("another process is still asking") from error
            time.sleep(TURN)


def _opened(path: Path) -> IO[bytes] | None:
    try:
        # Without a buffer, which would be written once more when the file is closed.
        return path.open("a+b", buffering=0)
    except OSError as error:
        _tell_not_kept(error)
        return None


def _tell_not_kept(error: OSError) -> None:
    logger.info("Answers for metrics are not kept for other processes: %s", error)


def _read(file: IO[bytes], every: float) -> tuple[float, list[Sample]] | None:
    """The answer that another process has kept, if it still counts."""
    try:
        file.seek(0)
        asked_at, rows = json.loads(file.read())
        found = [_sample(*row) for row in rows]
        # The clock begins anew with the machine.
        counts = asked_at <= clock.now() < asked_at + every
    except (KeyError, OSError, RecursionError, TypeError, ValueError):
        # Nothing yet, half of one, or of another version.
        return None
    return (asked_at, found) if counts else None


def _sample(name: str, value: float, labels: dict[str, str]) -> Sample:
    instrument = _BY_NAME[name]
    if sorted(labels) != sorted(instrument.labels) or not isinstance(value, int | float):
        raise ValueError("of another version")
    return Sample(instrument, value, {label: str(labels[label]) for label in labels})


def _write(file: IO[bytes], asked_at: float, found: list[Sample]) -> None:
    rows: list[Any] = [[of.name, value, labels] for of, value, labels in found]
    try:
        file.truncate(0)
        file.write(json.dumps([asked_at, rows]).encode())
    except OSError as error:
        # As on a full disk; the answer itself is known.
        _tell_not_kept(error)
