"""The error tree.

Three things never share a type: "held by another" (``LockNotAcquired``), "no answer"
(``BackendUnavailable``) and "we held it and no longer do" (``LeaseLost``).
"""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured

__all__ = [
    "AcquireTimeout",
    "AlreadyHeld",
    "AttemptsExhausted",
    "BackendUnavailable",
    "DuplicateRun",
    "IdempotencyConflict",
    "InvalidLockBackend",
    "LeaseLost",
    "LockError",
    "LockNotAcquired",
    "NotHeld",
    "PayloadMismatch",
    "QuorumNotReached",
    "StaleToken",
]


class LockError(Exception):
    """Base of every error about one lock.

    All details are positional, because Celery's JSON results rebuild an exception as
    ``cls(*args)`` and pickle does the same.

    Args:
        message: What happened.
        name: The lock's name; empty where a whole alias is concerned.
        alias: The alias in ``DLOCKS``.
    """

    def __init__(self, message: str = "", name: str = "", alias: str = "") -> None:
        super().__init__(message, name, alias)
        # Said again because OSError, a base of TimeoutError, takes the third for a file's name.
        self.args = (message, name, alias)
        self.message = message
        self.name = name
        self.alias = alias

    def __str__(self) -> str:
        place = [f"lock {self.name!r}"] if self.name else []
        if self.alias:
            place.append(f"alias {self.alias!r}")
        return f"{self.message} ({', '.join(place)})" if place else self.message


class LockNotAcquired(LockError):
    """Held by another; expected under contention, not logged as an error."""


class AcquireTimeout(LockNotAcquired, TimeoutError):
    """The waiter's patience ended before the holder released."""


class AlreadyHeld(LockError):
    """Held by this very thread, task or handle: waiting for it would be for ever."""


class LeaseLost(LockError):
    """We held it and no longer do.

    Args:
        reason: Why: ``expired``, ``refused``, ``broken``, ``max_hold``, ``unreachable``,
            ``fork``, ``exit``, ``holder_ended`` or ``interrupted``.
    """

    def __init__(
        self, message: str = "", name: str = "", alias: str = "", reason: str = ""
    ) -> None:
        super().__init__(message, name, alias)
        self.args = (message, name, alias, reason)
        self.reason = reason


class NotHeld(LockError, RuntimeError):
    """Release or renew without a hold (a ``RuntimeError``, as in ``threading``)."""


class StaleToken(LockError):
    """The resource has seen a newer fencing token, or the record a newer attempt."""


class IdempotencyConflict(LockError):
    """The idempotency table refuses this run."""


class PayloadMismatch(IdempotencyConflict):
    """The same key was used before with another payload."""


class DuplicateRun(IdempotencyConflict):
    """The key has been worked off already and ``if_duplicate`` is ``"fail"``."""


class AttemptsExhausted(LockError):
    """As many runs of one key as ``max_attempts`` allows died in the middle."""


class BackendUnavailable(LockError):
    """No answer: the outcome is unknown. ``__cause__`` is the client's own error."""


class QuorumNotReached(BackendUnavailable):
    """Too few nodes answered."""


class InvalidLockBackend(ImproperlyConfigured):
    """The alias is unknown, or its backend cannot be imported or built."""
