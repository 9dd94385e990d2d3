"""One request to an idempotent view, from its key to its answer."""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, TypeAlias

from asgiref.sync import sync_to_async
from django.core.exceptions import ObjectDoesNotExist
from django.db import Error, router
from django.http import HttpRequest, HttpResponseBase
from django.utils.translation import gettext

from .. import tenancy
from ..databases import errors as database_errors
from ..decorators import LockKeywords
from ..exceptions import BackendUnavailable, LeaseLost, PayloadMismatch
from ..keys import Key, MissingValue
from ..keys.views import lock_name_of, record_key
from ..lock import Lock
from ..log import logger
from ..models import IdempotencyRecord
from ..records import idempotency, retention
from ..records.idempotency import Claim, ClaimRequest, Finished
from ..text.request_path import path_of
from . import flash, refusals, sessions, stored
from .idempotency_key import KeySource, MalformedKey
from .payload import Fingerprint
from .recording import Recording, in_progress
from .signature import name_of
from .transactions import call_when_closed, release_when_closed

Response: TypeAlias = HttpResponseBase

LONGEST_PAGE = 30.0
"""Seconds for which the lock is held at most until Django has rendered a page."""


class Rules(NamedTuple):
    """The validated arguments of ``idempotent_view``."""

    required: bool
    key_source: KeySource
    payload: Fingerprint
    is_done: Callable[[Response], Any]
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
        try:
            key = self.key_source.find(request, args, kwargs)
        except MalformedKey:
            return refusals.without_key(request, self.key_source.needs())
        except (MissingValue, Error) as error:
            refuses = self.if_unavailable == 503
            return refusals.key_failed(error, view, request, kwargs, refuses=refuses)
        if key is None:
            if not self.required:
                return None
            return refusals.without_key(request, self.key_source.needs())
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
        except Error as error:
            refuses = self.if_unavailable == 503 and database_errors.is_away_or_busy(error)
            return refusals.without_database(request, error, refuses=refuses)
        # Before the lock is taken: a slow client must not hold it while it sends its body.
        try:
            payload = self.payload(request, args, kwargs)
        except Error as error:
            refuses = self.if_unavailable == 503 and database_errors.is_away_or_busy(error)
            return refusals.without_database(request, error, refuses=refuses)
        return _Run(self, request, record_key(client, key), payload)


def _of_nobody(view: Callable[..., Any], request: HttpRequest, error: Exception) -> Response:
    """The answer to a request of which it is not known whose it is."""
    # A ``KeyError`` shows the key that was looked up, which may be a credential.
    why = type(error).__name__ if isinstance(error, LookupError) else repr(error)
    logger.info("@idempotent_view on %s: no client: %s", name_of(view), why)
    return refusals.without_client(request)


class _Run:
    """What becomes of one request with a key.

    Attributes:
        recording: Writes down how it ends.
    """

    @property
    def lock(self) -> Lock:
        return self._lock

    def __init__(self, rules: Rules, request: HttpRequest, key: str, payload: str) -> None:
        self._rules, self._request, self._key, self._payload = rules, request, key, payload
        self._claim: Claim | None = None
        metadata = {"path": path_of(request), **(rules.options.get("metadata") or {})}
        options: LockKeywords = {**rules.options, "metadata": metadata, "bound": False}
        self._scope = tenancy.full(rules.scope)
        self._lock = Lock(lock_name_of(self._scope, key), **options)
        self.recording = Recording(
            request, self._lock, is_done=rules.is_done, store_cookies=rules.store_cookies
        )

    @contextmanager
    def lock_or_refusal(self) -> Iterator[Response | None]:
        """Hold the lock in this context; yields a response if it cannot be acquired."""
        try:
            refusal = None if self._lock.acquire() else in_progress(self._request, self._lock)
        except BackendUnavailable as error:
            refusal = self._unavailable(error)
        if refusal is not None:
            yield refusal
            return
        try:
            yield None
        finally:
            if self.recording.page is None:
                self._release()
            else:
                self._release_after_page()
                self._lock._end_within(LONGEST_PAGE)

    @asynccontextmanager
    async def alock_or_refusal(self) -> AsyncIterator[Response | None]:
        """As ``lock_or_refusal``; who waits for the lock needs no thread."""
        try:
            acquired = await self._lock.aacquire()
            refusal = (
                None if acquired else await sync_to_async(in_progress)(self._request, self._lock)
            )
        except BackendUnavailable as error:
            refusal = await sync_to_async(self._unavailable)(error)
        if refusal is not None:
            yield refusal
            return
        try:
            yield None
        finally:
            if self.recording.page is None:
                try:
                    if not self.recording.keeps_lock:
                        await self._lock.arelease()
                except (BackendUnavailable, LeaseLost) as error:
                    self._released_late(error)
            else:
                self._release_after_page()
                await self._lock._aend_within(LONGEST_PAGE)

    def _release(self) -> None:
        try:
            self._lock.release()
        except (BackendUnavailable, LeaseLost) as error:
            self._released_late(error)
        release_when_closed(self._request, self._lock)

    def _release_after_page(self) -> None:
        """Hold the lock until the page is stored, so that who waits for it gets the page.

        The caller limits the time: under ASGI, Django neither renders the page of a synchronous
        view whose client has gone, nor closes its request.
        """
        held = ExitStack()
        held.callback(self._release)
        self.recording.page.add_post_render_callback(lambda page: held.close())
        # If it cannot be rendered.
        call_when_closed(self._request, held.close)

    def _unavailable(self, error: BackendUnavailable) -> Response:
        if self._rules.if_unavailable == "raise":
            raise error
        logger.warning("%s: %s", path_of(self._request), error, about=self._lock)
        return refusals.unavailable(self._request)

    def _released_late(self, error: Exception) -> None:
        # The record has decided whether the run counts.
        logger.warning("After the request: %s", error, about=self._lock)

    def claim(self) -> Claim | Finished | Response:
        """The claim of the key; what has finished it; or the response if it cannot be claimed."""
        lock, rules = self._lock, self._rules
        request = ClaimRequest(
            scope=self._scope,
            key=self._key,
            payload=self._payload,
            ttl=rules.ttl,
            lock_alias=lock.alias,
            lock_name=lock.name,
            owner=lock.owner or "",
            token=lock.token,
            stays_exhausted=True,
        )
        try:
            claim = idempotency.claim(request, holds=retention.holds, using=rules.using)
        except PayloadMismatch:
            return refusals.other_request(self._request)
        except BackendUnavailable as error:
            # Asked whether the run that the record names still holds its lock.
            return self._unavailable(error)
        except Error as error:
            refuses = rules.if_unavailable == 503 and database_errors.ours_may_succeed(error)
            using = rules.using or router.db_for_write(IdempotencyRecord)
            told = database_errors.explained(error, using)
            return refusals.without_database(self._request, told, refuses=refuses)
        if isinstance(claim, Finished):
            return claim
        if not isinstance(claim, Claim):
            return in_progress(self._request, self._lock)
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
            answer = stored.decode(finished.result, cookies=self._rules.store_cookies)
        except stored.NotKept as error:
            # The work is done, so the view must not run again; an exception would never end.
            if isinstance(error, stored.Damaged):
                logger.error(
                    "%s: the stored answer is damaged or was erased (%s), so it cannot be repeated",
                    path_of(self._request),
                    error,
                    about=self._lock,
                )
            return refusals.answer_is_gone(self._request)
        sessions.read_again(self._request)
        flash.add_again(self._request, stored.messages_of(finished.result))
        return answer

    def withdraw(self) -> None:
        """Let the key be tried again: nobody waits for the claim any more."""
        if self._claim is not None:
            self.recording.mark_failed(self._claim, "cancelled before the view began")
