"""The message header that tells a delivery what happened to earlier ones.

``requeue.py`` writes it on messages that are published again, ``unique.py`` on those that reserve
their key, and ``Delivery`` on the request of a retry; ``DeliveryContext`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeGuard

from celery.app.task import Context

from ... import tenancy
from ...log import logger
from ...text.names import REFUSED

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
        outbox: 1 if a run has recorded the message, which may therefore be published twice under
            one id; kept until its task runs.
        losses: How many of them count towards ``max_attempts``, for tasks without a record.
        parked: The lease that was, or may have been, parked for it, as ``owner:name``; or empty.
        reserved: The reservation made when it was published (``Reservation.mark``); or empty.
        scope: That of the tenant who was active where the message was published; or empty.
        ended: Owner of its last run, if an outage of the database kept the end of that run from
            being recorded, so that it is not counted as a death; or empty.
    """

    count: int = 0
    since: float | None = None
    contended: int = 0
    setbacks: int = 0
    outbox: int = 0
    losses: int = 0
    parked: str = ""
    reserved: str = ""
    scope: str = ""
    ended: str = ""

    @classmethod
    def of(cls, request: Context) -> RequeueHeader:
        """The header of the request's message; one that we have not written counts as none.

        Whoever may publish to the broker can write any header. A malformed one is logged, and the
        task runs as though its message had none.
        """
        try:
            found = headers_of(request).get(HEADER)
            return _NEW if found is None else cls._read(found)
        except _Malformed as error:
            malformed(request, HEADER, str(error))
            return _NEW

    @classmethod
    def _read(cls, found: Any) -> RequeueHeader:
        if not isinstance(found, Mapping):
            raise _Malformed(f"it is {described(found)}, not a mapping")
        told: dict[str, Any] = {}
        for name, new in _DEFAULTS.items():
            value = found.get(name, new)
            if not _is_valid(name, value):
                raise _Malformed(f"{name} is {described(value)}")
            told[name] = value
        return cls(**told)

    @property
    def tries(self) -> int:
        """How often the message has come in vain; the back-off grows with it."""
        return max(self.count, self.setbacks)

    @property
    def parked_as(self) -> tuple[str, str]:
        """Owner and name of the parked lease; both empty if there is none."""
        owner, _, name = self.parked.partition(":")
        return owner, name

    def without_contention(self) -> RequeueHeader:
        """The header once the task runs, for its retries: without the counts of contention."""
        if not self.count and self.since is None and not self.outbox:
            return self
        return replace(self, count=0, since=None, contended=0, outbox=0)

    def after_setback(self, *, losses: int = 0) -> RequeueHeader:
        """The header after a run without an outcome."""
        return replace(self, setbacks=self.setbacks + 1, losses=self.losses + losses)

    def write(self, request: Context) -> None:
        """Set the header on the request, so that a retry which the task publishes carries it."""
        headers = dict(headers_of(request))
        headers.pop(HEADER, None)
        if self != _NEW:
            headers[HEADER] = asdict(self)
        request.headers = headers


_NEW = RequeueHeader()
_DEFAULTS = asdict(_NEW)

MOST = 2**31
"""Counts grow by one with each delivery; more than this were never written by us."""
LATEST = 1e12
"""Seconds on any clock; a time beyond it was never written by us."""
LONGEST = 1024
"""Characters of an owner and a name of a lock."""


class _Malformed(Exception):
    """A header is not one that this package has written; the text says what is wrong."""


def malformed(request: Context, header: str, why: str) -> None:
    """Log that a header of the request's message is ignored.

    Whoever may publish can choose name and id of the task, too, so they are shown in brief.
    """
    logger.warning(
        "Task %s[%s]: the header %r of its message is malformed and ignored: %s",
        _short(getattr(request, "task", None)),
        _short(request.id),
        header,
        why,
        task_id=_short(request.id),
    )


def drop_malformed(request: Context) -> None:
    """Remove what stands in the place of the headers, or of the time limits, and is neither.

    Celery and this package read them many times until the delivery is over.
    """
    facts = vars(request)
    headers, limits = facts.get("headers"), facts.get("timelimit")
    if headers is not None and not isinstance(headers, dict):
        malformed(request, "headers", f"it is {described(headers)}, not a mapping")
        request.headers = None
    if limits is not None and not _are_limits(limits):
        malformed(request, "timelimit", f"it is {described(limits)}, not two times in seconds")
        request.timelimit = None


def _are_limits(limits: Any) -> bool:
    return (
        isinstance(limits, list | tuple)
        and len(limits) == 2
        and all(limit is None or (_is_number(limit) and 0 <= limit < LATEST) for limit in limits)
    )


def headers_of(request: Context) -> Mapping[str, Any]:
    """The headers of the request's message; empty if they are not a mapping."""
    headers: Any = request.headers
    return headers if isinstance(headers, Mapping) else {}


OF_THE_BROKER = (
    *("x-acquired-count", "x-death", "x-delivery-count"),
    *("x-first-death-", "x-last-death-"),
)
"""What the names of headers begin with in which RabbitMQ counts the deliveries of one message."""


def carried(request: Context) -> dict[str, Any]:
    """The headers that another message in the name of this one has, too.

    These are what its publisher and their libraries have set, such as the name of a schema; and of
    ours, only the scope of the tenant.

    Raises:
        Exception: What the function of ``DLOCK_SCOPE`` raises.
    """
    kept = {
        name: value
        for name, value in without_ours(request.headers).items()
        if not str(name).startswith(OF_THE_BROKER)
    }
    if scope := tenancy.current():
        kept[HEADER] = {"scope": scope}
    return kept


def without_ours(headers: object) -> dict[str, Any]:
    """The headers of a message but for ours; empty if they are not a mapping."""
    found = headers if isinstance(headers, Mapping) else {}
    return {name: value for name, value in found.items() if name != HEADER}


def scope_of(headers: object) -> str:
    """The tenant's scope among the headers of a message; empty if there is none that is valid."""
    header = headers.get(HEADER) if isinstance(headers, Mapping) else None
    scope = header.get("scope") if isinstance(header, Mapping) else None
    return scope if isinstance(scope, str) and tenancy.is_valid(scope) else ""


def _is_valid(name: str, value: object) -> bool:
    default = _DEFAULTS[name]
    if name == "scope":
        return tenancy.is_valid(value)
    if name == "since":
        return value is None or (_is_number(value) and abs(value) < LATEST)
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST
    return isinstance(value, str) and len(value) <= LONGEST and not REFUSED.search(value)


def _is_number(value: object) -> TypeGuard[int | float]:
    # Not a number is not below any limit.
    return isinstance(value, int | float) and not isinstance(value, bool)


def described(value: object) -> str:
    """What was given, briefly; a forged value may be huge, or too deep for ``repr``."""
    if isinstance(value, str):
        return f"{value[:40]!r}" if len(value) <= 40 else f"{value[:40]!r}… ({len(value)})"
    if isinstance(value, float) or value is None:
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**20 else "a huge number"
    return f"a {type(value).__name__}"


def _short(value: object) -> str:
    return value[:255] if isinstance(value, str) else described(value)
