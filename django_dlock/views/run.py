"""One request to an idempotent view, from its key to its answer."""

from __future__ import annotations

import datetime as dt
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, TypeAlias

from django.core.exceptions import ObjectDoesNotExist
from django.db import Error
from django.http import HttpRequest, HttpResponseBase
from django.utils.translation import gettext

from .. import idempotency, retention
from ..decorators import LockKeywords
from ..exceptions import BackendUnavailable, LeaseLost, PayloadMismatch, StaleToken
from ..handler import locks
from ..idempotency import Claim, ClaimRequest, Finished
from ..keys import Key, MissingValue
from ..lock import Lock
from ..log import logger
from ..request_path import path_of
from ..view_keys import lock_name_of, record_key
from . import refusals, stored
from .signature import name_of
from .transactions import release_when_closed

__all__ = ["Rules"]

Response: TypeAlias = HttpResponseBase

HEADER = "Idempotency-Key"


class Rules(NamedTuple):
    """The validated arguments of ``idempotent_view``."""

    required: bool
    has_keys: Callable[[str | None], bool]
    client: Key
    client_is_callable: bool
    scope: str
    ttl: dt.timedelta
    using: str | None
    if_unavailable: Literal["raise", 503]
    replay_if: Callable[..., Any] | None
    store_cookies: bool
    finishes: bool
    options: LockKeywords

    def begin(
        self,
        view: Callable[..., Any],
        request: HttpRequest,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> _Run | Response | None:
        """A run of this request; ``None`` if it has no key; or a response that refuses it."""
        if not self.has_keys(request.method):
            return None
        header = request.headers.get(HEADER)
        if header is None and not self.required:
            return None
        key = _key(header or "")
        if key is None:
            detail = gettext(
                "This request needs an Idempotency-Key header of 1 to 200 visible characters."
            )
            return refusals.problem(request, HTTPStatus.BAD_REQUEST, detail)
        try:
            client = self.client((request, *args), kwargs)
        except MissingValue as missing:
            of_user = missing.of_user and not self.client_is_callable
            if missing.of_call or (of_user and refusals.is_anonymous(request)):
                return refusals.login_or_error(missing, view, request, kwargs)
            return _of_nobody(view, request, missing)
        except (AttributeError, LookupError, ObjectDoesNotExist) as error:
            # What a callable raises if a header, or the row with its value, does not exist.
            return _of_nobody(view, request, error)
        # Before the lock is taken: a slow client must not hold it while it sends its body.
        payload = stored.fingerprint(request)
        return _Run(self, request, record_key(client, key), payload)


def _of_nobody(view: Callable[..., Any], request: HttpRequest, error: Exception) -> Response:
    """The answer to a request of which it is not known whose it is."""
    # A ``KeyError`` shows the key that was looked up, which may be a credential.
    why = type(error).__name__ if isinstance(error, LookupError) else repr(error)
    logger.info("@idempotent_view on %s: no client: %s", name_of(view), why)
    return refusals.problem(
        request, HTTPStatus.UNAUTHORIZED, gettext("Authentication is required.")
    )


def _key(header: str) -> str | None:
    """The key in the header, with or without the quotes of the draft; ``None`` if malformed."""
    found = re.fullmatch(r'"([!#-\[\]-~]{1,200})"|([!#-~]{1,200})', header)
    return found and (found[1] or found[2])


class _Run:
    """What becomes of one request with a key."""

    @property
    def lock(self) -> Lock:
        return self._lock

    def __init__(self, rules: Rules, request: HttpRequest, key: str, payload: str) -> None:
        self._rules, self._request, self._key, self._payload = rules, request, key, payload
        self._claim: Claim | None = None
        self._stored: Response | None = None
        metadata = {"path": path_of(request), **(rules.options.get("metadata") or {})}
        options: LockKeywords = {**rules.options, "metadata": metadata, "bound": False}
        self._lock = Lock(lock_name_of(rules.scope, key), **options)

    @contextmanager
    def lock_or_refusal(self) -> Iterator[Response | None]:
        """Hold the lock in this context; yields a response if it cannot be acquired."""
        try:
            if not self._lock.acquire():
                yield self._in_progress()
                return
        except BackendUnavailable as error:
            if self._rules.if_unavailable == "raise":
                raise
            logger.warning("%s: %s", path_of(self._request), error, about=self._lock)
            yield refusals.unavailable(self._request)
            return
        try:
            yield None
        finally:
            try:
                self._lock.release()
            except (BackendUnavailable, LeaseLost) as error:
                # The record has decided whether the run counts.
                logger.warning("After the request: %s", error, about=self._lock)
            release_when_closed(self._request, self._lock)

    def claim(self) -> Claim | Finished | Response:
        """The claim of the key; what has finished it; or the response if it cannot be claimed."""
        lock, rules = self._lock, self._rules
        request = ClaimRequest(
            scope=rules.scope,
            key=self._key,
            payload=self._payload,
            ttl=rules.ttl,
            lock_alias=lock.alias,
            lock_name=lock.name,
            owner=lock.owner or "",
            token=lock.token,
        )
        try:
            claim = idempotency.claim(request, holds=retention.holds, using=rules.using)
        except PayloadMismatch:
            detail = gettext("This Idempotency-Key was used for another request.")
            return refusals.problem(self._request, HTTPStatus.UNPROCESSABLE_ENTITY, detail)
        if isinstance(claim, Finished):
            return claim
        if not isinstance(claim, Claim):
            return self._in_progress()
        self._claim = claim
        return claim

    def replay(self, finished: Finished, allowed: Any) -> Response:
        """The stored answer, or the refusal to repeat it.

        Args:
            allowed: What ``replay_if`` has returned.
        """
        if inspect.isawaitable(allowed):
            # It would be true, whatever it returns.
            if inspect.iscoroutine(allowed):
                allowed.close()
            raise TypeError(
                "replay_if of @idempotent_view returned a coroutine, but the view is not "
                f"asynchronous: {self._rules.replay_if!r}"
            )
        if isinstance(allowed, HttpResponseBase):
            return allowed
        if not allowed:
            detail = gettext("You may not see the answer to this request any more.")
            return refusals.problem(self._request, HTTPStatus.FORBIDDEN, detail)
        try:
            return stored.decode(finished.result, cookies=self._rules.store_cookies)
        except stored.Damaged as error:
            # The work is done, so the view must not run again; an exception would never end.
            logger.error(
                "%s: the stored answer is damaged or was erased (%s), so it cannot be repeated",
                path_of(self._request),
                error,
                about=self._lock,
            )
            detail = gettext("This request was carried out, but its answer is not available.")
            return refusals.problem(self._request, HTTPStatus.CONFLICT, detail)

    def withdraw(self) -> None:
        """Let the key be tried again: nobody waits for the claim any more."""
        if self._claim is not None:
            self._mark_failed(self._claim, "cancelled before the view began")

    def store(self, claim: Claim, response: Response) -> bool:
        """Record the answer; ``False`` if answers of this kind are not stored.

        Raises:
            StaleToken: Another request has the key by now.
        """
        if not stored.is_final(response):
            return False
        idempotency.complete(claim, stored.encode(response, cookies=self._rules.store_cookies))
        self._stored = response
        return True

    def finished(self, claim: Claim, response: Response) -> None:
        """The answer is stored, or its transaction was rolled back."""
        if self._stored is None:
            self._mark_failed(claim, f"HTTP {response.status_code}")

    def failed(self, claim: Claim, error: BaseException) -> Response:
        """The response after an error, if there is one.

        Raises:
            BaseException: ``error``.
        """
        if isinstance(error, StaleToken):
            return self._in_progress()
        if self._stored is not None and isinstance(error, Error):
            # The COMMIT was not answered, but it may have happened.
            try:
                if idempotency.has_succeeded(claim):
                    return self._stored
            except Error:
                raise error from None
        self._mark_failed(claim, stored.describe(error))
        raise error

    def _mark_failed(self, claim: Claim, error: str) -> None:
        try:
            idempotency.mark_failed(claim, error)
        except Error as trouble:
            # Its run counts as one that died in the middle, so the key can be tried again.
            logger.warning(
                "%s: not recorded: %s", path_of(self._request), trouble, about=self._lock
            )

    def _in_progress(self) -> Response:
        try:
            info = locks[self._lock.alias].get(self._lock.name)
        except BackendUnavailable:
            info = None
        return refusals.contended(self._request, HTTPStatus.CONFLICT, info)
