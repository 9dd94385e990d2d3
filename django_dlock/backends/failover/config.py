"""Checks an alias's settings for fail-over."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from django.conf import settings
from django.db.utils import load_backend
from django.views.decorators.debug import sensitive_variables

from ... import clock
from ...exceptions import InvalidLockBackend
from ...redaction import redacted
from ..base import AliasOptions, Problem

__all__ = ["FailoverOptions", "problems"]

OPTIONS = (
    "database",
    "failback_after",
    "failover_after",
    "max_ttl",
    "primary",
    "standby",
    "view_ttl",
)
"""Keys of ``OPTIONS``, in addition to ``command_timeout`` and ``outage_patience``."""
VENDORS = ("mysql", "postgresql", "sqlite")
"""The kinds of databases that can keep the record."""
VIEW_TTL, FAILOVER_AFTER = 5.0, 15.0


class FailoverOptions(NamedTuple):
    """The options of the backend, checked; all times are seconds.

    Attributes:
        primary, standby: Aliases in ``DLOCKS``.
        database: Alias in ``DATABASES``; ``None`` for the one that the routers choose.
        view_ttl: How long a process may rely on what it has read in the record.
        max_ttl: The longest TTL that is granted.
        failover_after: After the active store has answered nobody for this long, any process
            switches to the other one; ``None`` for never.
        failback_after: After the primary has answered for this long, any process switches back to
            it; ``None`` for never.
    """

    primary: str
    standby: str
    database: str | None
    view_ttl: float
    max_ttl: float
    failover_after: float | None
    failback_after: float | None

    @classmethod
    @sensitive_variables("given")
    def read(cls, options: AliasOptions) -> FailoverOptions:
        """Read ``OPTIONS``.

        Raises:
            InvalidLockBackend: It has an unknown key or a bad value.
        """
        found = problems(options)
        if found:
            raise InvalidLockBackend("; ".join(f"{one.message} {one.hint}" for one in found))
        given = options.options
        return cls(
            given["primary"],
            given["standby"],
            given.get("database"),
            given.get("view_ttl", VIEW_TTL),
            given.get("max_ttl", options.ttl),
            given.get("failover_after", FAILOVER_AFTER),
            given.get("failback_after"),
        )

    def other_than(self, alias: str) -> str:
        """The alias that is not active."""
        return self.standby if alias == self.primary else self.primary


def problems(options: AliasOptions) -> list[Problem]:
    """What is wrong with the settings of an alias, as far as this shows without a server."""
    where, given = f"DLOCKS[{options.alias!r}]", options.options
    found: list[Problem] = []
    if options.cache is not None or options.location is not None:
        message = f"{where} has 'CACHE' or 'LOCATION', but keeps its locks in two other aliases."
        found.append(Problem("E006", message, "Set these in the aliases that OPTIONS names."))
    if unknown := sorted(set(given).difference(OPTIONS)):
        message = f"{where}['OPTIONS'] has {redacted(unknown)}."
        hint = f"This backend takes {[*OPTIONS, 'command_timeout', 'outage_patience']}."
        found.append(Problem("E008", message, hint))
    place = f"{where}['OPTIONS']"
    for key in ("primary", "standby"):
        if not (isinstance(given.get(key), str) and given[key]):
            message = f"{place}[{key!r}] is {redacted(given.get(key))}."
            found.append(Problem("E008", message, "It takes another alias of DLOCKS."))
    if given.get("primary") == given.get("standby") and isinstance(given.get("primary"), str):
        message = f"{place} names {redacted(given['primary'])} as primary and as standby."
        found.append(Problem("E008", message, "Name two aliases with different servers."))
    return [*found, *_wrong_times(place, options), *_wrong_database(place, given)]


def _wrong_times(place: str, options: AliasOptions) -> list[Problem]:
    given, found = options.options, []
    # A view is read again after a third of its time, and each read may take one command.
    least = max(1.0, 3 * options.command_timeout)
    lowest = {"view_ttl": least, "max_ttl": options.ttl, "failover_after": 1, "failback_after": 1}
    optional = ("failover_after", "failback_after")
    for key, minimum in lowest.items():
        value = given.get(key)
        if key not in given or (value is None and key in optional):
            continue
        if not _is_at_least(minimum, value):
            allowed = f"{minimum:g} to {clock.LONGEST} seconds" + (
                ", or None" if key in optional else ""
            )
            message = f"{place}[{key!r}] is {redacted(value)}."
            found.append(Problem("E008", message, f"It takes {allowed}."))
    if "view_ttl" not in given and least > VIEW_TTL:
        message = f"{place}['view_ttl'] is not set, and its default of {VIEW_TTL:g} s is too short."
        hint = f"Set it to at least 3 times the command_timeout, {least:g} s."
        found.append(Problem("E008", message, hint))
    return found


def _is_at_least(minimum: float, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and minimum <= cast(float, value) <= clock.LONGEST


def _wrong_database(place: str, given: Any) -> list[Problem]:
    named = given.get("database", "default")
    databases = settings.DATABASES
    entry = databases.get(named) if isinstance(named, str) else None
    engine = (entry or {}).get("ENGINE") or ""
    where = f"{place}['database']" if "database" in given else place
    if not engine or engine == "django.db.backends.dummy":
        if "database" not in given and databases:
            # Routers may choose another database.
            return []
        message = (
            f"{where}: DATABASES[{redacted(named)}], which says which store is active, is not "
            "defined."
        )
        hint = f"DATABASES defines {sorted(databases)}; name one in OPTIONS['database']."
        return [Problem("E006", message, hint)]
    try:
        vendor = load_backend(engine).DatabaseWrapper.vendor
    except Exception as error:  # noqa: BLE001 - Django reports it at first use
        message = f"{where}: the engine {engine!r} of DATABASES[{named!r}] cannot be used: {error}"
        return [Problem("E006", message, "Install its driver, or name another database.")]
    if vendor in VENDORS:
        return []
    message = f"{where}: the engine of DATABASES[{named!r}] is {vendor!r}."
    return [Problem("E006", message, f"Supported are {list(VENDORS)}.")]
