"""Starts and stops everything that the demonstration needs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testproject import postgres
from testproject.servers import RedisServer

from .broker import Broker, FileBroker, RedisBroker
from .journal import Journal
from .locks import DatabaseLocks, Locks, RedisLocks

KINDS = ("redis", "sqlite", "postgresql")
"""The store of the locks; Redis also keeps the messages, otherwise files do."""

ROOT = Path(__file__).resolve().parent.parent.parent


class Stage:
    """A database, stores for locks and messages, and processes that use them; a context manager.

    At its end it has stopped all processes, and removed all files.

    Args:
        kind: One of ``KINDS``.
        metrics: Whether all processes count for Prometheus.

    Raises:
        ServerNotFound: There is no server of that kind.
    """

    def __init__(self, kind: str = "redis", *, metrics: bool = False) -> None:
        self.kind, self.metrics = kind, metrics
        self._stack = contextlib.ExitStack()
        self._names: dict[int, str] = {}
        # By pid; each shell that will kill a process is stored with the pid of that process.
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sitters: dict[int, subprocess.Popen[bytes]] = {}
        self._may_end: set[int] = set()

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlock-demo-"))
            self.directory = Path(directory)
            self.journal = Journal(self.directory)
            # For this process and all that it starts; replaces the caller's settings.
            os.environ.update(
                DJANGO_SETTINGS_MODULE="testproject.demo.settings",
                DLOCK_DB=str(self.directory / "shop.sqlite3"),
                DLOCK_DEMO_DIR=directory,
                DLOCK_DEMO_KIND=self.kind,
            )
            if self.metrics:
                (self.directory / "metrics").mkdir()
                # Before prometheus-client is imported.
                os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self.directory / "metrics")
            self.locks = self._make_locks(stack)
            _set_up_django()
            stack.callback(self._end_processes)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _make_locks(self, stack: contextlib.ExitStack) -> Locks:
        """Start the store of the locks, and set its address for all processes."""
        if self.kind == "redis":
            redis = stack.enter_context(RedisServer())
            os.environ["REDIS_URL"] = redis.url
            return RedisLocks(redis)
        for folder in ("queue", "delivered"):
            (self.directory / folder).mkdir()
        if self.kind == "postgresql":
            os.environ["DLOCK_DEMO_POSTGRES"] = stack.enter_context(postgres.database())
        return DatabaseLocks(self.kind)

    def broker(self, queues: Sequence[str]) -> Broker:
        """The broker from which the workers of these queues get their messages."""
        if self.kind == "redis":
            return RedisBroker(queues)
        return FileBroker(queues, self.directory / "queue", self.directory / "delivered")

    def start_worker(self, queues: Sequence[str], name: str, *, children: int = 4) -> None:
        if self.kind != "redis":
            (self.directory / "delivered" / name).mkdir()
        self.start(
            *("-m", "celery", "-A", "testproject", "worker", "--pool", "prefork"),
            *("--concurrency", str(children), "--queues", ",".join(queues)),
            *("--hostname", f"{name}@demo", "--loglevel", "WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            name=name,
        )

    def start(self, *arguments: str, name: str) -> int:
        """Start a Python process with its own log, in its own session; returns its pid.

        So Ctrl-C in the terminal reaches only this process, and children can be ended together
        with their parent.
        """
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                # Temporary files of killed processes are removed with this directory.
                env={**os.environ, "TMPDIR": str(self.directory), "DLOCK_DEMO_WORKER": name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[process.pid] = process
        self._names[process.pid] = name
        # If this process is killed, it cannot clean up; but the pipe ends, and this shell kills
        # the session.
        self._sitters[process.pid] = subprocess.Popen(
            ["sh", "-c", 'read -r line || kill -9 "-$0"', str(process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return process.pid

    def name_of(self, pid: int) -> str:
        """The name of the started process; ``pid`` may be that of a child."""
        return self._names[os.getpgid(pid)]

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def dead(self) -> list[subprocess.Popen[bytes]]:
        """Processes that have ended by themselves."""
        return [
            process
            for pid, process in self._processes.items()
            if process.poll() is not None and pid not in self._may_end
        ]

    def freeze(self, pid: int) -> None:
        """Pause the process and all its children; ``pid`` may be that of a child."""
        os.killpg(os.getpgid(pid), signal.SIGSTOP)

    def wake(self, pid: int) -> None:
        """Let the process continue. From now on, it may end by itself."""
        self._may_end.add(pid)
        os.killpg(pid, signal.SIGCONT)

    def kill(self, pid: int) -> None:
        """Kill the process and all its children, as if a machine failed.

        ``pid`` may be that of a child.
        """
        self.end(os.getpgid(pid))

    def end(self, pid: int) -> None:
        """End the process and all its children, and no longer track it.

        Also if it has ended already, because its children may still be running.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._processes.pop(pid).wait()
        self._sitters.pop(pid).communicate(b"\n")
        self._may_end.discard(pid)

    def logs(self, characters: int = 2000) -> str:
        """The end of every log that is not empty."""
        logs = sorted(self.directory.glob("*.log"))
        texts = {log.stem: log.read_text(errors="replace")[-characters:] for log in logs}
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items() if text)

    def _end_processes(self) -> None:
        # Kill them; there is nothing to save.
        for pid in list(self._processes):
            self.end(pid)


def _set_up_django() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
