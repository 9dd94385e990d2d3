"""Starts a real RabbitMQ on free ports and stops it; for the tests and the fault suite.

It shares nothing with another RabbitMQ on the machine: no port mapper, no cookie and no
configuration file.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import final

from .processes import HOST, OwnProcess, ServerNotFound, free_port

PLACES = ("/usr/lib/rabbitmq/bin", "/opt/homebrew/sbin", "/usr/local/sbin")
"""Searched before ``PATH``, because the script in Debian's ``PATH`` requires root."""

HEADER = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"


def find_rabbitmq_server() -> str | None:
    """Path of a server that can be started; ``None`` if there is none.

    Searched in ``DLOCK_RABBITMQ_SERVER``, in the usual places, and on ``PATH``.
    """
    named = os.environ.get("DLOCK_RABBITMQ_SERVER")
    if named:
        return shutil.which(named)
    return shutil.which("rabbitmq-server", path=os.pathsep.join((*PLACES, os.defpath)))


@final
class RabbitServer(OwnProcess):
    """A new RabbitMQ node; a context manager.

    Durable queues with persistent messages, such as Celery's, survive ``kill`` and ``restart``;
    ``stop`` removes everything.

    Args:
        consumer_timeout: Seconds after which a channel is closed if its consumer has not
            acknowledged a message; 30 minutes by default, as in RabbitMQ.
        channel_tick_interval: Seconds between two checks of that timeout.

    Raises:
        ServerNotFound: rabbitmq-server was not found.
        RuntimeError: The server did not start; the message ends with its log.
    """

    START_TIMEOUT = 60.0

    def __init__(
        self, *, consumer_timeout: float = 1800.0, channel_tick_interval: float = 60.0
    ) -> None:
        super().__init__("dlock-rabbit-")
        self.consumer_timeout = consumer_timeout
        self.channel_tick_interval = channel_tick_interval
        self.name = f"dlock-{secrets.token_hex(4)}@localhost"
        self._mapper = _PortMapper()

    @property
    def url(self) -> str:
        """Address for a client."""
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def stop(self) -> None:
        """Kill the process, because there is nothing to save, and remove its files."""
        if os.getpid() == self._creator:
            self.kill()
        super().stop()
        self._mapper.stop()

    def control(self, *arguments: str) -> str:
        """Run ``rabbitmqctl``; returns its output.

        Raises:
            ServerNotFound: It is not installed.
            CalledProcessError: It failed.
        """
        server = find_rabbitmq_server()
        if server is None:
            raise ServerNotFound("RabbitMQ is not installed")
        program = shutil.which("rabbitmqctl", path=str(Path(server).parent)) or "rabbitmqctl"
        return subprocess.run(
            [program, "-n", self.name, *arguments],
            env=self._env(),
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout

    # -- internals ------------------------------------------------------------------------

    def _launch(self) -> None:
        binary = find_rabbitmq_server()
        if binary is None:
            raise ServerNotFound(
                "no RabbitMQ: install rabbitmq-server, or name one in DLOCK_RABBITMQ_SERVER"
            )
        self._mapper.start()
        self._configure()
        self._spawn([binary], self._env())

    def _configure(self) -> None:
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = {HOST}:{self.port}\n"
            "log.console = false\n"
            "log.file.level = info\n"
            "disk_free_limit.absolute = 1MB\n"
            "total_memory_available_override_value = 2GB\n"
            "num_acceptors.tcp = 2\n"
        )
        (self.directory / "advanced.config").write_text(
            f"[{{rabbit, [{{consumer_timeout, {_ms(self.consumer_timeout)}}},"
            f" {{channel_tick_interval, {_ms(self.channel_tick_interval)}}}]}}].\n"
        )
        (self.directory / "enabled_plugins").write_text("[].\n")

    def _env(self) -> dict[str, str]:
        """The environment, without settings of another node on this machine."""
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RABBITMQ_", "ERL_"))
        }
        return env | {
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(self._mapper.port),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_CRASH_DUMP": str(self.directory / "crash.dump"),
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.directory / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.directory / "generated"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_LOGS": str(self.log),
            "RABBITMQ_PID_FILE": str(self.directory / "pid"),
            # One scheduler of each kind, to leave the processors to other processes.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +SDcpu 1:1 +SDio 2 +A 2",
            # Lets the start script exec the server instead of starting a child process.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=2) as connection:
                connection.sendall(HEADER)
                return connection.recv(1) == METHOD_FRAME
        except OSError:
            return False


@final
class _PortMapper(OwnProcess):
    """Erlang's epmd; without ours, each node would start one that never ends."""

    def __init__(self) -> None:
        super().__init__("dlock-epmd-")

    def _launch(self) -> None:
        found = [shutil.which("epmd"), *sorted(glob.glob("/usr/lib/erlang/erts-*/bin/epmd"))]
        binary = next(filter(None, found), None)
        if binary is None:
            raise ServerNotFound("no epmd, which comes with Erlang, and RabbitMQ needs it")
        env = {name: value for name, value in os.environ.items() if not name.startswith("ERL_")}
        self._spawn([binary, "-port", str(self.port), "-address", HOST], env)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1):
                return True
        except OSError:
            return False


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
