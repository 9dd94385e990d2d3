"""Reads ``DLOCK_METRICS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..text.redaction import redacted

EXPORTERS: dict[str, tuple[str, str | None]] = {
    "admin": ("django_dlock.metrics.admin", None),
    "prometheus": ("django_dlock.metrics.prometheus", "prometheus_client"),
    "opentelemetry": ("django_dlock.metrics.opentelemetry", "opentelemetry"),
}
"""Name → our module, and the package that the extra of the same name installs, if it needs one."""
KEYS = ("EXPORTERS", "GROUP", "GROUPS", "RECORDS")
MOST_GROUPS = 100
LONGEST_GROUP = 64
"""Characters."""


class MetricsSettings(NamedTuple):
    """The checked value of ``DLOCK_METRICS``.

    Attributes:
        exporters: Names of ``EXPORTERS``.
        group: Makes a group from the name of a lock; ``None`` for the usual rule.
        records: Whether idempotency records are counted.
        groups: The groups of names that no template has made.
    """

    exporters: tuple[str, ...]
    group: Callable[[str], str] | None
    records: bool
    groups: tuple[str, ...] = ()


def read() -> MetricsSettings:
    """The settings.

    Raises:
        ImproperlyConfigured: Something is wrong; the message names it and what is allowed.
    """
    value: Any = getattr(settings, "DLOCK_METRICS", None)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ImproperlyConfigured(
            f"DLOCK_METRICS is {redacted(value)}; it takes a dict, such as "
            "{'EXPORTERS': ['prometheus']}"
        )
    unknown = [key for key in value if key not in KEYS]
    if unknown:
        raise ImproperlyConfigured(f"DLOCK_METRICS has {redacted(unknown)}; it takes {list(KEYS)}")
    exporters = value.get("EXPORTERS", ())
    if not isinstance(exporters, list | tuple) or any(
        name not in tuple(EXPORTERS) for name in exporters
    ):
        raise ImproperlyConfigured(
            f"DLOCK_METRICS['EXPORTERS'] is {redacted(exporters)}; it takes a list of "
            f"{sorted(EXPORTERS)}"
        )
    records = value.get("RECORDS", True)
    if not isinstance(records, bool):
        raise ImproperlyConfigured(
            f"DLOCK_METRICS['RECORDS'] is {redacted(records)}; it takes True or False"
        )
    group, groups = _group(value.get("GROUP")), _groups(value.get("GROUPS", ()))
    if group is not None and not groups:
        raise ImproperlyConfigured(
            "DLOCK_METRICS has GROUP without GROUPS; name there what the function may return, "
            "because all else counts as 'other'"
        )
    return MetricsSettings(tuple(exporters), group, records, groups)


def _groups(value: Any) -> tuple[str, ...]:
    if (
        not isinstance(value, list | tuple)
        or len(value) > MOST_GROUPS
        or not all(isinstance(group, str) and 0 < len(group) <= LONGEST_GROUP for group in value)
    ):
        raise ImproperlyConfigured(
            f"DLOCK_METRICS['GROUPS'] is {redacted(value)}; it takes a list of at most "
            f"{MOST_GROUPS} texts of 1 to {LONGEST_GROUP} characters"
        )
    return tuple(value)


def _group(value: Any) -> Callable[[str], str] | None:
    if isinstance(value, str):
        try:
            value = import_string(value)
        except Exception as error:
            raise ImproperlyConfigured(f"DLOCK_METRICS['GROUP']: {error}") from error
    if value is not None and not callable(value):
        raise ImproperlyConfigured(
            f"DLOCK_METRICS['GROUP'] is {redacted(value)}; it takes a function of a lock's name, "
            "or the dotted path of one"
        )
    group: Callable[[str], str] | None = value
    return group
