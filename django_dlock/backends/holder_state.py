"""What backends share to describe the holder of a lease, and who waits for it."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..lease import HolderState, Kind
from ..process import ProcessIdentity, death_proof

SILENT_AFTER = 15.0
"""Seconds without a heartbeat after which a holder counts as silent."""

LONGEST = 65_536
"""Characters of a stored text that operators read; a longer one counts as damaged."""
LONGEST_IDENTITY = 4096
DEEPEST = 64
"""Levels of a stored object; with more, other code would reach the limit of recursion."""

_SURROGATES = re.compile("[\ud800-\udfff]")


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


class Stored(NamedTuple):
    """A JSON object that was read from a store.

    Attributes:
        value: Empty if nothing could be read.
        is_sound: Whether it is what this package may have written.
    """

    value: Mapping[str, Any]
    is_sound: bool = True


def stored_object(text: object) -> Stored:
    """The JSON object in ``text``; never raises, whatever another program has written.

    The value can be compared, put into words and written as JSON again: it is at most ``DEEPEST``
    levels deep, and it has no numbers that JSON does not know. A text in it may have any character.
    """
    if not isinstance(text, str) or len(text) > LONGEST:
        return Stored({}, False)
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return Stored({}, False)
    if not isinstance(value, dict) or _is_too_deep(text, value):
        return Stored({}, False)
    # Most texts are plain, and need no second look. JSON may write a surrogate as ``\\ud800``.
    if text.isascii() and "\\u" not in text:
        return Stored(value)
    return Stored(value, not _SURROGATES.search(json.dumps(value, ensure_ascii=False)))


def json_object(text: object) -> Mapping[str, Any]:
    """The value of ``stored_object``."""
    return stored_object(text).value


def _finite(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


# ``NaN`` and numbers such as 1e999 stay texts, because no JSON could be made of them again.
_DECODER = json.JSONDecoder(parse_constant=str, parse_float=_finite)


def _is_too_deep(text: str, value: Any) -> bool:
    if text.count("{") + text.count("[") <= DEEPEST:
        return False
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    found = value.values() if isinstance(value, dict) else value
    return [inner for inner in found if isinstance(inner, dict | list)]


def process_from_json(text: object) -> ProcessIdentity | None:
    """The process identity in ``text``; ``None`` if there is none or it is damaged."""
    # Not cached: another program could fill the memory of whoever reads many long ones.
    if not isinstance(text, str) or len(text) > LONGEST_IDENTITY:
        return None
    return _process_from_json(text)


# Cached, because many waiters read the identity of the same few processes.
@functools.lru_cache(maxsize=4096)
def _process_from_json(text: str) -> ProcessIdentity | None:
    facts = json_object(text)
    try:
        return ProcessIdentity.from_dict(dict(facts)) if facts else None
    except (KeyError, TypeError, ValueError):
        return None


def names_of(**parts: bool) -> tuple[str, ...]:
    """The names of what is true, as ``LeaseInfo.damaged`` and ``unknown`` have them."""
    return tuple(name for name, is_true in parts.items() if is_true)
