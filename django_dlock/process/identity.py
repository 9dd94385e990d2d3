"""Identifies a process by host name, boot id, PID namespace, pid and start time.

The same host name and pid in two containers are two processes, and pids are reused. ``death``
compares identities to prove that a process is dead.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from typing import Any, NamedTuple

__all__ = ["ProcessIdentity", "current", "identity_of", "proc_stat", "reset"]

# The inode of the first PID namespace of a Linux machine (PROC_PID_INIT_INO in the kernel).
_FIRST_PID_NAMESPACE = "4026531836"

LARGEST_PID = 2**31 - 1
"""The largest that any system has room for."""


class ProcessIdentity(NamedTuple):
    """One run of one process.

    Attributes:
        id: Random, new for every process and for every fork.
        machine_id, boot_id, pid_namespace, start_time: Empty if the system does not provide
            them; then they prove nothing.
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
        """The identity from what ``as_dict`` returned; a missing entry counts as unknown.

        Raises:
            KeyError, TypeError, ValueError: ``facts`` was not written by this package.
        """
        pid = facts["pid"]
        # The system is asked about the pid, and 0 and negative ones mean groups of processes.
        if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid <= LARGEST_PID:
            raise ValueError(f"a pid is from 1 to {LARGEST_PID}")
        known: dict[str, Any] = {key: str(facts.get(key, "")) for key in cls._fields}
        return cls(**{**known, "pid": pid})


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            # In text mode, the first file would import its codec; a child that is forked meanwhile
            # by another thread would wait for that import for ever.
            return file.read().decode("ascii", "replace").strip()
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


def _machine() -> tuple[str, str, str]:
    """Machine id, boot id and PID namespace of this process."""
    if sys.platform == "darwin":  # pragma: no cover - macOS only
        return _sysctl("kern.uuid"), _sysctl("kern.bootsessionuuid"), "macos"
    try:
        namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")
    except OSError:
        namespace = ""
    # A container's machine id comes from its image, which may run on many machines at once, so
    # that another boot id would prove nothing.
    machine_id = _read("/etc/machine-id") if namespace == _FIRST_PID_NAMESPACE else ""
    return machine_id, _read("/proc/sys/kernel/random/boot_id"), namespace


def proc_stat(pid: int) -> tuple[str, int, str]:
    """State letter, number of threads and start time of a process; empty if not known."""
    # The command's name is in parentheses, and may itself contain spaces and parentheses.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[17]), fields[19]) if fields else ("", 0, "")


_current: ProcessIdentity | None = None


def current() -> ProcessIdentity:
    """The identity of this process; read once, and again after a fork."""
    global _current
    pid = os.getpid()
    known = _current
    # Compare the pid, because a child that was forked without Python's fork hooks must not use
    # its parent's identity.
    if known is None or known.pid != pid:
        machine_id, boot_id, namespace = _machine()
        known = _current = ProcessIdentity(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            machine_id=machine_id,
            boot_id=boot_id,
            pid_namespace=namespace,
            pid=pid,
            start_time=proc_stat(pid)[2],
        )
    return known


def reset() -> None:
    """Make a new identity at the next use; called in a forked child, whose pid may be reused."""
    global _current
    _current = None


def identity_of(pid: int) -> ProcessIdentity:
    """The identity of another process in the same PID namespace, such as a child process.

    Its start time is empty if it is already gone.
    """
    return current()._replace(id="", pid=pid, start_time=proc_stat(pid)[2])
