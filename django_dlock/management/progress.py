"""The progress of a command with much to do, in one line of a terminal."""

from __future__ import annotations

import shutil
import time
from types import TracebackType
from typing import Any, TextIO

from django.core.management.base import OutputWrapper

END_OF_LINE = "\x1b[K"
"""Clears what is left of it: https://invisible-island.net/xterm/ctlseqs/ctlseqs.html"""


class Progress:
    """One line that counts up on a terminal; writes nothing if the output is no terminal.

    A context manager, which removes the line at the end.

    Args:
        out: Standard error, so that a result on standard output stays whole.
        quiet: Write nothing.
    """

    PAUSE = 0.1
    """Seconds between two updates; a terminal may be slower than the work."""

    def __init__(self, out: OutputWrapper | TextIO, *, quiet: bool = False) -> None:
        self._out: Any = out
        self._shown = not quiet and out.isatty()
        self._next, self._written = 0.0, False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._written:
            self._write("")

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._next, self._written = now + self.PAUSE, True
            self._write(text[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        # Standard error of a command is red, unless a style is given.
        self._out.write(f"\r{text}{END_OF_LINE}", style_func=str, ending="")
        self._out.flush()
