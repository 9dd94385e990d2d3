"""The only reader of settings: ``DLOCKS`` → one frozen ``AliasOptions`` per alias."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from django.conf import settings
from django.utils.module_loading import import_string

from .backends.base import AliasOptions
from .exceptions import InvalidLockBackend

__all__ = ["Problem", "alias_options", "aliases", "problems", "seconds"]

DEFAULT_ALIAS = "default"
REDIS_BACKEND = "django_dlock.backends.redis.RedisBackend"
LOCAL_BACKEND = "django_dlock.backends.local.LocalBackend"
REDIS_CACHES = ("django.core.cache.backends.redis.RedisCache", "django_redis.cache.RedisCache")

_DEFAULTS = AliasOptions(alias="", backend="")
_KEYS = (
    "BACKEND",
    "CACHE",
    "KEY_PREFIX",
    "LOCATION",
    "MAX_HOLD",
    "OPTIONS",
    "TTL",
    "WAIT",
)


class Problem(NamedTuple):
    """Something wrong in the settings, told by a system check and raised at first use."""

    id: str
    message: str
    hint: str


def seconds(value: Any, *, what: str, minimum: float = 0.0, above: bool = False) -> float:
    """A duration as float seconds, from a number or a ``timedelta``.

    Args:
        what: How the value is called where it is set, for the message.
        minimum: The least that is allowed; with ``above``, more than that.

    Raises:
        TypeError: Neither a number nor a ``timedelta``.
        ValueError: Too small, infinite or not a number.
    """
    if isinstance(value, dt.timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r}; it takes seconds (a number) or a timedelta")
    number = float(value)
    too_small = number <= minimum if above else number < minimum
    if not math.isfinite(number) or too_small:
        bound = "more than" if above else "at least"
        raise ValueError(f"{what} is {value!r}; it must be finite and {bound} {minimum:g} seconds")
    return number


def configured() -> Mapping[str, Any] | None:
    """``DLOCKS`` as it stands, ``None`` where the project has none."""
    value: Any = getattr(settings, "DLOCKS", None)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidLockBackend(
            f"DLOCKS is {value!r}; it must be a dict of aliases, such as "
            "{'default': {'BACKEND': ...}}"
        )
    return value


def aliases() -> list[str]:
    """The names of all aliases; ``default`` alone without ``DLOCKS``."""
    value = configured()
    return [DEFAULT_ALIAS] if value is None else list(value)


def alias_options(alias: str) -> AliasOptions:
    """The validated entry of one alias.

    Raises:
        InvalidLockBackend: No such alias, or a key, type or value of its entry is wrong.
    """
    entry = _entry(alias)
    found, options = _read(alias, entry)
    if found or options is None:
        raise InvalidLockBackend("; ".join(f"{p.message} {p.hint}" for p in found))
    return options


def problems() -> list[Problem]:
    """Everything wrong with ``DLOCKS``, over all aliases."""
    found: list[Problem] = []
    try:
        names = aliases()
    except InvalidLockBackend as error:
        return [Problem("E001", str(error), "Set DLOCKS to a dict of aliases.")]
    for alias in names:
        try:
            entry = _entry(alias)
        except InvalidLockBackend as error:
            found.append(Problem("E002", str(error), "See the settings reference."))
            continue
        found.extend(_read(alias, entry)[0])
    return found


def _entry(alias: str) -> Mapping[str, Any]:
    value = configured()
    if value is None:
        if alias != DEFAULT_ALIAS:
            raise InvalidLockBackend(
                f"There is no lock alias {alias!r}: DLOCKS is not set, which defines 'default' only"
            )
        return _from_default_cache()
    if alias not in value:
        raise InvalidLockBackend(
            f"There is no lock alias {alias!r} in DLOCKS; it defines {sorted(value)}"
        )
    entry = value[alias]
    if not isinstance(entry, Mapping):
        raise InvalidLockBackend(f"DLOCKS[{alias!r}] is {entry!r}; it must be a dict")
    return entry


def _from_default_cache() -> Mapping[str, Any]:
    cache = settings.CACHES.get("default", {})
    if is_redis_cache(cache.get("BACKEND", "")):
        return {"BACKEND": REDIS_BACKEND, "CACHE": "default"}
    # An in-process lock is never chosen silently: it would guard nothing between workers.
    raise InvalidLockBackend(
        "django_dlock has no place for its locks: DLOCKS is not set and CACHES['default'] is "
        f"{cache.get('BACKEND', 'not set')!r}, not a Redis cache. Set DLOCKS = {{'default': "
        f"{{'BACKEND': {REDIS_BACKEND!r}, 'LOCATION': 'redis://localhost:6379/0'}}}}"
    )


def is_redis_cache(path: str) -> bool:
    """Whether a cache's ``BACKEND`` is a Redis cache, Django's own or django-redis'."""
    if path in REDIS_CACHES:
        return True
    try:
        cache_class = import_string(path)
    except ImportError:
        return False
    bases = getattr(cache_class, "__mro__", ())
    return any(f"{base.__module__}.{base.__qualname__}" in REDIS_CACHES for base in bases)


class _Entry:
    """Reads one alias's entry key by key and collects what is wrong with it."""

    def __init__(self, alias: str, entry: Mapping[str, Any]) -> None:
        self.alias, self.entry = alias, entry
        self.found: list[Problem] = []

    def wrong(self, check_id: str, message: str, hint: str) -> None:
        self.found.append(Problem(check_id, message, hint))

    def place(self, key: str) -> str:
        return f"DLOCKS[{self.alias!r}][{key!r}]"

    def text(self, key: str, default: str | None) -> str | None:
        value = self.entry.get(key, default)
        if value is not default and not (isinstance(value, str) and value):
            self.wrong(
                "E004", f"{self.place(key)} is {value!r}.", "It must be a string, not empty."
            )
            return default
        return value

    def duration(self, key: str, default: float, minimum: float) -> float:
        try:
            return seconds(self.entry.get(key, default), what=self.place(key), minimum=minimum)
        except (TypeError, ValueError) as error:
            self.wrong("E005", f"{error}.", f"Set it in {self.place(key)}; default {default:g}.")
            return default


def _read(alias: str, entry: Mapping[str, Any]) -> tuple[list[Problem], AliasOptions | None]:
    read = _Entry(alias, entry)
    for key in entry:
        if key not in _KEYS:
            read.wrong(
                "E003", f"DLOCKS[{alias!r}] has the unknown key {key!r}.", f"Known: {list(_KEYS)}."
            )
    backend = read.text("BACKEND", None)
    if entry.get("BACKEND") is None:
        read.wrong("E004", f"{read.place('BACKEND')} is missing.", f"Set it, to {REDIS_BACKEND!r}.")
    cache, location = read.text("CACHE", None), read.text("LOCATION", None)
    if backend == REDIS_BACKEND and (cache is None) == (location is None):
        read.wrong(
            "E006",
            f"DLOCKS[{alias!r}] must have either 'CACHE' or 'LOCATION' to know its Redis.",
            "CACHE names an alias in CACHES; LOCATION is redis://, rediss:// or unix://.",
        )
    if cache is not None:
        _check_cache(read, cache)
    wait: float | None = None
    if entry.get("WAIT", _DEFAULTS.wait) is not None:
        wait = read.duration("WAIT", 10.0, 0.0)
    ttl = read.duration("TTL", _DEFAULTS.ttl, 0.1)
    options, command_timeout = _read_options(read)
    if ttl < 3 * command_timeout:
        read.wrong(
            "E007",
            f"{read.place('TTL')} is {ttl:g} s, less than 3 times the command_timeout of "
            f"{command_timeout:g} s: a renewed lease would not outlive one slow answer.",
            f"Raise TTL, or lower {read.place('OPTIONS')}['command_timeout'].",
        )
    max_hold = read.duration("MAX_HOLD", _DEFAULTS.max_hold, 0.1)
    key_prefix = read.text("KEY_PREFIX", _DEFAULTS.key_prefix) or _DEFAULTS.key_prefix
    if read.found or backend is None:
        return read.found, None
    return [], AliasOptions(
        alias=alias,
        backend=backend,
        cache=cache,
        location=location,
        key_prefix=key_prefix,
        ttl=ttl,
        wait=wait,
        max_hold=max_hold,
        command_timeout=command_timeout,
        options=options,
    )


def _check_cache(read: _Entry, cache: str) -> None:
    caches = settings.CACHES
    if cache not in caches:
        read.wrong(
            "E006",
            f"{read.place('CACHE')} is {cache!r}, which CACHES does not define.",
            f"CACHES defines {sorted(caches)}.",
        )
    elif not is_redis_cache(caches[cache].get("BACKEND", "")):
        read.wrong(
            "E006",
            f"{read.place('CACHE')} names CACHES[{cache!r}], which is "
            f"{caches[cache].get('BACKEND')!r}, not a Redis cache.",
            f"Use one of {list(REDIS_CACHES)} there, or LOCATION here.",
        )


def _read_options(read: _Entry) -> tuple[Mapping[str, Any], float]:
    default = _DEFAULTS.command_timeout
    options = read.entry.get("OPTIONS", {})
    if not isinstance(options, Mapping):
        read.wrong("E004", f"{read.place('OPTIONS')} is {options!r}.", "It must be a dict.")
        return {}, default
    place = f"{read.place('OPTIONS')}['command_timeout']"
    try:
        timeout = seconds(options.get("command_timeout", default), what=place, above=True)
    except (TypeError, ValueError) as error:
        read.wrong("E005", f"{error}.", f"Set it in {place}; default {default:g}.")
        timeout = default
    return {key: value for key, value in options.items() if key != "command_timeout"}, timeout
