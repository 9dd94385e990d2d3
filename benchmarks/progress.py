"""Says what runs now and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from .model import Row


class Progress:
    """One line that is overwritten on a terminal; elsewhere a line per row and round.

    Args:
        rounds: The rounds of each row that will run, by its name, in order.
        quick: Whether the rows' own estimates, which are for full runs, do not apply.
    """

    def __init__(
        self, rows: Mapping[str, tuple[Row, int]], *, quick: bool, out: TextIO | None = None
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._rows = rows
        self._factor = 0.3 if quick else 1.0
        self._row, self._round = "", -1
        self._row_started = self._rounds_started = 0.0
        self._width = 0
        self._shown = 0.0

    def step(self, row: Row, number: int, subject: str) -> None:
        """``subject`` is measured in round ``number``; 0 means before the rounds."""
        now = time.monotonic()
        # Writing to a terminal takes longer than some turns.
        if (row.name, number) == (self._row, self._round) and now - self._shown < 0.2:
            return
        self._shown = now
        if row.name != self._row:
            self._row, self._round, self._row_started = row.name, -1, now
        fresh = number != self._round
        if fresh and number == 1:
            self._rounds_started = now
        self._round = number
        names = list(self._rows)
        rounds = self._rows[row.name][1]
        text = (
            f"[{names.index(row.name) + 1}/{len(names)}] {row.name}: "
            f"{f'round {number} of {rounds}' if number else 'getting ready'}, "
            f"about {self._left(row, number, now)} left"
        )
        if self._out.isatty():
            text = f"{text} – {subject}"
            self._out.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif fresh:
            self._out.write(text + "\n")
        self._out.flush()

    def done(self) -> None:
        if self._out.isatty():
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()

    def _left(self, row: Row, number: int, now: float) -> str:
        names = list(self._rows)
        later = sum(
            self._rows[name][0].seconds * self._factor
            for name in names[names.index(row.name) + 1 :]
        )
        rounds = self._rows[row.name][1]
        if number > 1:
            each = (now - self._rounds_started) / (number - 1)
            this = each * (rounds - number + 1)
        else:
            this = max(0.0, row.seconds * self._factor - (now - self._row_started))
        left = round(this + later)
        return f"{left // 60} min {left % 60:02} s" if left >= 60 else f"{left} s"
