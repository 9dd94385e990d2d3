"""The environments of a run: a quiet machine, a busy one, a distant server."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from . import processor
from .peers import DIRECT, PING, Route
from .statistics import median

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Bed:
    """An environment in which a row is measured.

    Attributes:
        round_trip: Seconds that a PING takes; 0 if the server is reached directly.
        spinning: Whether as many processes spin as there are processors.
        turn: How many cycles make one turn. If processes compete for processors, the scheduler
            gives each some milliseconds, and a turn must span several of those periods.
    """

    name: str
    title: str
    route: Route = DIRECT
    round_trip: float = 0.0
    spinning: bool = False
    turn: int = 50


# Whether the machine was idle depends on what else ran there; reports show its load.
IDLE = Bed("idle", "no load added, local server")
BUSY = Bed("busy", "all processors busy, local server", spinning=True, turn=100)
DISTANT = tuple(
    Bed(
        f"distant-{milliseconds:g}",
        f"server {milliseconds:g} ms away",
        Route(f"distant-{milliseconds:g}"),
        round_trip=milliseconds / 1000,
        turn=10,
    )
    for milliseconds in (0.3, 1)
)
BEDS = {bed.name: bed for bed in (IDLE, BUSY, *DISTANT)}


# -- busy -----------------------------------------------------------------------------------

SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def spinning(processes: int | None = None) -> Iterator[None]:
    """Let processes spin, by default one for each processor."""
    # In separate sessions, like the servers, because Linux may share processors among sessions.
    spinners = [
        subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
        for _ in range(processes or processor.count())
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


# -- distant --------------------------------------------------------------------------------


class DelayProxy:
    """A process that delays traffic to the servers of some URLs; a context manager.

    Attributes:
        urls: The URLs of the servers through the proxy.
    """

    urls: Sequence[str]

    def __init__(self, *targets: str) -> None:
        self._targets = targets

    def __enter__(self) -> Self:
        ports = [str(urlsplit(url).port) for url in self._targets]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.delay", *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        opened = self._process.stdout.readline().split()
        self.urls = [_at(url, port) for url, port in zip(self._targets, opened, strict=True)]
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def delay(self, seconds: float) -> None:
        """From now on, delay each direction by this time."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds:.9f}\n")

    def calibrate(self, round_trip: float) -> None:
        """Choose the delay so that a PING of the first server, a Redis, takes this time.

        Part of that time is the proxy's own work and the connections to it, which depend on the
        machine.
        """
        delay = round_trip / 2
        for _ in range(3):
            self.delay(delay)
            delay = max(0.0, delay + (round_trip - _ping_seconds(self.urls[0])) / 2)
        self.delay(delay)


def _at(url: str, port: str) -> str:
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    return parts._replace(netloc=f"{user}127.0.0.1:{port}").geturl()


def _ping_seconds(url: str, times: int = 200) -> float:
    parts, took = urlsplit(url), []
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        for _ in range(times):
            began = perf_counter()
            connection.sendall(PING)
            connection.recv(64)
            took.append(perf_counter() - began)
    return median(took)
