"""Identifies processes, and proves that a process is dead."""

from .death import DeathProof, death_proof
from .identity import ProcessIdentity, at_fork, current, identity_of, reset

__all__ = [
    "DeathProof",
    "ProcessIdentity",
    "at_fork",
    "current",
    "death_proof",
    "identity_of",
    "reset",
]
