"""Tables of leases and waiters, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..inspection import duration
from ..lease import LeaseInfo, Waiter
from ..printable import printable
from ..request_path import cut
from .output import encodable

__all__ = ["lease_table", "waiter_table"]

NARROWEST = 12
"""The minimum width of a column in characters."""
CUT_OFF = "…"
"""One character, in the place of what does not fit."""


def lease_table(
    infos: Iterable[LeaseInfo], width: int | None, encoding: str = "utf-8"
) -> Iterable[str]:
    """Lines of a table of leases; no longer than ``width``, if that is possible."""
    heads = ("NAME", "STATE", "HOLDER", "AGE", "TTL", "WAITING", "KIND", "ALIAS")
    return _aligned(heads, map(_lease_cells, infos), (0, 2), width, encoding)


def waiter_table(
    waiters: Iterable[Waiter], width: int | None, encoding: str = "utf-8"
) -> Iterable[str]:
    """Lines of a table of waiters; no longer than ``width``, if that is possible."""
    heads = ("WAITS FOR", "STATE", "WAITER", "SINCE", "ALIAS")
    return _aligned(heads, map(_waiter_cells, waiters), (0, 2), width, encoding)


def _who(facts: Mapping[str, Any]) -> str:
    where = f"{facts['host']}:{facts['pid']}" if facts["host"] else ""
    # A value of another program may be huge.
    what = cut(str(facts["task_name"] or facts["path"] or ""))
    if facts["task_id"]:
        what = f"{what}[{cut(str(facts['task_id']))}]"
    return " ".join(part for part in (where, what) if part) or "-"


def _with_damage(state: str, it: LeaseInfo | Waiter) -> str:
    return f"{state}, damaged: {' '.join(it.damaged)}" if it.damaged else state


def _waiter_cells(waiter: Waiter) -> tuple[str, ...]:
    who, since = _who(waiter.as_dict()["waiter"]), duration(waiter.waited)
    state = _with_damage(waiter.state, waiter)
    return tuple(map(printable, (waiter.name, state, who, since, waiter.alias)))


def _lease_cells(info: LeaseInfo) -> tuple[str, ...]:
    cells = (
        info.name,
        _with_damage(info.holder_state, info),
        _who(info.as_dict()["holder"]),
        duration(info.age),
        _left(info),
        "unknown" if "waiting" in info.unknown else str(info.waiting),
        info.kind,
        info.alias,
    )
    # A path or a damaged entry may contain terminal escape sequences.
    return tuple(map(printable, cells))


def _left(info: LeaseInfo) -> str:
    if info.ttl is None:
        return "never ends"
    left = duration(info.ttl)
    return f"at most {left}" if "ttl" in info.unknown else left


def _aligned(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    stretching: Sequence[int],
    width: int | None,
    encoding: str,
) -> Iterable[str]:
    """Lines of aligned columns; the ``stretching`` columns are cut to fit into ``width``."""
    # Escaped before they are aligned.
    shown = ([encodable(cell, encoding) for cell in row] for row in rows)
    lines = [tuple(heads), *map(tuple, shown)]
    cut_off = CUT_OFF if encodable(CUT_OFF, encoding) == CUT_OFF else "~"
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is not None:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        while excess > 0:
            widest = max(stretching, key=lambda column: widths[column])
            if widths[widest] <= NARROWEST:
                break
            widths[widest] -= 1
            excess -= 1
    for line in lines:
        cells = zip(line, widths, strict=True)
        yield "  ".join(_fit(cell, size, cut_off) for cell, size in cells).rstrip()


def _fit(cell: str, size: int, cut_off: str) -> str:
    return cell.ljust(size) if len(cell) <= size else cell[: size - 1] + cut_off
