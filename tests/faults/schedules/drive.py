"""Runs clients against a bed while faults come and go, and writes the history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django_dlock import clock
from tests.support.workers import ROOT

from ..suite.journal import Event, Journal
from .bed import Bed, Fault, Faults
from .checker import SLACK
from .client import LONGEST_HOLD, STOP
from .draws import Draw

HISTORY = "history.jsonl"
"""The name of the file."""

READY = 60.0
"""Seconds in which the clients must have started."""


@dataclass(frozen=True, slots=True)
class Crew:
    """Who locks.

    Attributes:
        clients: Processes, each with ``threads`` and ``coroutines``.
        names: How many names they contend for.
        warm: How many threads of each lock at the same time before that.
        long: Which part of the holds is long.
        longest: The longest hold, as a multiple of the TTL.
    """

    clients: int = 2
    threads: int = 2
    coroutines: int = 2
    names: int = 2
    warm: int = 0
    long: float = 0.15
    longest: float = LONGEST_HOLD


@dataclass
class _Client:
    process: subprocess.Popen[bytes]
    lives: int = 1


@dataclass
class Drive:
    """One run.

    Args:
        tell: Called with each line of progress.
    """

    bed: Bed
    seed: str
    crew: Crew = field(default_factory=Crew)
    tell: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self._journal = Journal(self.bed.directory / HISTORY)
        self._clients: list[_Client] = []
        self._faults = 0
        self._began = 0.0
        self.bed.clients = lambda: [client.process.pid for client in self._clients]

    @property
    def recovery(self) -> float:
        """Seconds after the end of a fault within which every name is granted again."""
        bed = self.bed
        hold = self.crew.longest * bed.ttl
        return bed.ttl + 1.0 + bed.command_timeout + hold + bed.settles + SLACK

    @property
    def faults(self) -> Faults:
        """Those of the bed, and what can happen to a client."""
        paused: list[int] = []

        def pause(aim: float) -> str:
            number = int(aim * len(self._clients))
            paused.append(self._clients[number].process.pid)
            os.kill(paused[-1], signal.SIGSTOP)
            return f"client {number}"

        def resume() -> None:
            while paused:
                with suppress(ProcessLookupError):
                    os.kill(paused.pop(), signal.SIGCONT)

        return {
            **self.bed.faults,
            "client paused": Fault(pause, resume, weight=1),
            "client killed": Fault(self._replace, weight=1, lasts=False),
        }

    def run(self, draws: Iterable[Draw], seconds: float) -> list[Event]:
        """Make these faults for so long, let everything recover, and return the history."""
        faults, bed = self.faults, self.bed
        with self._running():
            self._write(
                "bed",
                store=bed.store,
                versions=bed.versions,
                seed=self.seed,
                seconds=seconds,
                ttl=bed.ttl,
                command_timeout=bed.command_timeout,
                recovery=self.recovery,
            )
            until = clock.now() + seconds
            for draw in draws:
                if clock.now() + draw.pause >= until:
                    break
                time.sleep(draw.pause)
                self._make(faults[draw.what], draw)
            time.sleep(max(0.0, until - clock.now()) + self.recovery + 1.0)
            self._journal.open(STOP)
            for client in self._clients:
                with suppress(subprocess.TimeoutExpired):
                    client.process.wait(self.recovery + 30)
            self._write("end")
        return Journal(self._journal.path).new()

    # -- faults ------------------------------------------------------------------------------

    def _make(self, fault: Fault, draw: Draw) -> None:
        self._faults += 1
        one, facts = self._faults, {"excuse": fault.excuse, "harmless": fault.harmless}
        self._write("fault", id=one, what=draw.what, leap=fault.leap, **facts)
        try:
            met = fault.begin(draw.aim)
            if fault.lasts:
                time.sleep(draw.lasts)
        except Exception as error:
            met = f"not made: {error!r}"[:200]
        finally:
            fault.end()
            self._write("healed", id=one)
        lasted = f" for {draw.lasts:.1f} s" if fault.lasts else ""
        self.tell(f"{clock.now() - self._began:7.1f} s  {draw.what}{lasted}: {met}")

    def _replace(self, aim: float) -> str:
        """Kill a client, and start another one."""
        number = int(aim * len(self._clients))
        client = self._clients[number]
        client.process.kill()
        client.process.wait()
        self._write("killed", pid=client.process.pid)
        self._clients[number] = self._start(number, client.lives + 1)
        return f"client {number}"

    # -- clients -----------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            self._clients = [self._start(number) for number in range(self.crew.clients)]
            reader, give_up = Journal(self._journal.path), clock.now() + READY
            ready = 0
            while ready < len(self._clients):
                ready += sum(event["event"] == "ready" for event in reader.new())
                if clock.now() > give_up:
                    raise RuntimeError(f"the clients do not start; see {self.bed.directory}")
                time.sleep(0.05)
            self._began = clock.now()
            yield
        finally:
            for client in self._clients:
                client.process.kill()
                client.process.wait()

    def _start(self, number: int, life: int = 1) -> _Client:
        configuration: dict[str, Any] = {
            "dlocks": self.bed.dlocks,
            "databases": self.bed.databases,
            "history": str(self._journal.path),
            "name": f"c{number}.{life}",
            "names": [f"n{each}" for each in range(self.crew.names)],
            "seed": self.seed,
            "ttl": self.bed.ttl,
            "threads": self.crew.threads,
            "coroutines": self.crew.coroutines,
            "warm": self.crew.warm,
            "long": self.crew.long,
            "longest": self.crew.longest,
        }
        log = Path(self.bed.directory / f"client-{number}.log")
        with log.open("ab") as output:
            command = [sys.executable, "-m", "tests.faults.schedules.client"]
            process = subprocess.Popen(
                [*command, json.dumps(configuration)], cwd=ROOT, stdout=output, stderr=output
            )
        return _Client(process, life)

    def _write(self, event: str, **facts: Any) -> None:
        self._journal.write(event, at=clock.now(), **facts)
