"""The exceptions.

Three things never share a type: "held by someone else" (``LockNotAcquired``), "no answer"
(``BackendUnavailable``) and "lost while it was held" (``LeaseLost``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from .text.printable import printable

if TYPE_CHECKING:
    from .lease import LeaseInfo

__all__ = [
    "AcquireTimeout",
    "AlreadyHeld",
    "AttemptsExhausted",
    "BackendRefused",
    "BackendUnavailable",
    "ConnectionsBusy",
    "DuplicateRun",
    "IdempotencyConflict",
    "InvalidLockBackend",
    "LeaseLost",
    "LockError",
    "LockNotAcquired",
    "NotHeld",
    "PayloadMismatch",
    "QuorumNotReached",
    "RecordedFailure",
    "StaleToken",
]


class LockError(Exception):
    """Base class of all errors about a lock.

    All arguments are positional, because Celery's JSON results and pickle rebuild an exception as
    ``cls(*args)``.

    Args:
        message: What happened.
        name: The lock's name; empty if the error concerns a whole alias.
        alias: The alias in ``DLOCKS``.
    """

    def __init__(self, message: str = "", name: str = "", alias: str = "") -> None:
        super().__init__(message, name, alias)
        # Set again, because OSError, a base of TimeoutError, takes the third for a file name.
        self.args = (message, name, alias)
        self.message = message
        self.name = name
        self.alias = alias

    def __str__(self) -> str:
        place = [f"lock {self.name!r}"] if self.name else []
        if self.alias:
            place.append(f"alias {self.alias!r}")
        text = f"{self.message} ({', '.join(place)})" if place else self.message
        # What a server, a record or another process has said may contain control characters.
        return printable(text)


class LockNotAcquired(LockError):
    """The lock is held by someone else; expected under contention, so not logged as an error.

    Args:
        holder: A description of the holder: host, process, task or path, since when. Empty if
            not known. For exceptions and logs; do not show it to users.

    Attributes:
        info: The present lease as the backend knows it; ``None`` if the backend was not asked,
            and after unpickling.
    """

    info: LeaseInfo | None = None

    def __init__(
        self, message: str = "", name: str = "", alias: str = "", holder: str = ""
    ) -> None:
        super().__init__(message, name, alias)
        self.args = (message, name, alias, holder)
        self.holder = holder

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}. Holder: {printable(self.holder)}" if self.holder else text


class AcquireTimeout(LockNotAcquired, TimeoutError):
    """The lock did not become free within the waiting time."""


class AlreadyHeld(LockError):
    """This very thread, task or handle holds the lock, so waiting for it would never end."""


class LeaseLost(LockError):
    """The lease was held and is lost.

    Args:
        reason: Why: ``expired``, ``refused``, ``broken``, ``max_hold``, ``unreachable``,
            ``fork``, ``exit``, ``holder_ended``, ``interrupted`` or ``collected``.
    """

    def __init__(
        self, message: str = "", name: str = "", alias: str = "", reason: str = ""
    ) -> None:
        super().__init__(message, name, alias)
        self.args = (message, name, alias, reason)
        self.reason = reason


class NotHeld(LockError, RuntimeError):
    """A release or renewal of a lock that is not held (a ``RuntimeError``, as in ``threading``)."""


class StaleToken(LockError):
    """The resource has seen a newer fencing token, or the record a newer attempt."""


class IdempotencyConflict(LockError):
    """The idempotency table refuses this run."""


class PayloadMismatch(IdempotencyConflict):
    """The same key was used before with another payload.

    Also if the record was written under a ``SECRET_KEY`` that is neither the present one nor in
    ``SECRET_KEY_FALLBACKS``: then it is not known whether the payload is the same.
    """


class DuplicateRun(IdempotencyConflict):
    """The work of the key is already done, and ``if_duplicate`` is ``"fail"``."""


class RecordedFailure(IdempotencyConflict):
    """A copy of a message whose run has failed for good; names the recorded error."""


class AttemptsExhausted(LockError):
    """``max_attempts`` runs of the key in a row died in the middle or lost their lease."""


class BackendUnavailable(LockError):
    """The backend did not answer: the outcome is unknown. ``__cause__`` is the client's error.

    Attributes:
        unsent: Certainly nothing was sent, so there is nothing to take back: no connection could
            be made, for instance. False after unpickling.
        cure: What an operator can do about it; empty if that is not known, and after unpickling.
    """

    unsent = False
    cure = ""


class BackendRefused(BackendUnavailable):
    """The backend refused: credentials, permissions, settings, or no memory left.

    Trying again soon does not help.
    """


class ConnectionsBusy(BackendUnavailable):
    """All connections of this process stayed in use; the backend answers, and was not asked.

    No method of a ``Lock`` raises it, because all of them wait for their turn.
    """


class QuorumNotReached(BackendUnavailable):
    """Too few nodes of a quorum answered to tell whether the lock is free."""


class InvalidLockBackend(ImproperlyConfigured):
    """The alias is unknown, or its backend cannot be imported or built."""
