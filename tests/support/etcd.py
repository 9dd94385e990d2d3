"""etcd servers of the tests: one alone, or a cluster of three."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final

from django_dlock.backends.etcd.entries import encoded, range_after
from testproject.processes import HOST, OwnProcess, ServerNotFound, free_port


@final
class EtcdServer(OwnProcess):
    """One etcd of our own, without durability; a context manager.

    Its shortest lease is one second.

    Args:
        tls: Certificate and key; clients must show one that it has signed.
        timing: Milliseconds between heartbeats, and until an election.

    Raises:
        ServerNotFound: ``start``: etcd is not installed.
    """

    def __init__(
        self, *, tls: tuple[Path, Path] | None = None, timing: tuple[int, int] = (10, 100)
    ) -> None:
        super().__init__("dlock-etcd-")
        self.tls, self._timing = tls, timing
        self._peers = f"http://{HOST}:{free_port()}"
        self._name, self._cluster = "alone", ""

    @property
    def url(self) -> str:
        """Address of the JSON gateway."""
        return f"http{'s' if self.tls else ''}://{HOST}:{self.port}"

    def call(self, path: str, *, token: str = "", **body: Any) -> dict[str, Any]:
        """The answer to a call of the gateway; for calls that the backend does not make."""
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def token_of(self, name: str, password: str) -> str:
        """The token with which a user makes calls."""
        token: str = self.call("auth/authenticate", name=name, password=password)["token"]
        return token

    def allow(self, kind: str, role: str, prefix: str, *, token: str = "") -> None:
        """Give a role the right ``READ`` or ``READWRITE`` for the keys with the prefix."""
        area = {"key": encoded(prefix), "range_end": range_after(prefix)}
        self.call("auth/role/grant", token=token, name=role, perm={"permType": kind, **area})

    @property
    def leases(self) -> set[str]:
        """The ids of all leases."""
        return {lease["ID"] for lease in self.call("lease/leases").get("leases", ())}

    @property
    def revision(self) -> int:
        return int(self.call("kv/range", key="AA==")["header"]["revision"])

    @property
    def leads(self) -> bool:
        """Whether it is the leader of its cluster."""
        status = self.call("maintenance/status")
        return status.get("leader") == status["header"]["member_id"]

    def pause(self) -> None:
        """Pause it; return once all its threads have stopped, so that none answers a call."""
        super().pause()
        for task in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            while task.read_text().rpartition(")")[2].split()[0] not in "Tt":
                time.sleep(0.001)

    # -- inside ------------------------------------------------------------------------

    def _launch(self) -> None:
        program = shutil.which("etcd")
        if program is None:
            raise ServerNotFound("no etcd: install the etcd-server package")
        if not (self._cluster or self._fixed_port):
            # For each attempt: another process may have taken that of the attempt before.
            self._peers = f"http://{HOST}:{free_port()}"
        heartbeat, election = self._timing
        members = self._cluster or f"{self._name}={self._peers}"
        command = [program, "--name", self._name, "--data-dir", str(self.directory / "data")]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self._peers]
        command += ["--initial-advertise-peer-urls", self._peers, "--initial-cluster", members]
        command += ["--heartbeat-interval", str(heartbeat), "--election-timeout", str(election)]
        command += [
            "--unsafe-no-fsync",
            "--bcrypt-cost",
            "4",
            "--logger",
            "zap",
            "--log-outputs",
            str(self.log),
        ]
        if self.tls is not None:
            certificate, key = map(str, self.tls)
            command += ["--cert-file", certificate, "--key-file", key]
            command += ["--client-cert-auth", "--trusted-ca-file", certificate]
        self._spawn(command)

    def _answers(self) -> bool:
        if self.tls is not None:
            # The log is enough; a request would need the certificates.
            return "serving client traffic" in self._logged
        try:
            return "leader" in self.call("maintenance/status")
        except (OSError, ValueError):
            return False

    @property
    def _logged(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@contextmanager
def cluster() -> Iterator[list[EtcdServer]]:
    """Three members, of which one leads."""
    members = [EtcdServer(timing=(50, 500)) for _ in range(3)]
    entries = [f"m{number}={member._peers}" for number, member in enumerate(members)]
    with ExitStack() as stack:
        for number, member in enumerate(members):
            member._name, member._cluster = f"m{number}", ",".join(entries)
            stack.callback(member.stop)
            # Without a majority, a member takes its time to stop.
            stack.callback(member.kill)
            member._launch()
        for member in members:
            if not member._wait_until_ready():
                raise RuntimeError(f"a member did not come up: {member._logged[-2000:]}")
        yield members


def certificates(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=dlock", "-addext", f"subjectAltName=IP:{HOST}"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
