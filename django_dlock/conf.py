"""Reads the setting ``DLOCKS``: makes one frozen ``AliasOptions`` per alias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from .backends.alias import COMMON, EXAMPLE, IF_UNAVAILABLE
from .backends.base import AliasOptions, BaseLockBackend, Problem
from .backends.redis.config import cache_entry, is_redis_cache
from .backends.shared.options import joined, options_of, read_options, seconds, unknown_keys
from .exceptions import InvalidLockBackend
from .text.redaction import redacted

__all__ = [
    "IF_UNAVAILABLE",
    "Problem",
    "alias_options",
    "aliases",
    "can_be_renewed",
    "problems",
    "problems_of",
    "seconds",
]

DEFAULT_ALIAS = "default"
REDIS_BACKEND = EXAMPLE
DATABASE_BACKEND = "django_dlock.backends.database.DatabaseBackend"
LOCAL_BACKEND = "django_dlock.backends.local.LocalBackend"

_CORRECT = f"Correct the path: for example {REDIS_BACKEND!r} or {DATABASE_BACKEND!r}."
EXTRAS = {"redis": "redis", "kazoo": "zookeeper", "urllib3": "etcd"}
"""Client library → the extra of django-dlock that installs it."""

DUMMY_ENGINE = "django.db.backends.dummy"
"""The engine that Django uses if a project defines no database."""

_KEYS = {name.upper(): it for name, it in options_of(AliasOptions).items() if name not in COMMON}
_OPTIONS = {name: options_of(AliasOptions)[name] for name in COMMON}

KEYS = sorted(_KEYS)


def can_be_renewed(ttl: float, command_timeout: float) -> bool:
    """Whether a lease of ``ttl`` seconds survives one command that is answered late."""
    # Rounded, because 3 * 0.2 is 0.6000000000000001.
    return ttl >= round(3 * command_timeout, 9)


def configured() -> Mapping[str, Any] | None:
    """``DLOCKS`` from the settings; ``None`` if the project does not set it."""
    value: Any = getattr(settings, "DLOCKS", None)
    if value is not None and not (isinstance(value, Mapping) and value):
        shown = redacted(value)
        # Error pages show the variables of a function that raises, here and below.
        del value
        raise InvalidLockBackend(
            f"DLOCKS is {shown}; it must be a dict of aliases, such as "
            "{'default': {'BACKEND': ...}}"
        )
    for alias in value or ():
        if not (isinstance(alias, str) and alias):
            shown = redacted(alias)
            del value, alias
            raise InvalidLockBackend(f"DLOCKS has the alias {shown}; it must be a string")
    return value


def aliases() -> list[str]:
    """The names of all aliases; only ``default`` without ``DLOCKS``."""
    value = configured()
    return [DEFAULT_ALIAS] if value is None else list(value)


def alias_options(alias: str) -> AliasOptions:
    """The validated entry of one alias.

    Raises:
        InvalidLockBackend: No such alias, or a key, type or value of its entry is wrong.
    """
    found, options = _checked(alias)
    if found or options is None:
        raise InvalidLockBackend(joined(found))
    return options


def problems() -> list[Problem]:
    """All errors in ``DLOCKS``, of all aliases."""
    try:
        names = aliases()
    except InvalidLockBackend as error:
        return [Problem("E001", str(error), "Set DLOCKS to a dict of aliases.")]
    return [problem for alias in names for problem in problems_of(alias)]


def problems_of(alias: str) -> list[Problem]:
    """All errors in the entry of one alias."""
    try:
        return _checked(alias)[0]
    except InvalidLockBackend as error:
        return [Problem("E002", str(error), "See the settings reference.")]


def _checked(alias: str) -> tuple[list[Problem], AliasOptions | None]:
    """The errors in an entry, and the entry itself as far as it can be read.

    Raises:
        InvalidLockBackend: There is no such entry, or it is not a dict.
    """
    found, options = _read(alias, _entry(alias))
    if options is None:
        return found, None
    backend = _backend_class(options)
    if isinstance(backend, Problem):
        return [backend], options
    return [*_problems_of(backend, options), *_wrongly_named(alias)], options


def _problems_of(backend: type[BaseLockBackend], options: AliasOptions) -> list[Problem]:
    try:
        return backend.problems(options)
    except Exception as error:  # noqa: BLE001 - of a backend that is not prepared for a value
        # Its text may contain a password.
        message = (
            f"DLOCKS[{options.alias!r}]: {options.backend} cannot check the entry "
            f"({type(error).__name__})."
        )
        return [Problem("E008", message, "Correct the types of its values.")]


def _backend_class(options: AliasOptions) -> type[BaseLockBackend] | Problem:
    """The class that ``BACKEND`` names, or why it cannot be used."""
    place = f"DLOCKS[{options.alias!r}]['BACKEND']"
    if not all(part.isidentifier() for part in options.backend.split(".")):
        # Python's error would repeat parts of what may be a URL with a password.
        message = f"{place} is {redacted(options.backend)}, which is not the path of a class."
        return Problem("E008", message, f"Set it to such a path, for example {REDIS_BACKEND!r}.")
    try:
        found: Any = import_string(options.backend)
    except Exception as error:  # noqa: BLE001 - whatever a module of the project raises
        message = f"{place}: cannot import {options.backend!r}: {error}."
        missing = error.name if isinstance(error, ImportError) else None
        extra = EXTRAS.get((missing or "").partition(".")[0])
        hint = f'pip install "django-dlock[{extra}]"' if extra else _CORRECT
        return Problem("E008", message, hint)
    if isinstance(found, type) and issubclass(found, BaseLockBackend):
        return found
    base = f"{BaseLockBackend.__module__}.{BaseLockBackend.__qualname__}"
    message = f"{place}: {options.backend!r} is not a subclass of {base}."
    return Problem("E008", message, "Use one that is.")


# -- aliases that name aliases -------------------------------------------------------------


def _named(alias: str) -> tuple[str, ...]:
    """The aliases that this one uses; empty if its entry is wrong."""
    try:
        options = _read(alias, _entry(alias))[1]
    except InvalidLockBackend:
        return ()
    if options is None or isinstance(backend := _backend_class(options), Problem):
        return ()
    return backend.aliases_named(options)


def _wrongly_named(alias: str) -> list[Problem]:
    found, place = [], f"DLOCKS[{alias!r}]"
    for other in _named(alias):
        if other not in aliases():
            message = f"{place} names the alias {redacted(other)}, which DLOCKS does not define."
            found.append(Problem("E009", message, f"It defines {sorted(aliases())}."))
    circle = _circle((alias,))
    if circle:
        message = f"{place} uses itself: {' → '.join(map(repr, circle))}."
        found.append(Problem("E009", message, "Choose an alias that uses none of these."))
    return found


def _circle(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path from the first alias back to itself; empty if there is none."""
    for other in _named(path[-1]):
        if other == path[0]:
            return (*path, other)
        if other not in path and (found := _circle((*path, other))):
            return found
    return ()


# -- one entry -----------------------------------------------------------------------------


def _entry(alias: str) -> Mapping[str, Any]:
    value = configured()
    if value is None:
        if alias != DEFAULT_ALIAS:
            raise InvalidLockBackend(
                f"There is no lock alias {alias!r}: without DLOCKS there is only 'default'"
            )
        return _default_entry()
    if alias not in value:
        known = sorted(value)
        del value
        raise InvalidLockBackend(f"There is no lock alias {alias!r} in DLOCKS; it defines {known}")
    entry = value[alias]
    if not isinstance(entry, Mapping):
        shown = redacted(entry)
        del value, entry
        raise InvalidLockBackend(
            f"DLOCKS[{alias!r}] is {shown}; it must be a dict, as in DLOCKS = "
            f"{{'default': {{'BACKEND': {REDIS_BACKEND!r}, 'LOCATION': 'redis://…'}}}}"
        )
    return entry


def _default_entry() -> Mapping[str, Any]:
    """The entry of ``default`` without ``DLOCKS``: a Redis cache, else the database."""
    cache = cache_entry("default").get("BACKEND", "")
    if is_redis_cache(cache):
        return {"BACKEND": REDIS_BACKEND, "CACHE": "default"}
    engine = (settings.DATABASES.get("default") or {}).get("ENGINE", DUMMY_ENGINE)
    if engine != DUMMY_ENGINE:
        return {"BACKEND": DATABASE_BACKEND}
    # In-process locks are never chosen silently: they lock nothing between workers.
    raise InvalidLockBackend(
        "django_dlock has nowhere to keep its locks: DLOCKS is not set, CACHES['default'] is "
        f"{redacted(cache or 'not set')}, not a Redis cache, and DATABASES['default'] is not "
        f"set. Define DATABASES['default'], or set DLOCKS = {{'default': {{'BACKEND': "
        f"{REDIS_BACKEND!r}, 'LOCATION': 'redis://localhost:6379/0'}}}}"
    )


def _read(alias: str, entry: Mapping[str, Any]) -> tuple[list[Problem], AliasOptions | None]:
    place = f"DLOCKS[{alias!r}]"
    values, wrong = read_options(_KEYS, entry, place, "E004")
    given = values.get("OPTIONS", {})
    inner, wrong_inner = read_options(_OPTIONS, given, f"{place}['OPTIONS']", "E004")
    found = [*unknown_keys(entry, KEYS, place, "E003"), *wrong, *wrong_inner]
    ttl, timeout = values.get("TTL"), inner.get("command_timeout")
    if ttl and timeout and not can_be_renewed(ttl, timeout):
        message = (
            f"{place}['TTL'] is {ttl:g} s, less than 3 times the command_timeout of {timeout:g} s: "
            "the lease would not survive one slow answer."
        )
        hint = f"Raise TTL, or lower {place}['OPTIONS']['command_timeout']."
        found.append(Problem("E007", message, hint))
    if found:
        return found, None
    values["OPTIONS"] = {key: value for key, value in given.items() if key not in _OPTIONS}
    read = {key.lower(): value for key, value in values.items()}
    return [], AliasOptions(alias, **read, **inner)
