"""System checks of guarded views: keys and clients that a visitor can choose."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.core import checks
from django.urls import URLPattern, get_resolver

from .idempotency_key import WHAT
from .noted import Note, notes
from .signature import name_of
from .visitors import is_chosen


def check_views() -> list[checks.CheckMessage]:
    """W017: a visitor chooses the whole name of a lock; W018: or whose keys they are; W019: two
    values can be divided in several ways; W021: all requests of a client have one key.
    """
    ambiguous = {}
    for pattern, converters in _patterns(_all_patterns(), {}):
        for note, view in _notes_of(pattern.callback):
            note.views.add(view)
            if fields := _ambiguous(note, converters):
                ambiguous[view, str(note.key)] = (note, view, fields)
    found = [message for note in list(notes.values()) for message in _of_visitors(note)]
    return [*found, *(_ambiguity(*each) for each in ambiguous.values())]


# -- what a visitor chooses ----------------------------------------------------------------


def _parts(key: str) -> list[tuple[str, str | None]]:
    """The texts and fields of a template."""
    return [(literal, field) for literal, field, _, _ in string.Formatter().parse(key)]


def _where(note: Note) -> str:
    views = ", ".join(sorted(note.views))
    return f"{note.what} on {views}" if views else f"{note.what} in {note.place}"


def _of_visitors(note: Note) -> Iterator[checks.CheckMessage]:
    if note.what.startswith("client"):
        yield from _unverified(note)
        return
    if note.what == WHAT:
        # The key of a record belongs to its view and client.
        yield from _of_one_client(note)
        return
    if not isinstance(note.key, str):
        return
    literal, field = _parts(note.key)[0]
    if not literal and field is not None and is_chosen(field):
        yield checks.Warning(
            f"{_where(note)}: {note.key!r} begins with {{{field}}}, which a visitor chooses, so a "
            "visitor can take the lock of any other view or task.",
            hint=f"Begin it with a word of its own, as in 'report:{{{field}}}', or use a list of "
            f"names: [{field!r}].",
            id="django_dlock.W017",
        )


def _fields(note: Note) -> list[str]:
    if isinstance(note.key, str):
        return [field for _, field in _parts(note.key) if field is not None]
    return list(note.key)


def _of_one_client(note: Note) -> Iterator[checks.CheckMessage]:
    if all(field.startswith("request.user") for field in _fields(note)):
        yield checks.Warning(
            f"{_where(note)} is {note.key!r}, which is the same in all requests of a user: a "
            "second order would get the answer of the first one.",
            hint="Name what differs from one order to the next, such as a field of the form: "
            "BodyField(). The user is part of the key anyway, by client.",
            id="django_dlock.W021",
        )


def _unverified(note: Note) -> Iterator[checks.CheckMessage]:
    fields = _fields(note)
    if fields and all(map(is_chosen, fields)):
        yield checks.Warning(
            f"{_where(note)} is {note.key!r}: a visitor who names another client gets the stored "
            "answers of that client.",
            hint="Use a value that the server has verified, such as '{request.user.pk}', or a "
            "callable that looks up a token. If a proxy of yours sets the header, and removes "
            "that of the visitor, silence this check.",
            id="django_dlock.W018",
        )


# -- values that contain the text between two fields ---------------------------------------


def _ambiguous(note: Note, converters: Mapping[str, Any]) -> list[str]:
    """The fields of a template whose values may contain the text beside them, if there are two."""
    if not isinstance(note.key, str) or note.what.startswith("client"):
        return []
    parts = [(literal, field) for literal, field in _parts(note.key) if field is not None]
    found = []
    for place, (literal, field) in enumerate(parts):
        before = [literal] if place else []
        after = [parts[place + 1][0]] if place + 1 < len(parts) else []
        if any(_may_contain(field, text, converters) for text in (*before, *after)):
            found.append(field)
    return found if len(found) > 1 else []


def _may_contain(field: str, text: str, converters: Mapping[str, Any]) -> bool:
    if field.startswith("request"):
        return is_chosen(field)
    converter = converters.get(field)
    if converter is None:
        # Nothing is known of an argument of ``re_path()``.
        return False
    samples = (f"{fill}{text}{fill}" for fill in ("a", "0"))
    return any(re.fullmatch(converter.regex, sample) for sample in samples)


def _ambiguity(note: Note, view: str, fields: list[str]) -> checks.CheckMessage:
    names = _fields(note)
    return checks.Warning(
        f"{note.what} on {view}: the values of {fields} may contain the text between the fields "
        f"of {note.key!r}, so other values can give the same {_made_of(note)}.",
        hint=f"Use a list of names, {names}, which makes a digest; or a text between the fields "
        "that no converter of the URL allows, such as '/' between two <str:…>.",
        id="django_dlock.W019",
    )


def _made_of(note: Note) -> str:
    return "key" if note.what == WHAT else "lock"


# -- the URLs ------------------------------------------------------------------------------


def _all_patterns() -> Any:
    if not getattr(settings, "ROOT_URLCONF", None):
        return []
    try:
        return get_resolver().url_patterns
    except Exception:  # noqa: BLE001 - Django's own check of the URLs says what is wrong
        return []


def _patterns(
    patterns: Any, converters: Mapping[str, Any]
) -> Iterator[tuple[URLPattern, Mapping[str, Any]]]:
    """Each URL with the converters of its arguments, those of its prefixes included."""
    for pattern in patterns:
        own = {**converters, **pattern.pattern.converters}
        if isinstance(pattern, URLPattern):
            yield pattern, own
        else:
            yield from _patterns(pattern.url_patterns, own)


def _notes_of(view: Any) -> Iterator[tuple[Note, str]]:
    """The notes of the decorators of a view and, if a class made it, of the class's methods."""
    made_by = getattr(view, "view_class", None) or getattr(view, "cls", None)
    found = [*getattr(view, "_dlock_notes", ())]
    for method in map(vars, getattr(made_by, "__mro__", ())):
        for function in method.values():
            found += getattr(function, "_dlock_notes", ())
    name = name_of(view)
    if not found and made_by is not None:
        # Below ``api_view`` of REST framework, which keeps only the name of the function.
        name = f"{made_by.__module__}.{made_by.__name__}"
        found = [note for note in notes.values() if name in note.views]
    for note in dict.fromkeys(found):
        yield note, name
