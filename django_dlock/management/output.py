"""Where a command writes: a terminal or a pipe, which may not know every character, and may end."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast

from django.core.management.base import OutputWrapper


class Output:
    """Standard output or standard error of a command.

    A character that it cannot encode is escaped as ``printable`` does it. Once nobody reads it any
    more, as with ``| head``, or its disk is full, the rest is dropped, and the command goes on:
    what it does does not depend on who reads.

    Attributes:
        error: Why nothing can be written any more.
    """

    def __init__(self, out: TextIO | None) -> None:
        self._out: Any = out
        # ``None`` is what Python has for a file that was closed when it began.
        self.error: OSError | None = BrokenPipeError("closed") if out is None else None

    @property
    def charset(self) -> str:
        return getattr(self._out, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                self._out.write(encodable(text, self.charset))
            except OSError as error:
                self._end(error)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._out.flush()
            except OSError as error:
                self._end(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def _end(self, error: OSError) -> None:
        self.error = error
        if self._out in (sys.__stdout__, sys.__stderr__):
            # Python flushes these at its end, and would report the error again.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())


def open_output(out: Any) -> TextIO:
    """The output for a stream, or the stream itself if it is one already."""
    while type(out) is OutputWrapper:
        # A command of the project has passed its own. The wrapper does not tell the encoding.
        out = out._out
    return cast(TextIO, out if isinstance(out, Output) else Output(out))


def encoding_of(out: Any) -> str:
    """The encoding of the output that ``OutputWrapper`` wraps."""
    # The wrapper has an ``encoding`` of its own, which says nothing.
    return getattr(out, "charset", "utf-8")


def error_of(out: Any) -> OSError | None:
    """Why nothing can be written to the output that ``OutputWrapper`` wraps."""
    error: OSError | None = getattr(out, "error", None)
    return error


def encodable(text: str, encoding: str) -> str:
    """The text, in which what the encoding does not have is escaped as in ``repr``."""
    if text.isascii():
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)
