"""Is the holder dead? Proofs that another process has ended.

A missing heartbeat is no proof, because a stopped process may wake up. Identities are compared
instead, and if a part of one could not be read, nothing is proven.

A waiter asks this about the holder that it met (``core/granting.py``), a list about each holder
that it shows (``backends/holder_state.py``), and the parent of a worker about a child whose lease
it is to break (``celery/worker/lock_recovery.py``).
"""

from __future__ import annotations

import os
from typing import Literal

from . import identity
from .identity import ProcessIdentity, current

DeathProof = Literal["gone", "rebooted"]


def death_proof(other: ProcessIdentity, *, silent: bool = False) -> DeathProof | None:
    """Why ``other`` is certainly dead; ``None`` if that cannot be proven from here.

    Args:
        silent: Its heartbeat is overdue. Only then does another boot id on the same machine id
            prove its death: cloned machines share a machine id, and a heartbeat is a sign of life.
    """
    me = current()
    # Machines that were cloned while running share boot id and PID namespace, but they may have
    # different host names.
    if not other.boot_id or not me.boot_id or other.host != me.host:
        return None
    if other.boot_id != me.boot_id:
        same_machine = bool(me.machine_id) and other.machine_id == me.machine_id
        return "rebooted" if same_machine and silent else None
    # Not ``me.pid_namespace``, which a child in another one may have inherited.
    here = identity.pid_namespace()
    if not here or other.pid_namespace != here:
        return None
    return "gone" if _is_gone(other) else None


def _is_gone(other: ProcessIdentity) -> bool:
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        # It exists, but belongs to another user, and /proc may hide it.
        pass
    state, threads, started = identity.proc_stat(other.pid)
    # A zombie does not run any more, unless only its first thread has ended.
    ended = state in ("Z", "X") and threads <= 1
    return (ended or _is_another(other, started)) and identity.proc_is_ours()


def _is_another(other: ProcessIdentity, started: str) -> bool:
    """Whether the pid was reused, judged by the start of the process that has it now."""
    if not started or not other.started or started == other.started:
        return False
    # The start of one process differs between time namespaces.
    return bool(other.time_namespace) and other.time_namespace == identity.time_namespace()
