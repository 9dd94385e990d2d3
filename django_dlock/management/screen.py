"""What a command writes on a terminal that it redraws."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO

from django.core.management.base import OutputWrapper

from .output import encodable, encoding_of

__all__ = ["Progress", "Screen"]

# https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
OPEN = "\x1b[?1049h\x1b[?25l"
"""A screen of its own, without a cursor."""
CLOSE = "\x1b[?25h\x1b[?1049l"
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """Redraws a whole terminal; a context manager, which restores it at the end."""

    def __init__(self, out: OutputWrapper | TextIO) -> None:
        self._out: Any = out
        self._terminated: Any = None

    def __enter__(self) -> Screen:
        if threading.current_thread() is threading.main_thread():
            # Otherwise the terminal would be left without a cursor.
            self._terminated = signal.signal(signal.SIGTERM, _end)
        self._write(OPEN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write(CLOSE)
        if self._terminated is not None:
            signal.signal(signal.SIGTERM, self._terminated)

    @staticmethod
    def size() -> tuple[int, int]:
        """Columns and lines."""
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines and nothing else; too long ones are cut."""
        width, height = self.size()
        # It is overwritten in one step and never cleared, so that it does not flicker.
        # What the terminal cannot encode is escaped before a line is cut.
        shown = [encodable(line, encoding_of(self._out)) for line in lines[:height]]
        text = f"{END_OF_LINE}\r\n".join(line[:width] for line in shown)
        self._write(f"{HOME}{text}{END_OF_LINE}{END_OF_SCREEN}")

    def _write(self, text: str) -> None:
        self._out.write(text, ending="")
        self._out.flush()


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


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
