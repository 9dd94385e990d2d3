"""What backends share when they tell an operator about a lease."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..lease import HolderState, Kind
from ..process import ProcessIdentity, death_proof

__all__ = ["SILENT_AFTER", "holder_state", "json_object", "process_from_json"]

SILENT_AFTER = 15.0
"""Seconds without a heartbeat after which a holder counts as silent."""


def holder_state(
    kind: Kind,
    process: ProcessIdentity | None,
    *,
    unheard: float,
    goodbye: bool,
    proof: Callable[..., object] = death_proof,
) -> HolderState:
    """Judge the holder of a lease; the only proofs of death are those of ``process``.

    Args:
        unheard: Seconds since the process was last heard of.
        goodbye: The process told that it ends.
        proof: ``death_proof``, or one that remembers what it found during one listing.
    """
    if kind != "held" or process is None:
        return "unknown"
    silent = unheard > SILENT_AFTER
    if goodbye or proof(process, silent=silent):
        return "dead"
    return "silent" if silent else "alive"


def json_object(text: str) -> Mapping[str, Any]:
    """The object that ``text`` holds; empty where a stranger wrote something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# The same few processes hold what many wait for.
@functools.lru_cache(maxsize=256)
def process_from_json(text: str) -> ProcessIdentity | None:
    """The identity that ``text`` holds, ``None`` where there is none or it is damaged."""
    facts = json_object(text)
    try:
        return ProcessIdentity.from_dict(dict(facts)) if facts else None
    except (KeyError, TypeError, ValueError):
        return None
