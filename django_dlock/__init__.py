"""Distributed locks for Django and Celery that renew themselves and report when they are lost.

Every name is loaded on first use, so ``import django_dlock`` imports no model, no Celery and no
client library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .celery import LockedTask
    from .decorators import locked
    from .exceptions import (
        AcquireTimeout,
        AlreadyHeld,
        AttemptsExhausted,
        BackendRefused,
        BackendUnavailable,
        ConnectionsBusy,
        DuplicateRun,
        IdempotencyConflict,
        InvalidLockBackend,
        LeaseLost,
        LockError,
        LockNotAcquired,
        NotHeld,
        PayloadMismatch,
        QuorumNotReached,
        RecordedFailure,
        StaleToken,
    )
    from .fields import FencingTokenField
    from .handler import locks
    from .keys import keyed_digest
    from .lock import DEFAULT, Lock
    from .text.mistakes import LockNameWarning
    from .views import locked_view
    from .views.idempotency_key import BodyField
    from .views.idempotent import idempotent_view

__all__ = [
    "DEFAULT",
    "AcquireTimeout",
    "AlreadyHeld",
    "AttemptsExhausted",
    "BackendRefused",
    "BackendUnavailable",
    "BodyField",
    "ConnectionsBusy",
    "DuplicateRun",
    "FencingTokenField",
    "IdempotencyConflict",
    "InvalidLockBackend",
    "LeaseLost",
    "Lock",
    "LockError",
    "LockNameWarning",
    "LockNotAcquired",
    "LockedTask",
    "NotHeld",
    "PayloadMismatch",
    "QuorumNotReached",
    "RecordedFailure",
    "StaleToken",
    "idempotent_view",
    "keyed_digest",
    "locked",
    "locked_view",
    "locks",
]

__version__ = "0.1.0"

_MODULES = {
    "BodyField": "views.idempotency_key",
    "DEFAULT": "lock",
    "FencingTokenField": "fields",
    "Lock": "lock",
    "LockNameWarning": "text.mistakes",
    "LockedTask": "celery",
    "idempotent_view": "views.idempotent",
    "keyed_digest": "keys",
    "locked": "decorators",
    "locked_view": "views",
    "locks": "handler",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_MODULES.get(name, 'exceptions')}")
    except ModuleNotFoundError as error:
        if error.name != "celery":
            raise
        message = f'{name} needs Celery: pip install "django-dlock[celery]"'
        raise ModuleNotFoundError(message, name="celery") from error
    except Exception as error:
        # Importing the package itself loads nothing of Django.
        from django.apps import apps
        from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured

        is_missing = apps.apps_ready and not apps.is_installed(__name__)
        if is_missing and isinstance(error, RuntimeError):
            raise ImproperlyConfigured(
                f"{name} needs the tables of django_dlock: add it to INSTALLED_APPS and migrate"
            ) from error
        if not isinstance(error, AppRegistryNotReady):
            raise
        raise AppRegistryNotReady(
            f"{name} needs Django's models, which are not loaded yet: import it in a module of "
            "tasks or views, not in celery.py, the settings or an app's __init__.py"
        ) from error
    value = getattr(module, name)
    # From now on it is found without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
