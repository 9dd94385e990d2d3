"""The app: registers the checks and the receivers of signals."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.signals import setting_changed
from django.utils.translation import gettext_lazy as _

__all__ = ["DjangoDlockConfig"]


class DjangoDlockConfig(AppConfig):
    name = "django_dlock"
    label = "django_dlock"
    verbose_name = _("Locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Here and not above: models cannot be imported before the apps are loaded.
        from . import checks, lock_events

        checks.register()
        lock_events.connect()
        setting_changed.connect(_forget_backends, dispatch_uid="django_dlock.apps")


def _forget_backends(*, setting: str, **_: Any) -> None:
    """So that ``override_settings`` in a project's tests has its effect."""
    if setting in ("DLOCKS", "CACHES"):
        from .handler import locks

        locks.reset()
