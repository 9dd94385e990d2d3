"""What a backend gets from its alias in ``DLOCKS``, and how it reports what is wrong there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from ..exceptions import InvalidLockBackend
from ..text.redaction import redacted_of
from .shared.options import (
    Problem,
    both,
    choice,
    dictionary,
    duration,
    joined,
    option,
    options_of,
    or_none,
    read_options,
    text,
    texts,
    unknown_keys,
)

if TYPE_CHECKING:
    # In ``typing`` from Python 3.11 on.
    from typing_extensions import Self

__all__ = ["AliasOptions", "BackendOptions", "Fact", "Problem", "StoreSwitch"]

EXAMPLE = "django_dlock.backends.redis.RedisBackend"
IF_UNAVAILABLE = ("raise", "local", "skip")
"""What a lock may do while its backend does not answer."""
COMMON = ("command_timeout", "outage_patience")
"""Fields that are keys of ``OPTIONS``, with every backend."""
MOST_TIMEOUT = 86_400
"""Seconds; systems, servers and drivers keep it in milliseconds, often in 32 bits."""


class Fact(NamedTuple):
    """What a store reports about itself, such as its version; ``diagnose_locks`` shows it.

    Attributes:
        topic: What it is about, in one word: ``server``, ``persistence``.
        text: One line for an operator.
        hint: What to do, if the fact puts locks at risk; else empty.
    """

    topic: str
    text: str
    hint: str = ""


class StoreSwitch(NamedTuple):
    """An alias keeps its locks in another store from now on.

    Attributes:
        active, previous: Aliases of the stores.
        epoch: The number of the switch; the highest part of each fencing token.
        switched_by: Who made it; empty if a process did.
    """

    alias: str
    active: str
    previous: str
    epoch: int
    reason: str
    switched_by: str


class _Shown:
    """A dataclass whose ``repr`` hides passwords."""

    def __init_subclass__(cls) -> None:
        # Found in the class, so ``dataclass`` makes none of its own.
        cls.__repr__ = _Shown.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        named = ((each.name, getattr(self, each.name)) for each in fields(cast(Any, self)))
        values = (f"{name}={redacted_of(name, value)}" for name, value in named)
        return f"{type(self).__qualname__}({', '.join(values)})"


@dataclass(frozen=True)
class AliasOptions(_Shown):
    """One validated entry of ``DLOCKS``; a backend is built from nothing else.

    The keys of the entry are the names of the fields in capitals, but for those in ``COMMON``,
    which ``options`` lacks. Durations are seconds; a ``wait`` of ``None`` waits for ever.
    """

    alias: str
    backend: str = option(text(), f"the dotted path of a backend class, such as {EXAMPLE!r}")
    cache: str | None = option(or_none(text()), "the alias in CACHES to connect as", None)
    location: str | tuple[str, ...] | None = option(or_none(texts()), "where to connect", None)
    key_prefix: str = option(text(), "the name space of the alias", "dlock")
    ttl: float = option(
        duration(0.1), "how long a lease lasts without renewal", 30.0, check_id="E005"
    )
    wait: float | None = option(
        or_none(duration()), "how long a lock waits for its name", 10.0, check_id="E005"
    )
    max_hold: float = option(duration(0.1), "how long a lock may be held", 86400.0, check_id="E005")
    stream_max_hold: float = option(
        duration(0.1), "how long a streamed answer may hold its lock", 300.0, check_id="E005"
    )
    command_timeout: float = option(
        duration(at_most=MOST_TIMEOUT, above=True),
        "how long one command may take",
        1.0,
        check_id="E005",
    )
    outage_patience: float = option(
        duration(), "how long an acquire tries during an outage", 5.0, check_id="E005"
    )
    if_unavailable: str = option(
        choice(*IF_UNAVAILABLE), "what a Lock does if the backend does not answer", "raise"
    )
    options: Mapping[str, Any] = option(dictionary(), "the options of the backend", {})


@dataclass(frozen=True, kw_only=True)
class BackendOptions(_Shown):
    """A backend's own keys of ``OPTIONS``: a subclass makes each field with ``option``.

    Attributes:
        check_id: Of the check that reports unknown keys, and wrong values of most fields.
        connects_by: Which of ``CACHE`` and ``LOCATION`` the backend takes, of which one is
            required; ``None`` leaves this to ``check``.
        connection: How to write them, or what to set instead; a sentence.
    """

    check_id: ClassVar[str] = "E008"
    connects_by: ClassVar[tuple[str, ...] | None] = None
    connection: ClassVar[str] = ""

    @classmethod
    def problems(cls, alias: AliasOptions) -> list[Problem]:
        """All errors in the settings of the alias."""
        own, found = cls._read(alias)
        return found if own is None else [*found, *own.check(alias)]

    @classmethod
    def read(cls, alias: AliasOptions) -> Self:
        """The values of the fields.

        Raises:
            InvalidLockBackend: There are ``problems``.
        """
        own, found = cls._read(alias)
        if own is None or (found := [*found, *own.check(alias)]):
            raise InvalidLockBackend(joined(found))
        return own

    def check(self, alias: AliasOptions) -> Iterable[Problem]:
        """What is wrong beyond the value of one field; asked only if each of them is right."""
        return ()

    @classmethod
    def _read(cls, alias: AliasOptions) -> tuple[Self | None, list[Problem]]:
        place, own = f"DLOCKS[{alias.alias!r}]", options_of(cls)
        inner = f"{place}['OPTIONS']"
        found = [*cls._connection(alias, place)]
        found += unknown_keys(alias.options, [*own, *COMMON], inner, cls.check_id)
        values, wrong = read_options(own, alias.options, inner, cls.check_id, alias)
        found += wrong
        return (None if found else cls(**values)), found

    @classmethod
    def _connection(cls, alias: AliasOptions, place: str) -> Iterator[Problem]:
        if cls.connects_by is None:
            return
        given = {"CACHE": alias.cache, "LOCATION": alias.location}
        keys = [key for key, value in given.items() if value is not None]
        wrong = [key for key in keys if key not in cls.connects_by]
        for key in wrong:
            message = f"{place} has {key!r}, which this backend does not take."
            yield Problem("E006", message, f"Remove it. {cls.connection}")
        if not wrong and len(keys) > 1:
            yield Problem("E006", both("CACHE", "LOCATION", place), cls.connection)
        if not keys and cls.connects_by:
            which = " or ".join(map(repr, cls.connects_by))
            message = f"{place} has no {which} to say where its locks are kept."
            yield Problem("E006", message, cls.connection)
