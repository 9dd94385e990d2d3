"""Identifies a process by host name, boot id, PID namespace, pid and start.

The same host name and pid in two containers are two processes, and pids are reused. ``death``
compares identities to prove that a process is dead.

On Linux, ``/proc`` has the pids of the PID namespace for which it was mounted, and not of the one
of the process that reads it: ``nsenter`` and ``unshare`` can leave another's in place. When a
process has started, it says in the time namespace of the reader.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from typing import Any, NamedTuple

# The inodes of a Linux machine's first namespaces (PROC_PID_INIT_INO, PROC_UTS_INIT_INO).
_FIRST_NAMESPACES = {"pid": "4026531836", "uts": "4026531838"}

LARGEST_PID = 2**31 - 1
"""The largest that any system has room for."""


class ProcessIdentity(NamedTuple):
    """One run of one process.

    Attributes:
        id: Random, new for every process and for every fork.
        machine_id, boot_id, pid_namespace, time_namespace, started: Empty if the system does not
            provide them; then they prove nothing.
        started: In clock ticks since the boot, by the clock of ``time_namespace``. Its name is not
            ``start_time``, as in earlier versions, because these would compare it with what they
            read in any namespace; and what they wrote under that name may be of any, too.
    """

    id: str
    host: str
    machine_id: str
    boot_id: str
    pid_namespace: str
    pid: int
    time_namespace: str
    started: str

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


def _machine() -> tuple[str, str]:
    """Machine id and boot id of this process."""
    if sys.platform == "darwin":  # pragma: no cover - macOS only
        return _sysctl("kern.uuid"), _sysctl("kern.bootsessionuuid")
    # A container's machine id comes from its image, which may run on many machines at once, so
    # that another boot id would prove nothing. A container may share the machine's PID namespace;
    # if it shares its host name, too, that name tells the machines apart.
    is_machine = all(_namespace(kind) == first for kind, first in _FIRST_NAMESPACES.items())
    machine_id = _read("/etc/machine-id") if is_machine else ""
    return machine_id, _read("/proc/sys/kernel/random/boot_id")


def pid_namespace() -> str:
    """The PID namespace of this process; empty if it cannot be read."""
    if sys.platform == "darwin":  # pragma: no cover - macOS only
        return "macos"
    return _namespace("pid")


def time_namespace() -> str:
    """The time namespace of this process; empty if it cannot be read.

    Not that of its children, which may be another one. Before Linux 5.6 there are none.
    """
    # The folder itself cannot be read by a process that has changed its user.
    return _namespace("time") if os.path.lexists("/proc/self/ns/time") else "none"


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}").partition("[")[2].rstrip("]")
    except OSError:
        return ""


def proc_is_ours() -> bool:
    """Whether a pid is the same process in ``/proc`` as in the calls of this process."""
    for line in _read("/proc/self/status").splitlines():
        # The pids of this process: in the namespace of ``/proc``, and in each below that one.
        if line.startswith("NSpid:"):
            return line.split()[1:] == [str(os.getpid())]
    return False


def proc_stat(pid: int) -> tuple[str, int, str]:
    """State letter, number of threads and start of a process; empty if not known.

    Only if ``proc_is_ours`` is it that process. The start is one in our ``time_namespace``.
    """
    # The command's name is in parentheses, and may itself contain spaces and parentheses.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[17]), fields[19]) if fields else ("", 0, "")


def _start(pid: int) -> tuple[str, str]:
    """Time namespace and start of a process; empty if not known."""
    return (time_namespace(), proc_stat(pid)[2]) if proc_is_ours() else ("", "")


_current: ProcessIdentity | None = None


def current() -> ProcessIdentity:
    """The identity of this process; read once, and again after a fork."""
    global _current
    pid = os.getpid()
    known = _current
    # Compare the pid, because a child that was forked without Python's fork hooks must not use
    # its parent's identity.
    if known is None or known.pid != pid:
        machine_id, boot_id = _machine()
        time_ns, started = _start(pid)
        known = _current = ProcessIdentity(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            machine_id=machine_id,
            boot_id=boot_id,
            pid_namespace=pid_namespace(),
            pid=pid,
            time_namespace=time_ns,
            started=started,
        )
    return known


def reset() -> None:
    """Make a new identity at the next use; called in a forked child, whose pid may be reused."""
    global _current
    _current = None


def identity_of(pid: int) -> ProcessIdentity:
    """The identity of another process in the same PID namespace, such as a child process.

    Its start is empty if it is already gone.
    """
    time_ns, started = _start(pid)
    return current()._replace(id="", pid=pid, time_namespace=time_ns, started=started)
