"""A ZooKeeper for the tests: one server, or an ensemble of three, of the installed package."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

from testproject.processes import HOST, OwnProcess, ServerNotFound, free_port

__all__ = ["ServerNotFound", "ZooKeeperServer", "ensemble"]

JAR = "/usr/share/java/zookeeper.jar"
MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
TICK = 200
"""Milliseconds per tick. A session ends up to one tick late, and lasts at least two."""


def find_jar() -> str | None:
    """The server's jar, whose manifest names the others; ``DLOCK_ZOOKEEPER_JAR`` names another."""
    jar = os.environ.get("DLOCK_ZOOKEEPER_JAR", JAR)
    return jar if os.path.exists(jar) else None


@final
class ZooKeeperServer(OwnProcess):
    """A new ZooKeeper; a context manager. It keeps its data over ``restart``.

    Args:
        settings: Lines for its configuration, by key.
        properties: Of the virtual machine, without ``-D``.
        number: Of this server in its ensemble; 0 if it is alone.
        members: The ensemble's lines.
    """

    START_TIMEOUT = 60.0

    def __init__(
        self,
        *,
        settings: Mapping[str, object] | None = None,
        properties: Sequence[str] = (),
        number: int = 0,
        members: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        super().__init__("dlock-zookeeper-", port)
        self._settings, self._properties = dict(settings or {}), tuple(properties)
        self._number, self._members = number, dict(members or {})

    @property
    def location(self) -> str:
        return f"{HOST}:{self.port}"

    def ask(self, word: str) -> str:
        """The answer to a command of four letters, such as ``srvr``; empty if there is none."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as asked:
                asked.sendall(word.encode())
                return b"".join(iter(lambda: asked.recv(65536), b"")).decode()
        except OSError:
            return ""

    @property
    def mode(self) -> str:
        """``standalone``, ``leader`` or ``follower``; empty while it serves nobody."""
        return self.ask("srvr").partition("Mode: ")[2].partition("\n")[0]

    def pause(self) -> None:
        """Pause the process, and return once all of its threads have stopped.

        The thread that gets the signal may run late on a busy machine; the others go on until then.
        """
        super().pause()
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def lose_data(self) -> None:
        """Delete what it has stored, while it is down."""
        shutil.rmtree(self._data / "version-2", ignore_errors=True)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _launch(self) -> None:
        java, jar = shutil.which("java"), find_jar()
        if java is None or jar is None:
            raise ServerNotFound(
                "no ZooKeeper: install the zookeeper package, which brings Java, or name its jar "
                "in DLOCK_ZOOKEEPER_JAR"
            )
        self._data.mkdir(exist_ok=True)
        (self._data / "myid").write_text(f"{self._number}\n")
        settings = {
            "tickTime": TICK,
            "initLimit": 50,
            "syncLimit": 25,
            "maxSessionTimeout": 120_000,
            "dataDir": self._data,
            "clientPort": self.port,
            "clientPortAddress": HOST,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "*",
            **self._settings,
            **self._members,
        }
        config = self.directory / "zoo.cfg"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        options = [
            *("-Xmx128m", "-Xshare:auto", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            # Nothing here has to outlive the machine.
            *("-Dzookeeper.forceSync=no", "-Dzookeeper.admin.enableServer=false"),
            *(f"-D{each}" for each in self._properties),
        ]
        # TLS needs two jars that Debian's manifest does not name.
        jars = [jar, *(f"{Path(jar).parent}/netty-{part}.jar" for part in ("codec", "resolver"))]
        self._spawn([java, *options, "-cp", ":".join(jars), MAIN, str(config)])

    def _answers(self) -> bool:
        # A member of an ensemble serves nobody before the others have come up.
        if self._members:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
                return True
            return False
        return bool(self.mode)


@contextlib.contextmanager
def ensemble() -> Iterator[list[ZooKeeperServer]]:
    """Three servers that serve as one."""
    ports = [(free_port(), free_port(), free_port()) for _ in range(3)]
    members = {
        f"server.{number}": f"{HOST}:{quorum}:{election}"
        for number, (_, quorum, election) in enumerate(ports, 1)
    }
    servers = [
        ZooKeeperServer(number=number, members=members, port=client)
        for number, (client, _, _) in enumerate(ports, 1)
    ]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()
