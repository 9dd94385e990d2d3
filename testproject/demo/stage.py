"""Everything that the demonstration starts, and the end of all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testproject.servers import RedisServer

from .journal import Journal

__all__ = ["Stage"]

ROOT = Path(__file__).resolve().parent.parent.parent


class Stage:
    """A Redis, an SQLite file, and processes that use both; a context manager.

    Leaves nothing behind: no process, however it came to its end, and no file.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sitters: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlock-demo-"))
            self.directory = Path(directory)
            self.redis = stack.enter_context(RedisServer())
            self.journal = Journal(self.directory)
            # For this process and for all that it starts; nothing of the caller's is used.
            os.environ.update(
                DJANGO_SETTINGS_MODULE="testproject.demo.settings",
                REDIS_URL=self.redis.url,
                DLOCK_DB=str(self.directory / "shop.sqlite3"),
                DLOCK_DEMO_DIR=directory,
            )
            _set_up_django()
            stack.callback(self._end_processes)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start_worker(self, queues: Sequence[str], name: str, *, children: int = 4) -> None:
        self.start(
            *("-m", "celery", "-A", "testproject", "worker", "--pool", "prefork"),
            *("--concurrency", str(children), "--queues", ",".join(queues)),
            *("--hostname", f"{name}@demo", "--loglevel", "WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            name=name,
        )

    def start(self, *arguments: str, name: str) -> None:
        """Start a Python process, with a log of its own, in a session of its own.

        So Ctrl-C at the terminal is for us alone, and its children can be ended with it.
        """
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                # What they leave there when they are killed goes away with the stage.
                env={**os.environ, "TMPDIR": str(self.directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        # Ends the session when this process is killed and cleans nothing up: the pipe ends.
        self._sitters.append(
            subprocess.Popen(
                ["sh", "-c", 'read -r line || kill -9 "-$0"', str(process.pid)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        )

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def dead(self) -> list[subprocess.Popen[bytes]]:
        """Processes that have ended although nobody asked them to."""
        return [process for process in self._processes if process.poll() is not None]

    def logs(self, characters: int = 2000) -> str:
        """The end of every log that has something to tell."""
        logs = sorted(self.directory.glob("*.log"))
        texts = {log.stem: log.read_text(errors="replace")[-characters:] for log in logs}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    def _end_processes(self) -> None:
        # By force: what they would end in order goes away with the stage. Also where one has
        # ended already, for its children may have outlived it.
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for sitter in self._sitters:
            sitter.communicate(b"\n")


def _set_up_django() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
