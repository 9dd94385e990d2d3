"""Identifies processes, and proves that a process is dead."""

from .death import DeathProof, death_proof
from .exits import at_exit, run_exit_hooks
from .identity import ProcessIdentity, at_fork, current, identity_of, reset

__all__ = [
    "DeathProof",
    "ProcessIdentity",
    "at_exit",
    "at_fork",
    "current",
    "death_proof",
    "identity_of",
    "reset",
    "run_exit_hooks",
]
