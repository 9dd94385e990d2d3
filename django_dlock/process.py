"""Which process is this, and is that one dead?

A missing heartbeat is a time-out, not a proof: a stopped process may wake up. The same host
name and pid in two containers are two processes. So identity is the boot, the PID namespace,
the pid and its start time, and death is believed only where those can be read.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from typing import Any, Literal, NamedTuple

__all__ = ["DeathProof", "ProcessIdentity", "current", "death_proof", "forget", "neighbour"]

DeathProof = Literal["gone", "rebooted"]

# The inode of the first PID namespace of a Linux machine (PROC_PID_INIT_INO in the kernel).
_FIRST_PID_NAMESPACE = "4026531836"


class ProcessIdentity(NamedTuple):
    """One run of one process.

    Attributes:
        id: Random, new for every process and for every fork.
        machine_id, boot_id, pid_namespace, start_time: Empty where the system does not tell;
            nothing is then proven from them.
    """

    id: str
    host: str
    machine_id: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: str

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> ProcessIdentity:
        """Rebuild what ``as_dict`` gave; a missing fact reads as unknown.

        Raises:
            TypeError, ValueError: ``facts`` was not written by this package.
        """
        text = {
            key: str(facts.get(key, ""))
            for key in ("id", "host", "machine_id", "boot_id", "pid_namespace", "start_time")
        }
        return cls(pid=int(facts["pid"]), **text)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _sysctl(name: str) -> str:  # pragma: no cover - macOS only
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=2, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")
    except OSError:
        return ""


def _machine() -> tuple[str, str, str]:
    """Machine id, boot id and PID namespace of this process."""
    if sys.platform == "darwin":  # pragma: no cover - macOS only
        return _sysctl("kern.uuid"), _sysctl("kern.bootsessionuuid"), "macos"
    namespace = _pid_namespace()
    # A container's machine id comes from its image, which may run on many machines at once:
    # another boot id would then prove nothing.
    machine_id = _read("/etc/machine-id") if namespace == _FIRST_PID_NAMESPACE else ""
    return machine_id, _read("/proc/sys/kernel/random/boot_id"), namespace


def _stat(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process, ``None`` where they cannot be read."""
    line = _read(f"/proc/{pid}/stat")
    if not line:
        return None
    # The command's name stands in parentheses and may itself hold blanks and parentheses.
    fields = line[line.rindex(")") + 2 :].split()
    return fields[0], fields[19]


_current: ProcessIdentity | None = None


def current() -> ProcessIdentity:
    """The identity of this process, read once and again after a fork."""
    global _current
    pid = os.getpid()
    known = _current
    # Compared here and not only reset after a fork: a child made without Python's fork hooks
    # must not speak in its parent's name.
    if known is None or known.pid != pid:
        machine_id, boot_id, namespace = _machine()
        stat = _stat(pid)
        known = _current = ProcessIdentity(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            machine_id=machine_id,
            boot_id=boot_id,
            pid_namespace=namespace,
            pid=pid,
            start_time=stat[1] if stat else "",
        )
    return known


def forget() -> None:
    """Take a new identity at the next use; called in a forked child, whose pid may be reused."""
    global _current
    _current = None


def neighbour(pid: int) -> ProcessIdentity:
    """The identity of another process of this machine and PID namespace, as a child of ours is.

    Its start time is unknown where it is gone by now.
    """
    stat = _stat(pid)
    return current()._replace(id="", pid=pid, start_time=stat[1] if stat else "")


def death_proof(other: ProcessIdentity, *, silent: bool = False) -> DeathProof | None:
    """Why ``other`` is certainly dead, or ``None`` where that cannot be proven from here.

    Args:
        silent: Its heartbeat is overdue. Another boot id on the same machine id counts only
            then: cloned machines share a machine id, and a beating heart refutes the proof.
    """
    me = current()
    if not other.boot_id or not me.boot_id:
        return None
    if other.boot_id != me.boot_id:
        same_machine = bool(me.machine_id) and other.machine_id == me.machine_id
        return "rebooted" if same_machine and silent else None
    if not me.pid_namespace or other.pid_namespace != me.pid_namespace:
        return None
    return "gone" if _is_gone(other) else None


def _is_gone(other: ProcessIdentity) -> bool:
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        # Somebody else's process, perhaps hidden from /proc: it exists.
        pass
    stat = _stat(other.pid)
    if stat is None:
        return False
    state, start_time = stat
    if other.start_time and start_time != other.start_time:
        return True
    # A zombie runs no more, unless only its first thread has ended.
    return state in "ZX" and _threads(other.pid) <= 1


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
