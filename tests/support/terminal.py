"""A terminal with a shell in it, in which a test types what a page tells its reader to type."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

SHELL, PYTHON, CONTINUED = "reader$ ", ">>> ", "... "
PATIENCE = 180.0
PROMPT = re.compile(rf"^({re.escape(SHELL)}|>>> |\.\.\. |Password.*: )", re.MULTILINE)

# A shell needs a controlling terminal for Ctrl-C, and getpass for what it asks.
CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A bash; everything in it ends with ``close``.

    Args:
        folder: Where it starts.
        env: Its environment.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._mine, theirs = pty.openpty()
        # Wide, so that no line is wrapped.
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 100, 1000, 0, 0))
        bash = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *bash],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**env, "PS1": SHELL, "TERM": "dumb", "VIRTUAL_ENV_DISABLE_PROMPT": "1"},
            start_new_session=True,
        )
        os.close(theirs)
        self.text, self._seen, self.prompt = "", 0, ""
        self._more = threading.Condition()
        # Read all the time: a worker that nobody reads would stop at a full terminal.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait()

    def _read(self) -> None:
        # At the end of the other side, this raises.
        with contextlib.suppress(OSError):
            while data := os.read(self._mine, 65536):
                with self._more:
                    self.text += data.decode(errors="replace").replace("\r", "")
                    self._more.notify_all()

    def _until(self, found: Callable[[], re.Match[str] | None], what: str) -> re.Match[str]:
        with self._more:
            came = self._more.wait_for(found, PATIENCE)
            assert came, f"{what} did not come: {self.text[self._seen - 2000 :]}"
            match = found()
        assert match
        return match

    def wait(self, typed: str | None = None) -> str:
        """What was printed before the next prompt, without the typed line."""
        echoed = re.compile("" if typed is None else re.escape(typed) + r"\n")
        echo = self._until(lambda: echoed.search(self.text, self._seen), f"echo of {typed!r}")
        prompt = self._until(lambda: PROMPT.search(self.text, echo.end()), f"end of {typed!r}")
        self._seen, self.prompt = prompt.end(), prompt[1]
        return self.text[echo.end() : prompt.start()]

    def send(self, line: str) -> None:
        """Type a line, and do not wait for a prompt."""
        os.write(self._mine, line.encode() + b"\n")

    def type(self, line: str) -> str:
        """Type a line, and wait for what is printed."""
        self.send(line)
        return self.wait(line)

    def answer(self, secret: str) -> str:
        """Type what is not shown."""
        assert self.prompt.startswith("Password"), self.prompt
        self.send(secret)
        return self.wait()

    def run(self, command: str) -> str:
        """A command that must succeed."""
        assert self.prompt == SHELL, f"in a Python shell: {command}"
        shown = self.type(command)
        if self.prompt == SHELL:
            status = self.type("echo status $?").strip()
            assert status == "status 0", f"{command} ended with {status}: {shown}"
        return shown

    def python(self, code: str) -> str:
        """Paste into a Python shell."""
        assert self.prompt == PYTHON, f"not in a Python shell: {code}"
        shown = "".join(self.type(line) for line in code.splitlines())
        return shown + (self.type("") if self.prompt == CONTINUED else "")

    def leave_python(self) -> None:
        assert self.prompt == PYTHON
        os.write(self._mine, b"\x04")
        self.wait()

    def interrupt(self) -> None:
        """End with Ctrl-C what runs here."""
        os.write(self._mine, b"\x03")
        # Some programs write no new line before they end.
        shell = re.compile(re.escape(SHELL))
        self._seen = self._until(lambda: shell.search(self.text, self._seen), "the end").end()
        self.prompt = SHELL

    def close(self) -> None:
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if os.getsid(pid) == self._process.pid:
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(PATIENCE)
        os.close(self._mine)
