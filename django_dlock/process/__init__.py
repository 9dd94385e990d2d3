"""Identifies processes, proves that a process is dead, and runs hooks at forks and exits."""

from .death import DeathProof, death_proof
from .exits import at_exit, run_exit_hooks
from .forks import (
    at_fork,
    connecting,
    notice_fork,
    take_part_in_forks,
    thread_ends,
    thread_exists,
)
from .identity import ProcessIdentity, current, identity_of, reset

__all__ = [
    "DeathProof",
    "ProcessIdentity",
    "at_exit",
    "at_fork",
    "connecting",
    "current",
    "death_proof",
    "identity_of",
    "notice_fork",
    "reset",
    "run_exit_hooks",
    "take_part_in_forks",
    "thread_ends",
    "thread_exists",
]
