"""The app: registers the checks and the receivers of signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from .backends.base import StoreSwitch
    from .lease import LeaseInfo

__all__ = ["DjangoDlockConfig"]


class DjangoDlockConfig(AppConfig):
    name = "django_dlock"
    label = "django_dlock"
    verbose_name = _("Locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Imported here, because models cannot be imported before the apps are loaded.
        from . import checks, process
        from .backends import sqlite_forks
        from .checks import uwsgi
        from .handler import locks
        from .log import logger
        from .metrics import config
        from .models.records import IdempotencyRecordManager
        from .operators import audit
        from .records import retention

        checks.register()
        # Registered before all other fork hooks, because those may take locks; hooks run in
        # reverse. If SQLite's ran first, the other would wait for threads that it holds up.
        sqlite_forks.connect()
        process.take_part_in_forks()
        audit.connect()
        uwsgi.log_problems()
        locks.on_break, locks.on_switch = _tell_break, _tell_switch
        IdempotencyRecordManager.on_forget = staticmethod(retention.forget)
        # Logged and not raised, so that ``manage.py check`` can run and report it.
        try:
            if config.read().exporters:
                _connect_metrics()
        except ImproperlyConfigured as error:
            logger.error("Metrics are off: %s", error)
        try:
            _connect_tracing()
        except ImproperlyConfigured as error:
            logger.error("Tracing is off: %s", error)
        setting_changed.connect(_reset_backends, dispatch_uid="django_dlock.apps")


def _tell_break(alias: str, name: str, owner: str, info: LeaseInfo | None) -> None:
    from .operators.inspection import report_break

    report_break(alias, name, owner, info, reason="code")


def _tell_switch(switch: StoreSwitch) -> None:
    from . import signals
    from .core import dispatch
    from .lock import Lock

    dispatch.send(signals.store_switched, Lock, **switch._asdict())


def _connect_metrics() -> None:
    # Imported here, because a project without metrics needs none of it.
    from .metrics import config, recorder

    recorder.connect(config.read())


def _connect_tracing() -> None:
    from .core import tracing
    from .tracing import setting as tracing_setting

    tracer = tracing_setting.tracer_class()
    tracing.use(None if tracer is None else tracer())


def _reset_backends(*, setting: str, **_: Any) -> None:
    """Discard all backends and metrics, so that ``override_settings`` takes effect."""
    if setting == "DLOCK_TRACING":
        _connect_tracing()
    if setting == "DLOCK_METRICS":
        _connect_metrics()
    if setting == "DLOCK_SCOPE":
        from . import tenancy

        tenancy.reset()
    if setting in ("DLOCKS", "CACHES", "DATABASES", "DATABASE_ROUTERS"):
        from .handler import locks

        locks.reset()
