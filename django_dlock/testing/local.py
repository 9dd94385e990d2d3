"""In-process locks for tests: no server, and no locks left over from one test to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.test.utils import TestContextDecorator, override_settings

from ..conf import DEFAULT_ALIAS, KEYS, LOCAL_BACKEND
from ..core import watchdog
from ..core.held_lease import registry
from ..handler import locks

if TYPE_CHECKING:
    from typing_extensions import Never

__all__ = ["local_locks"]

COMMON_KEYS = ("TTL", "WAIT", "MAX_HOLD")
COMMON_OPTIONS = ("command_timeout", "outage_patience")


class local_locks(TestContextDecorator):
    """Keep the locks of every alias in this process, and release what is left at the end.

    Use it as a context manager, or as a decorator of functions or of ``unittest.TestCase``
    classes, where it applies to each test separately.

    Args:
        keys: Keys for the entry of every alias, such as ``WAIT=0``. Without them, ``TTL``,
            ``WAIT``, ``MAX_HOLD``, ``command_timeout`` and ``outage_patience`` are taken from
            the settings.
    """

    def __init__(self, *wrong: Never, **keys: Any) -> None:
        super().__init__()
        if wrong:
            raise TypeError(
                f"local_locks takes keywords only, not {wrong[0]!r}; as a decorator, it needs "
                "parentheses: @local_locks()"
            )
        if unknown := [key for key in keys if key not in KEYS]:
            raise TypeError(f"local_locks does not take {unknown[0]!r}; it takes {KEYS}")
        self.keys = keys

    def enable(self) -> None:
        configured = getattr(settings, "DLOCKS", None) or {DEFAULT_ALIAS: {}}
        entries = {alias: {**_common(entry), **self.keys} for alias, entry in configured.items()}
        self._override = override_settings(DLOCKS=entries)
        self._override.enable()
        # Without the package in INSTALLED_APPS, no signal receiver does this.
        locks.reset()
        try:
            for alias in locks:
                # Builds the backend, so that a wrong value is refused here.
                locks[alias]
        except BaseException:
            self._override.disable()
            locks.reset()
            raise

    def disable(self) -> None:
        try:
            _release_all()
        finally:
            self._override.disable()
            locks.reset()


def _common(entry: dict[str, Any]) -> dict[str, Any]:
    """The part of an alias's entry that the local backend accepts."""
    kept = {key: entry[key] for key in COMMON_KEYS if key in entry}
    options = entry.get("OPTIONS", {})
    kept["OPTIONS"] = {key: options[key] for key in COMMON_OPTIONS if key in options}
    return {"BACKEND": LOCAL_BACKEND, **kept}


def _release_all() -> None:
    """Release silently what this process holds on the present backends.

    If a test leaves a lock held, its loss must not be logged in the middle of another test.
    """
    for backend in map(locks.__getitem__, locks):
        for held in registry.leases_of(backend):
            watchdog.unwatch(held)
            held.end_silently()
            backend.release(held.name, held.owner, min_hold=0.0, deadline=backend.call_deadline())
