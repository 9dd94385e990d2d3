"""What the stores have in common: servers behind proxies, and what can happen to them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tests.support.aliases import Dlocks
from tests.support.proxy import Proxy


def nothing() -> None:
    """The end of a fault that ends by itself."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that can happen to a store.

    Attributes:
        begin: Makes it; gets a number from 0 to 1, which chooses among the targets, and returns
            what it met.
        end: Ends it, so that the store recovers.
        weight: How likely it is.
        excuse: Until so many seconds after its end, the store may have forgotten leases, or let
            them end early; ``None`` if it must not.
        lasts: Whether it lasts until ``end``.
        harmless: No lease may be lost by it, except for its own sake.
        leap: Seconds by which the server's clock, and so its tokens, may be ahead during it.
    """

    begin: Callable[[float], str]
    end: Callable[[], None] = nothing
    weight: int = 2
    excuse: float | None = None
    lasts: bool = True
    harmless: bool = False
    leap: float = 0.0


Faults: TypeAlias = dict[str, Fault]


class Server(Protocol):
    """A server process."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def restart(self) -> None: ...


class Bed:
    """The servers of one store; a context manager.

    Attributes:
        store: What it is called.
        ttl, command_timeout: Of its alias.
        settles: Seconds that it may take, besides a TTL, until it grants again after a fault.
        clients: The process ids of the present clients.
    """

    store = ""
    ttl = 3.0
    command_timeout = 0.9
    settles = 0.0

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stack = ExitStack()
        self.clients: Callable[[], list[int]] = list

    def __enter__(self) -> Bed:
        try:
            self.start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    def start(self) -> None:
        """Start the servers, on ``stack``."""
        raise NotImplementedError

    @property
    def dlocks(self) -> Dlocks:
        """The settings of the clients."""
        raise NotImplementedError

    @property
    def databases(self) -> dict[str, Any]:
        return {}

    @property
    def faults(self) -> Faults:
        raise NotImplementedError

    @property
    def versions(self) -> str:
        """The program of its servers, and its version."""
        return ""

    def entry(self, backend: str, location: Any = None, **options: Any) -> dict[str, Any]:
        """An entry of ``DLOCKS``."""
        entry: dict[str, Any] = {
            "BACKEND": f"django_dlock.backends.{backend}",
            "TTL": self.ttl,
            "OPTIONS": {"command_timeout": self.command_timeout, **options},
        }
        return entry if location is None else {**entry, "LOCATION": location}


def _chosen(some: Sequence[Any], aim: float) -> tuple[int, Any]:
    number = min(len(some) - 1, int(aim * len(some)))
    return number, some[number]


def network(proxies: Sequence[Proxy], *, name: str = "") -> Faults:
    """What the network can do between the clients and one of some servers."""
    met: list[Proxy] = []

    def on_one(make: Callable[[Proxy], None]) -> Callable[[float], str]:
        def begin(aim: float) -> str:
            number, proxy = _chosen(proxies, aim)
            met.append(proxy)
            make(proxy)
            return f"server {number}"

        return begin

    def heal() -> None:
        while met:
            proxy = met.pop()
            proxy.delay = 0.0
            proxy.heal()

    def readmit() -> None:
        while met:
            met.pop().accept()

    def slow(proxy: Proxy) -> None:
        proxy.delay = 0.3

    found = {
        "cut": Fault(on_one(Proxy.cut), met.clear, lasts=False, harmless=True),
        "refused": Fault(on_one(Proxy.refuse), readmit),
        "black hole": Fault(on_one(Proxy.black_hole), heal),
        "half-open: replies lost": Fault(on_one(lambda one: one.silence("down")), heal),
        "half-open: requests lost": Fault(on_one(lambda one: one.silence("up")), heal),
        "connections forgotten": Fault(
            on_one(lambda one: one.forget()), met.clear, lasts=False, harmless=True
        ),
        "slow replies": Fault(on_one(slow), heal),
    }
    return {f"{name}{what}": fault for what, fault in found.items()}


def process(
    servers: Sequence[Server],
    *,
    killed: str = "killed",
    excuse: float | None = None,
    name: str = "",
) -> Faults:
    """What can happen to one of some server processes.

    Args:
        killed: What it is called when one is killed, and started again.
        excuse: Whether it forgets leases then; see ``Fault``.
    """
    met: list[Server] = []

    def pause(aim: float) -> str:
        number, server = _chosen(servers, aim)
        met.append(server)
        signal_tree(server.pid, signal.SIGSTOP)
        return f"server {number}"

    def resume() -> None:
        while met:
            signal_tree(met.pop().pid, signal.SIGCONT)

    def kill(aim: float) -> str:
        number, server = _chosen(servers, aim)
        met.append(server)
        server.kill()
        return f"server {number}"

    def restart() -> None:
        while met:
            met.pop().restart()

    return {
        f"{name}paused": Fault(pause, resume),
        f"{name}{killed}": Fault(kill, restart, excuse=excuse),
    }


def signal_tree(pid: int, how: signal.Signals) -> None:
    """Send a signal to a process and to all that it has started."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    todo = [pid]
    while todo:
        one = todo.pop()
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, how)
        todo += parents.get(one, [])


def weights(faults: Mapping[str, Fault]) -> dict[str, int]:
    """How likely each fault is."""
    return {what: fault.weight for what, fault in faults.items()}
