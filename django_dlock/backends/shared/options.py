"""The one mechanism that reads settings: a table of fields, and one wording for each mistake.

A table is a dataclass whose fields are made by ``option``: each says what it takes, its default,
and what it is for. ``read_options`` reads a dict by such a table. Messages name the setting, and
show no password.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar, cast

from ... import clock
from ...text.names import plain
from ...text.redaction import redacted, redacted_of

T = TypeVar("T")

MOST = 2**16 - 1
"""Of what a server or a process may have; so many connections leave no port."""


class Problem(NamedTuple):
    """An error in the settings, reported by a system check and raised at first use.

    Attributes:
        id: The id of the check. Those of this package are short (``E006``); a backend of another
            package gives its own in full (``shop.E001``).
    """

    id: str
    message: str
    hint: str


def joined(found: Iterable[Problem]) -> str:
    """The text of the exception for these."""
    return "; ".join(f"{one.message} {one.hint}" for one in found)


# -- what a field takes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What a field takes.

    Attributes:
        told: In words, which follow "It takes".
        read: The value, as the program gets it.

            Raises ``TypeError`` or ``ValueError`` for any other value; their text is not shown.
    """

    told: str
    read: Callable[[Any], T]


def _which(told: str, is_right: Callable[[Any], bool], read: Callable[[Any], T]) -> Kind[T]:
    def checked(value: Any) -> T:
        if not is_right(value):
            raise ValueError(told)
        return read(value)

    return Kind(told, checked)


def text(told: str = "a non-empty string", pattern: str = "(?s:.+)") -> Kind[str]:
    expression = re.compile(pattern)

    def read(value: Any) -> str:
        if not isinstance(value, str) or not expression.fullmatch(found := plain(value)):
            raise ValueError
        return found

    return Kind(told, read)


def texts() -> Kind[str | tuple[str, ...]]:
    """One text, or a list of them."""

    one = text().read

    def read(value: Any) -> str | tuple[str, ...]:
        is_list = isinstance(value, list | tuple) and value
        return tuple(map(one, value)) if is_list else one(value)

    return Kind("a non-empty string, or a list of them", read)


def choice(*allowed: str) -> Kind[str]:
    return text(f"one of {list(allowed)}", "|".join(map(re.escape, allowed)))


def switch() -> Kind[bool]:
    return _which("True or False", lambda it: isinstance(it, bool), bool)


def _is_number(value: object, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def whole(at_least: int, at_most: int = MOST) -> Kind[int]:
    told = f"a whole number, at least {at_least} and at most {at_most}"
    return _which(told, lambda it: _is_number(it, int) and at_least <= it <= at_most, int)


def fraction(below: float) -> Kind[float]:
    told = f"a number, at least 0 and less than {below:g}"
    return _which(told, lambda it: _is_number(it, int, float) and 0 <= it < below, float)


def duration(
    at_least: float = 0.0, at_most: float = clock.LONGEST, *, above: bool = False, why: str = ""
) -> Kind[float]:
    """Seconds, or a ``timedelta``.

    Args:
        above: The value must be greater than ``at_least``.
        why: What the minimum depends on.
    """
    bounds = _bounds(at_least, at_most, above, why and f" ({why})")

    def read(value: Any) -> float:
        return seconds(value, what="", minimum=at_least, maximum=at_most, above=above)

    return Kind(f"seconds (a number) or a timedelta, {bounds}", read)


def _bounds(at_least: float, at_most: float, above: bool, why: str = "") -> str:
    first = "more than" if above else "at least"
    return f"{first} {at_least:g}{why} and at most {at_most:.10g} seconds"


def seconds(
    value: Any,
    *,
    what: str,
    minimum: float = 0.0,
    maximum: float = clock.LONGEST,
    above: bool = False,
) -> float:
    """A duration as float seconds, from a number or a ``timedelta``.

    Args:
        what: The name of the value, for the message.
        minimum: The smallest value allowed; with ``above``, the value must be greater.

    Raises:
        TypeError: Neither a number nor a ``timedelta``.
        ValueError: Too small, too large, infinite or not a number.
    """
    number = value.total_seconds() if isinstance(value, dt.timedelta) else value
    if not _is_number(number, int, float):
        raise TypeError(f"{what} is {redacted(value)}; it takes seconds (a number) or a timedelta")
    # An integer may be too large for a float. Comparisons with NaN are false.
    if not (number > minimum if above else number >= minimum) or not number <= maximum:
        bounds = _bounds(minimum, maximum, above)
        raise ValueError(f"{what} is {redacted(value)}; it must be {bounds}")
    return float(number)


def or_none(kind: Kind[T]) -> Kind[T | None]:
    return Kind(f"{kind.told}, or None", lambda it: None if it is None else kind.read(it))


def dictionary() -> Kind[Mapping[Any, Any]]:
    return _which("a dict", lambda it: isinstance(it, Mapping), lambda it: it)


def arguments() -> Kind[Mapping[str, Any]]:
    """Further arguments for the objects of a client."""

    def is_right(value: Any) -> bool:
        # Python's error for a name that is none would repeat it; it may be a URL with a password.
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and name.isidentifier() for name in value
        )

    return _which("a dict of arguments by name", is_right, dict)


def addresses(at_least: int = 0) -> Kind[tuple[tuple[str, int], ...]]:
    def read(value: Any) -> tuple[tuple[str, int], ...]:
        if not isinstance(value, list | tuple) or len(value) < at_least:
            raise ValueError
        return tuple(address(*pair) for pair in value)

    def address(host: Any, port: Any) -> tuple[str, int]:
        if isinstance(port, bool) or not isinstance(port, int | str) or not 0 < int(port) <= MOST:
            raise ValueError
        return text().read(host), int(port)

    return Kind(f"a list of {'one or more ' * bool(at_least)}(host, port) pairs", read)


# -- tables ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One field of a table; see ``option``."""

    kind: Callable[[Any], Kind[Any]]
    what: str
    default: Callable[[Any], Any]
    check_id: str
    needs: str

    def hint(self, alias: object) -> str:
        default = self.default(alias)
        shown = f"{default:g}" if isinstance(default, float) else repr(default)
        tail = "" if default in (MISSING, None, (), {}) else f"; the default is {shown}"
        return f"It takes {self.kind(alias).told}: {self.what}{tail}."


def option(
    kind: Kind[T] | Callable[[Any], Kind[T]],
    what: str,
    default: Any = MISSING,
    *,
    default_of: Callable[[Any], Any] | None = None,
    check_id: str = "",
    needs: str = "",
) -> T:
    """A field of a table.

    Args:
        kind: What it takes; a function of the alias's options if that depends on them.
        what: What the field is for, in a few words.
        default: A value that ``kind`` takes. Without one, the field is required.
        default_of: The default, as a function of the alias's options.
        check_id: Of the check that reports a wrong value, if not that of the table.
        needs: The name of another field without which this one makes no sense.
    """
    of_alias = (lambda _: kind) if isinstance(kind, Kind) else kind
    made = Option(of_alias, what, default_of or (lambda _: default), check_id, needs)
    if default is MISSING:
        return cast(T, field(metadata={Option: made}))
    return cast(T, field(default_factory=lambda: default, metadata={Option: made}))


def longest_ttl() -> float:
    """For stores that must know the longest TTL that they grant."""

    def kind(alias: Any) -> Kind[float]:
        return duration(alias.ttl, why="the alias's TTL")

    return option(kind, "the longest TTL that is granted", default_of=lambda alias: alias.ttl)


def options_of(table: Any) -> dict[str, Option]:
    """The fields of a table, by name."""
    return {it.name: it.metadata[Option] for it in fields(table) if Option in it.metadata}


def read_options(
    options: Mapping[str, Option],
    given: Mapping[Any, Any],
    place: str,
    check_id: str,
    alias: object = None,
) -> tuple[dict[str, Any], list[Problem]]:
    """The value of each field that could be read, and what is wrong with the others.

    Args:
        options: Key in ``given`` → field.
        place: The setting that has the value ``given``.
        check_id: Of problems with fields that have none of their own.
        alias: The alias's options.
    """
    values: dict[str, Any] = {}
    found: list[Problem] = []
    for key, it in options.items():
        its_id = it.check_id or check_id
        value = given[key] if key in given else it.default(alias)
        if key in given:
            said = f"is {redacted_of(key, value)}."
        elif value is MISSING:
            said = "is missing."
        else:
            said = f"is not set, and its default of {value} is not allowed here."
        try:
            values[key] = it.kind(alias).read(value)
        except (TypeError, ValueError):
            found.append(Problem(its_id, f"{place}[{key!r}] {said}", it.hint(alias)))
        if it.needs and given.get(key) is not None and given.get(it.needs) is None:
            message = f"{place} has {key!r}, but no {it.needs!r}."
            found.append(Problem(its_id, message, f"Set {it.needs!r}, too."))
    return values, found


def both(one: str, other: str, place: str) -> str:
    """The message about two keys that exclude each other."""
    return f"{place} has both {one!r} and {other!r}; it takes one of them."


def unknown_keys(
    given: Mapping[Any, Any], known: Iterable[str], place: str, check_id: str
) -> Iterator[Problem]:
    known = sorted(known)
    for key in given:
        if key not in known:
            near = _nearest(key, known)
            meant = f"; did you mean {near!r}?" if near else "."
            message = f"{place} has the unknown key {redacted(key)}{meant}"
            yield Problem(check_id, message, f"It takes {known}.")


def _nearest(key: object, known: Iterable[str]) -> str:
    # Imported here, because right settings do not need it.
    import difflib

    by_small = {name.lower(): name for name in known}
    small = key.lower() if isinstance(key, str) else ""
    return next((by_small[it] for it in difflib.get_close_matches(small, by_small, 1)), "")
