"""The lock of a request, and the answer if it cannot be acquired: by the rules of its view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.functional import LazyObject, empty

from ..core.options import Default
from ..decorators import LockKeywords
from ..exceptions import AlreadyHeld, BackendUnavailable, LockError, LockNotAcquired
from ..handler import locks
from ..keys import Key, MissingValue, template_of
from ..lock import Lock, of_template
from ..log import logger
from ..text.request_path import path_of

AFTER_TRANSACTION: Any = "transaction"
"""``hold_until`` of views; see ``LockOptions``."""

Response: TypeAlias = HttpResponseBase

IfUnavailable: TypeAlias = Literal["raise", "local", "pass", 503]


class ViewRules(NamedTuple):
    """The validated arguments of ``locked_view``: by what rules a request is locked."""

    view: Callable[..., Any]
    make_key: Key
    options: LockKeywords
    status: int
    is_guarded: Callable[[str | None], bool]
    if_unavailable: IfUnavailable
    stream_max_hold: float | Default

    def longest_stream(self, lock: Lock) -> float:
        """Seconds for which the lock is held at most while a response is sent."""
        limit = self.stream_max_hold
        if isinstance(limit, Default):
            return locks[lock.alias].options.stream_max_hold
        return limit

    def lock(
        self, request: HttpRequest, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Lock | partial[Response] | None:
        """A new lock for this request; ``None`` if it needs none; or what makes its refusal."""
        if not self.is_guarded(request.method):
            return None
        try:
            name = self.make_key((request, *args), kwargs)
        except (MissingValue, Error) as error:
            from . import refusals

            refuses = self.if_unavailable == 503
            return partial(refusals.key_failed, error, self.view, request, kwargs, refuses=refuses)
        metadata = {**_facts(request), **(self.options.get("metadata") or {})}
        options: LockKeywords = {**self.options, "metadata": metadata}
        return of_template(Lock(name, **options), template_of(self.make_key))

    def without_lock(
        self, request: HttpRequest, lock: Lock, error: LockError
    ) -> HttpResponse | None:
        """The response if the lock could not be acquired; ``None`` to run the view without it."""
        from . import refusals

        if isinstance(error, LockNotAcquired):
            return refusals.contended(request, self.status, error.info)
        if isinstance(error, AlreadyHeld):
            return refusals.contended(request, self.status, None)
        if not isinstance(error, BackendUnavailable) or self.if_unavailable in (
            "raise",
            "local",
        ):
            raise error
        logger.warning("%s %s: %s", request.method, path_of(request), error, about=lock)
        return None if self.if_unavailable == "pass" else refusals.unavailable(request)


def _facts(request: HttpRequest) -> dict[str, str]:
    """Path and user of the request, for operators; does not load a session or user for this."""
    facts = {"path": path_of(request)}
    user = getattr(request, "user", None)
    loaded = not (isinstance(user, LazyObject) and user._wrapped is empty)
    if user is not None and loaded and user.is_authenticated:
        facts["user"] = user.get_username()
    return facts
