"""The logger ``django_dlock``: every line also carries what it is about, for log processors.

Each record has the attributes ``FIELDS``, which are ``None`` where they are not known. The message
is one line without control characters, whatever a path or an error contains; fields are exact.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

from .exceptions import LockError
from .text.printable import printable

__all__ = ["FIELDS", "Line", "logger"]

FIELDS = ("lock_name", "lock_alias", "lock_owner", "lock_token", "task_id", "reason")
"""Attributes of each record. ``name`` alone is the logger's own name."""

_OF_LOCK = {
    "name": "lock_name",
    "alias": "lock_alias",
    "owner": "lock_owner",
    "token": "lock_token",
    "reason": "reason",
    "task_id": "task_id",
}
"""Attributes of locks, leases, requests and errors, and keywords of the calls → fields."""

_KEY = "django_dlock_fields"
"""Under this name the fields reach the filter."""

Line: TypeAlias = tuple[int, str, tuple[object, ...], Any, dict[str, Any]]
"""A line that is written later: level, message, arguments, error, and fields."""


class _SetFields(logging.Filter):
    """Sets the fields on each record of the logger.

    ``logging`` itself raises if a field is there already, as ``task_id`` is where a project's own
    record factory sets it; but a line of the log must never fail a lock.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        known = record.__dict__.pop(_KEY, {})
        for field in FIELDS:
            value = known.get(field)
            if value is not None or not hasattr(record, field):
                setattr(record, field, value)
        return True


class LockLogger:
    """As ``logging.Logger``; the calls take the following keywords as well.

    Args:
        about: A lock, lease or request, which tells name, alias, owner, token and task.
        facts: ``name``, ``alias``, ``owner``, ``token``, ``task_id`` and ``reason``, where
            ``about`` does not have them. An error among the arguments of the message tells its
            name, alias and reason by itself.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._logger.addFilter(_SetFields())

    def debug(self, message: str, *args: object, about: object = None, **facts: Any) -> None:
        self._write(logging.DEBUG, message, args, about, facts)

    def info(self, message: str, *args: object, about: object = None, **facts: Any) -> None:
        self._write(logging.INFO, message, args, about, facts)

    def warning(
        self, message: str, *args: object, about: object = None, exc_info: Any = None, **facts: Any
    ) -> None:
        self._write(logging.WARNING, message, args, about, facts, exc_info=exc_info)

    def error(
        self, message: str, *args: object, about: object = None, exc_info: Any = None, **facts: Any
    ) -> None:
        self._write(logging.ERROR, message, args, about, facts, exc_info=exc_info)

    def exception(self, message: str, *args: object, about: object = None, **facts: Any) -> None:
        """An error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, message, args, about, facts, exc_info=True)

    def log(
        self, level: int, message: str, *args: object, about: object = None, **facts: Any
    ) -> None:
        self._write(level, message, args, about, facts)

    def line(
        self,
        level: int,
        message: str,
        *args: object,
        about: object = None,
        exc_info: Any = None,
        **facts: Any,
    ) -> Line:
        """A line with the fields of this moment, for ``write`` on another thread."""
        return level, message, args, exc_info, _fields(args, about, facts)

    def write(self, line: Line) -> None:
        level, message, args, exc_info, fields = line
        if self._logger.isEnabledFor(level):
            shown = map(_escaped, args)
            self._logger.log(level, message, *shown, exc_info=exc_info, extra={_KEY: fields})

    def _write(
        self,
        level: int,
        message: str,
        args: tuple[object, ...],
        about: object,
        facts: dict[str, Any],
        *,
        exc_info: Any = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            extra = {_KEY: _fields(args, about, facts)}
            shown = map(_escaped, args)
            # The record names the place that called ``warning``.
            self._logger.log(level, message, *shown, exc_info=exc_info, extra=extra, stacklevel=3)


class _Escaped(str):
    """The text of an argument for ``%s``; ``%r`` gives the ``repr`` of the argument itself."""

    _repr: str

    def __new__(cls, argument: object, text: str) -> _Escaped:
        escaped = super().__new__(cls, printable(text))
        escaped._repr = printable(repr(argument))
        return escaped

    def __repr__(self) -> str:
        return self._repr

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def _escaped(argument: object) -> object:
    """The argument of a message; if its text has control characters, the escaped text."""
    if isinstance(argument, int | float):
        return argument
    try:
        text = str(argument)
        return argument if printable(text) == text else _Escaped(argument, text)
    except Exception:  # noqa: BLE001 - ``logging`` reports arguments that have no text
        return argument


def _fields(args: tuple[object, ...], about: object, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All ``FIELDS``; keywords override ``about``, which overrides errors among the arguments.

    Raises:
        KeyError: A fact has an unknown name.
    """
    fields: dict[str, Any] = dict.fromkeys(FIELDS)
    for source in (*(arg for arg in args if isinstance(arg, LockError)), about):
        if source is None:
            continue
        for key, field in _OF_LOCK.items():
            if (value := _told(source, key)) not in (None, ""):
                fields[field] = value
        # Where a task holds the lock, its metadata tells its id.
        metadata = getattr(source, "metadata", None)
        if isinstance(metadata, Mapping) and metadata.get("task_id"):
            fields["task_id"] = metadata["task_id"]
    for key, value in facts.items():
        field = _OF_LOCK[key]
        if value is not None:
            fields[field] = value
    return fields


def _told(source: object, key: str) -> Any:
    """An attribute; ``None`` if there is none, or if the project's ``DLOCK_SCOPE`` raises."""
    try:
        return getattr(source, key, None)
    except Exception:  # noqa: BLE001 - a line of the log must never fail a lock
        return None


logger = LockLogger("django_dlock")
