"""Aligned columns of text, which fit into the width of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .cells import first, last, room
from .output import encodable
from .wrapping import wrapped

COMFORTABLE, NARROWEST = 16, 10
"""Characters to which a column is shortened before and after the first one is left out."""
CUT_OFF = "…"
"""One character, in the place of what does not fit."""
GAP = "  "

Shorten: TypeAlias = Callable[[str, int, str], str]


@dataclass
class Column:
    """One column.

    Attributes:
        shorten: Makes a cell as short as a size, with this mark; ``None`` if it is never cut.
        narrowest: Characters that are always left; ``None`` for as many as of other columns.
        yields: By how many characters it is cut before others of its size are.
        leaves: When it is left out for lack of width: the highest first, 0 never.
        is_usual: If all cells are equal, it is left out before any cell is cut.
        is_detail: Left out before others are cut to less than ``COMFORTABLE``.
        paint: For each cell, what adds colours to it.
    """

    head: str
    cells: Sequence[str]
    shorten: Shorten | None = None
    narrowest: int | None = None
    yields: int = 0
    leaves: int = 0
    is_usual: bool = False
    is_detail: bool = False
    paint: Sequence[Callable[[str], str]] = field(default=(), repr=False)

    @property
    def is_constant(self) -> bool:
        return self.is_usual and len(set(self.cells)) == 1

    @property
    def size(self) -> int:
        return max(map(room, (self.head, *self.cells)))

    def least(self, floor: int) -> int:
        if self.shorten is None:
            return self.size
        narrowest = floor if self.narrowest is None else self.narrowest
        return min(self.size, max(narrowest, len(self.head)))


def aligned(columns: Sequence[Column], width: int | None, encoding: str) -> Iterator[str]:
    """Lines no longer than ``width``, if that is possible; the last one says what is left out.

    Args:
        width: ``None`` to show everything.
        encoding: What it does not have is escaped, before the columns are aligned.
    """
    mark = CUT_OFF if encodable(CUT_OFF, encoding) == CUT_OFF else "~"
    for column in columns:
        column.cells = [encodable(cell, encoding) for cell in column.cells]
    shown, sizes = [*columns], [column.size for column in columns]
    for floor, leaving in _steps(columns) if width is not None else ():
        shown = [column for column in shown if column is not leaving]
        sizes = _fitted(shown, width or 0, floor)
        if sum(sizes) + len(GAP) * (len(sizes) - 1) <= (width or 0):
            break
    yield _line([column.head.ljust(size) for column, size in zip(shown, sizes, strict=True)])
    for row in range(len(columns[0].cells)):
        yield _line(
            [_cell(column, row, size, mark) for column, size in zip(shown, sizes, strict=True)]
        )
    left_out = [
        f"{column.head} (all {column.cells[0]})" if column.is_constant else column.head
        for column in columns
        if column not in shown
    ]
    if left_out:
        yield from wrapped(f"Not shown at this width: {', '.join(left_out)}.", width, indent=GAP)


def _steps(columns: Sequence[Column]) -> Iterator[tuple[int | None, Column | None]]:
    """What is tried one after the other: to cut cells to a floor, and to leave a column out."""
    leaving = sorted((it for it in columns if it.leaves), key=lambda it: -it.leaves)
    yield None, None
    yield from ((None, column) for column in leaving if column.is_constant)
    yield COMFORTABLE, None
    yield from ((COMFORTABLE, column) for column in leaving if column.is_detail)
    yield NARROWEST, None
    yield from ((NARROWEST, column) for column in leaving)


def _fitted(columns: Sequence[Column], width: int, floor: int | None) -> list[int]:
    """The size of each column; the widest ones are cut first, to no less than the floor."""
    sizes = [column.size for column in columns]
    if floor is None:
        return sizes
    least = [column.least(floor) for column in columns]
    excess = sum(sizes) + len(GAP) * (len(sizes) - 1) - width
    while excess > 0:
        able = [index for index, size in enumerate(sizes) if size > least[index]]
        if not able:
            break
        sizes[max(able, key=lambda index: sizes[index] + columns[index].yields)] -= 1
        excess -= 1
    return sizes


def _cell(column: Column, row: int, size: int, mark: str) -> str:
    text = column.cells[row]
    if room(text) > size and column.shorten is not None:
        text = column.shorten(text, size, mark)
    return (column.paint[row](text) if column.paint else text) + " " * (size - room(text))


def _line(cells: Sequence[str]) -> str:
    return GAP.join(cells).rstrip()


def cut_middle(text: str, size: int, mark: str) -> str:
    """The beginning and the end: names often differ in their last characters only."""
    end = (size - 1) // 2
    return f"{first(text, size - 1 - end)}{mark}{last(text, end)}"


def cut_host(text: str, size: int, mark: str) -> str:
    """``host:pid`` with the whole pid."""
    host, colon, pid = text.rpartition(":")
    left = size - room(colon + pid) - 1
    return f"{first(host, left)}{mark}{colon}{pid}" if left > 0 else cut_middle(text, size, mark)


def cut_task(text: str, size: int, mark: str) -> str:
    """``task[id]`` with as much of the task as possible, from its end; of a path, both ends."""
    name, bracket, id_ = text.partition("[")
    if not bracket or name.startswith("/"):
        return cut_middle(text, size, mark) if "/" in text else mark + last(text, size - 1)
    for shorter in (f"{name}[{id_[:8]}{mark}]", f"{name}{mark}"):
        if room(shorter) <= size:
            return shorter
    return f"{mark}{last(name, size - 2)}{mark}"
