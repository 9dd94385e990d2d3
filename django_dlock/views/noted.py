"""The keys of guarded views, for the system checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

notes: dict[tuple[str, str], Note] = {}
"""By place, and option and key, so that there are hardly more of them than lines of code."""
MOST = 5000
"""Notes that are kept: code that decorates in each request, with a key of its own each time, must
not fill the memory."""


class Note:
    """The key of one decorator, where that is, and the names of its views as far as known."""

    def __init__(self, what: str, key: Any, place: str) -> None:
        self.what, self.key, self.place = what, key, place
        self.views: set[str] = set()

    def on(self, view: Callable[..., Any], name: str, guarded: Any) -> Any:
        """The guarded view with a mark, which ``functools.wraps`` and ``as_view()`` keep."""
        # ``method_decorator`` also decorates a function of its own, which is no view.
        if view.__class__ is not type(note) or view.__module__ != "django.utils.decorators":
            self.views.add(name)
        guarded._dlock_notes = (*getattr(guarded, "_dlock_notes", ()), self)
        return guarded


def note(what: str, key: Any) -> Note:
    """Note the key of the decorator whose function calls this, unless it is a callable."""
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back
    # A frame that refers to itself would live until the next collection of garbage.
    del frame
    place = f"{caller.f_globals.get('__name__')}, line {caller.f_lineno}" if caller else "?"
    made, which = Note(what, key, place), (place, f"{what}: {key}")
    known = made if callable(key) else notes.get(which, made)
    if known is made and not callable(key) and len(notes) < MOST:
        notes[which] = made
    return known
