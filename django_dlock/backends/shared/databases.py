"""The database of the project in which a backend keeps something."""

from __future__ import annotations

from django.conf import settings
from django.db.utils import load_backend

from ...text.redaction import redacted
from .options import Problem

VENDORS = ("mysql", "postgresql", "sqlite")
"""The kinds of databases that backends can use."""


def vendor_of(engine: str) -> str:
    vendor: str = load_backend(engine).DatabaseWrapper.vendor
    return vendor


def vendor_or_problem(place: str, named: str | None) -> str | Problem:
    """The kind of database, empty if only routers know; or E006, why it cannot be used.

    Args:
        place: ``OPTIONS``, of which ``database`` is this name.
        named: The alias in ``DATABASES``; ``None`` if routers choose it.
    """
    alias, databases = named or "default", settings.DATABASES
    where = place if named is None else f"{place}['database']"
    engine = (databases.get(alias) or {}).get("ENGINE") or ""
    if not engine or engine == "django.db.backends.dummy":
        if named is None and databases:
            # Routers may choose another database.
            return ""
        message = f"{where}: DATABASES[{redacted(alias)}] is not defined."
        hint = f"DATABASES defines {sorted(databases)}; name one in OPTIONS['database']."
        return Problem("E006", message, hint)
    try:
        vendor = vendor_of(engine)
    except Exception as error:  # noqa: BLE001 - Django reports it at first use
        message = f"{where}: the engine {engine!r} of DATABASES[{alias!r}] cannot be used: {error}"
        return Problem("E006", message, "Install its driver, or name another database.")
    if vendor not in VENDORS:
        message = f"{where}: the engine of DATABASES[{alias!r}] is {vendor!r}."
        return Problem("E006", message, f"Supported are {list(VENDORS)}.")
    return vendor
