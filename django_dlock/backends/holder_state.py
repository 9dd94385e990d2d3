"""What backends share to describe the holder of a lease, and who waits for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from ..lease import HolderState, Kind
from ..process import ProcessIdentity, death_proof

__all__ = ["SILENT_AFTER", "holder_state", "json_object", "process_from_json", "process_state"]

SILENT_AFTER = 15.0
"""Seconds without a heartbeat after which a holder counts as silent."""


def holder_state(
    kind: Kind, process: ProcessIdentity | None, silent: bool, deregistered: bool
) -> HolderState:
    """Judge the holder of a lease: "dead" needs ``deregistered`` or a ``death_proof``.

    Args:
        silent: Its last heartbeat or renewal was more than ``SILENT_AFTER`` seconds ago.
        deregistered: The process has reported its normal end.
    """
    if kind != "held":
        return "unknown"
    return process_state(process, silent, deregistered)


def process_state(
    process: ProcessIdentity | None, silent: bool, deregistered: bool = False
) -> HolderState:
    """Judge the process of a holder or of a waiter; the arguments are those of ``holder_state``."""
    if process is None:
        return "unknown"
    if deregistered or death_proof(process, silent=silent):
        return "dead"
    return "silent" if silent else "alive"


def json_object(text: str) -> Mapping[str, Any]:
    """The JSON object in ``text``; empty if another program has written something else."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# Cached, because many waiters read the identity of the same few processes.
@functools.lru_cache(maxsize=4096)
def process_from_json(text: str) -> ProcessIdentity | None:
    """The process identity in ``text``; ``None`` if there is none or it is damaged."""
    facts = json_object(text)
    try:
        return ProcessIdentity.from_dict(dict(facts)) if facts else None
    except (KeyError, TypeError, ValueError):
        return None
