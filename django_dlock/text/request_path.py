"""The path of a request, as operators see it in lists, logs, traces and events."""

from __future__ import annotations

from typing import Protocol

MAX_PATH = 512
"""Characters of a path that are kept; a visitor chooses its length, and many places store it."""


class Request(Protocol):
    """A request of Django, or the wrapper that REST framework makes around one."""

    @property
    def path(self) -> str: ...


def path_of(request: Request) -> str:
    """The path of the request, at most ``MAX_PATH`` characters; ``…`` ends one that was cut.

    It has no query, because values in it may be private, such as the token of a password's reset.
    A project that wants them adds them to ``metadata``.
    """
    return cut(request.path)


def cut(path: str) -> str:
    """The text, at most ``MAX_PATH`` characters; ``…`` ends one that was longer."""
    return path if len(path) <= MAX_PATH else f"{path[: MAX_PATH - 1]}…"
