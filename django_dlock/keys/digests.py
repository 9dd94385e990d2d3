"""Digests of arguments and their types, which no other arguments produce."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..text.names import digest, fit
from .arguments import Arguments


def fingerprint(arguments: Mapping[str, Any], *, what: str) -> str:
    """A versioned digest of named values and their types; independent of their order.

    Lists and tuples are equal, as they are after JSON; an ``Enum`` counts as its value.

    Args:
        what: For messages.

    Raises:
        TypeError: A value has no stable form, or is nested too deeply.
        ValueError: A value is a number of more digits than Python writes.
    """
    name, tagged = "", []
    try:
        for name in sorted(arguments):
            tagged.append([name, _tag(arguments[name])])
    except _Unstable as error:
        raise TypeError(
            f"{what}: the argument {name!r} contains a value of type {error.args[0]}, which has no "
            "stable form: pass plain data instead (the primary key of a model instance), or make "
            "the key with a template or a callable"
        ) from None
    except RecursionError:
        raise TypeError(
            f"{what}: the argument {name!r} is nested too deeply for a digest: pass plain data "
            "instead, or make the key with a template or a callable"
        ) from None
    return f"v1:{digest(json.dumps(tagged))}"


class Digest:
    """A digest of all arguments, or of those named, without those that equal their default.

    So a new optional parameter does not change keys while old and new code run side by side.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        arguments: Arguments,
        prefix: str,
        normalise: Callable[[Any], Any],
    ) -> None:
        if names is not None:
            if not names:
                raise ValueError(f"{arguments.what} is an empty list; it takes argument names")
            for name in names:
                self.check(name, arguments, f"the list {list(names)!r}")
        self.names, self.arguments = names, arguments
        self.prefix = f"{prefix}:" if prefix else ""
        self.template = f"{self.prefix}v1:{{digest}}"
        self.normalise = normalise

    def check(self, name: str, arguments: Arguments, where: str) -> None:
        """Refuse a name that no call can pass."""
        arguments.check(name, where)

    def chosen(self, names: Sequence[str], flat: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of the names in a list."""
        return {name: flat[name] for name in names if name in flat}

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        bound = self.arguments.bind(args, kwargs)
        named: Mapping[str, Any] = bound.arguments
        if self.names is not None:
            named = self.chosen(self.names, self.arguments.named(bound))
        given = {name: self.normalise(value) for name, value in named.items()}
        relevant = {name: value for name, value in given.items() if not self._absent(name, value)}
        return fit(f"{self.prefix}{fingerprint(relevant, what=self.arguments.what)}")

    def _absent(self, name: str, value: Any) -> bool:
        """Whether the argument equals its default, so that it could have been left out."""
        parameter = self.arguments.signature.parameters.get(name)
        if parameter is None or parameter.default is parameter.empty:
            return False
        try:
            # Compare the tags, because 1 == True.
            return bool(_tag(value) == _tag(self.normalise(parameter.default)))
        except (_Unstable, RecursionError):
            # If it is the argument that has no stable form, the digest will raise.
            return False


class _Unstable(TypeError):
    """A value has no stable form; its type is the argument of the exception.

    Not the value itself: errors are logged, and arguments may be private.
    """


def _datetime(value: dt.datetime) -> str:
    # The same time in another zone counts as the same argument.
    try:
        value = value if value.utcoffset() is None else value.astimezone(dt.timezone.utc)
    except OverflowError:
        # In UTC it would be before the year 1, or after 9999.
        pass
    return value.isoformat()


_PLAIN: Sequence[tuple[type[Any] | tuple[type[Any], ...], str, Callable[[Any], str]]] = (
    (bool, "?", str),  # before int, its base class
    (str, "s", str),
    (int, "i", int.__repr__),
    (float, "f", float.__repr__),
    (decimal.Decimal, "d", str),
    (uuid.UUID, "u", str),
    (dt.datetime, "dt", _datetime),  # before date, its base class
    ((dt.date, dt.time), "da", lambda value: value.isoformat()),
    (dt.timedelta, "td", lambda value: str(value // dt.timedelta(microseconds=1))),
    ((bytes, bytearray), "b", lambda value: value.hex()),
)
"""Types whose values have a stable form: type, tag, function that makes the form."""


def _tag(value: Any) -> Any:
    """The value as JSON data in which every type has its own tag."""
    if value is None:
        return None
    if isinstance(value, enum.Enum):
        return _tag(value.value)
    for kind, mark, form in _PLAIN:
        if isinstance(value, kind):
            return [mark, form(value)]
    if isinstance(value, list | tuple):
        return ["l", [_tag(item) for item in value]]
    if isinstance(value, set | frozenset):
        return ["e", sorted((_tag(item) for item in value), key=json.dumps)]
    if isinstance(value, Mapping):
        items = ([_tag(key), _tag(item)] for key, item in value.items())
        return ["m", sorted(items, key=json.dumps)]
    # Anything else only has a repr, which may contain a memory address.
    raise _Unstable(type(value).__name__)
