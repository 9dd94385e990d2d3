"""The message header that tells a delivery what happened to earlier ones.

``requeue.py`` writes it on messages that are published again, ``unique.py`` on those that reserve
their key, and ``Delivery`` on the request of a retry; ``DeliveryContext`` reads it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from celery.app.task import Context

__all__ = ["HEADER", "RequeueHeader"]

HEADER = "django_dlock"
"""The name of the header."""


@dataclass(frozen=True, slots=True)
class RequeueHeader:
    """What a message carries from one delivery to the next.

    Attributes:
        count: How often it was requeued since its task last ran.
        since: When contention first requeued it, on the clock of the lock's backend; ``None``
            if it was not contention, or the backend's time is not known.
        contended: How often contention requeued it since its task last ran.
        setbacks: How many runs ended without an outcome, for any reason. Unlike the counts
            above, this and ``losses`` are kept when the task runs again.
        losses: How many of them count towards ``max_attempts``, for tasks without a record.
        parked: The lease that was, or may have been, parked for it, as ``owner:name``; or empty.
        reserved: The reservation made when it was published (``Reservation.mark``); or empty.
    """

    count: int = 0
    since: float | None = None
    contended: int = 0
    setbacks: int = 0
    losses: int = 0
    parked: str = ""
    reserved: str = ""

    @classmethod
    def of(cls, request: Context) -> RequeueHeader:
        """The header of the request's message; a damaged one counts as that of a new message."""
        found: Any = (request.headers or {}).get(HEADER)
        if found is None:
            return _NEW
        try:
            since = found["since"]
            told = {name: kind(found[name]) for name, kind in _KINDS.items() if name in found}
            return cls(since=None if since is None else float(since), **told)
        except (TypeError, KeyError, ValueError):
            return _NEW

    @property
    def parked_as(self) -> tuple[str, str]:
        """Owner and name of the parked lease; both empty if there is none."""
        owner, _, name = self.parked.partition(":")
        return owner, name

    def without_contention(self) -> RequeueHeader:
        """The header once the task runs: without the counts of contention."""
        if not self.count and self.since is None:
            return self
        return replace(self, count=0, since=None, contended=0)

    def after_setback(self, *, losses: int = 0) -> RequeueHeader:
        """The header after a run without an outcome."""
        return replace(self, setbacks=self.setbacks + 1, losses=self.losses + losses)

    def write(self, request: Context) -> None:
        """Set the header on the request, so that a retry which the task publishes carries it."""
        headers = dict(request.headers or {})
        headers.pop(HEADER, None)
        if self != _NEW:
            headers[HEADER] = asdict(self)
        request.headers = headers


_NEW = RequeueHeader()
_KINDS = {name: type(new) for name, new in asdict(_NEW).items() if name != "since"}
