"""Starts servers as child processes that end with the process that started them."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

HOST = "127.0.0.1"
BELOW_EPHEMERAL = 10_000, 32_000
"""Ports that Linux and macOS do not choose by themselves for a connection."""

if TYPE_CHECKING:
    from typing_extensions import Self


class ServerNotFound(RuntimeError):
    """The server's program was not found; the message says where it was searched for."""


def free_port() -> int:
    """A free TCP port, which no outgoing connection takes before its server starts, or restarts."""
    while True:
        port = random.SystemRandom().randrange(*BELOW_EPHEMERAL)
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return port


class OwnProcess:
    """One server process with its own directory; a context manager.

    A subclass starts it in ``_launch``, by ``_spawn``, and checks in ``_answers`` whether it is
    ready.

    Args:
        prefix: Of the directory's name.
        port: Fixed instead of free.

    Raises:
        ServerNotFound: ``start``: the program was not found.
        RuntimeError: ``start``: the server did not start; the message ends with its log.
    """

    START_TIMEOUT = 20.0

    def __init__(self, prefix: str, port: int | None = None) -> None:
        # A short path, because that of a Unix socket is limited to about 100 characters.
        self.directory = Path(tempfile.mkdtemp(prefix=prefix))
        self.log = self.directory / "log"
        self.port = port or free_port()
        self._fixed_port = port is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._sitter: subprocess.Popen[bytes] | None = None
        self._creator = os.getpid()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    # -- start and stop --------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the process, unless it runs, and wait until it answers."""
        if self._process is not None:
            return self
        self.directory.mkdir(exist_ok=True)
        for attempt in range(5):
            if attempt and not self._fixed_port:
                # Another process took the free port in the meantime.
                self.port = free_port()
            self._launch()
            if self._wait_until_ready():
                return self
            self.kill()
        tail = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else "(no log)"
        raise RuntimeError(f"{type(self).__name__} did not start on port {self.port}:\n{tail}")

    def stop(self) -> None:
        """Stop the process, if it is running, and remove its files."""
        if os.getpid() != self._creator:
            return  # A forked child must not stop its parent's server.
        self._end(signal.SIGTERM)
        atexit.unregister(self.stop)
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        self._end(signal.SIGKILL)

    def shut_down(self) -> None:
        """Stop the process and keep its files; ``restart`` starts it again."""
        self._end(signal.SIGTERM, patience=20)

    def restart(self) -> None:
        """Kill the server and start it again on the same port."""
        self.kill()
        self._fixed_port = True
        self.start()

    def pause(self) -> None:
        """Pause the process (SIGSTOP): its sockets still accept, but nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- internals ------------------------------------------------------------------------

    def _launch(self) -> None:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def _spawn(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        # In separate sessions, so that Ctrl-C in the terminal reaches only the tests or the
        # demonstration; they stop the server.
        self._process = subprocess.Popen(
            command,
            env=env,
            user=user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # If this process is killed, no ``atexit`` runs; but the pipe ends, and this shell kills the
        # server.
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

    def _end(self, how: signal.Signals, patience: float = 5) -> None:
        sitter, self._sitter = self._sitter, None
        if sitter is not None:
            # Before the server ends, because its process id may be reused after that.
            sitter.kill()
            sitter.wait()
            if sitter.stdin is not None:
                sitter.stdin.close()
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        if how is not signal.SIGKILL:
            # A paused server gets SIGTERM only when it continues.
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
