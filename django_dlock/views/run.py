"""One request to an idempotent view, from its key to its answer."""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, TypeAlias

from asgiref.sync import sync_to_async
from django.core.exceptions import ObjectDoesNotExist
from django.db import Error, connections, router
from django.http import HttpRequest, HttpResponseBase
from django.utils.translation import gettext

from .. import database_errors, idempotency, retention, tenancy
from ..decorators import LockKeywords
from ..exceptions import BackendUnavailable, LeaseLost, PayloadMismatch, StaleToken
from ..handler import locks
from ..idempotency import Claim, ClaimRequest, Finished
from ..keys import Key, MissingValue
from ..lock import Lock
from ..log import logger
from ..models import IdempotencyRecord
from ..request_path import path_of
from ..view_keys import lock_name_of, record_key
from . import flash, refusals, sessions, stored
from .disconnects import keep_until_exit
from .idempotency_key import KeySource, MalformedKey
from .payload import Fingerprint
from .requests import explain_upload
from .responses import is_unrendered
from .signature import name_of
from .transactions import call_when_closed, release_when_closed

__all__ = ["Rules"]

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
    return refusals.problem(
        request, HTTPStatus.UNAUTHORIZED, gettext("Authentication is required.")
    )


class _Run:
    """What becomes of one request with a key."""

    @property
    def lock(self) -> Lock:
        return self._lock

    def __init__(self, rules: Rules, request: HttpRequest, key: str, payload: str) -> None:
        self._rules, self._request, self._key, self._payload = rules, request, key, payload
        self._claim: Claim | None = None
        self._stored: Response | None = None
        self._is_open = self._is_kept = False
        self._page: Any = None
        metadata = {"path": path_of(request), **(rules.options.get("metadata") or {})}
        options: LockKeywords = {**rules.options, "metadata": metadata, "bound": False}
        self._scope = tenancy.full(rules.scope)
        self._lock = Lock(lock_name_of(self._scope, key), **options)

    @contextmanager
    def lock_or_refusal(self) -> Iterator[Response | None]:
        """Hold the lock in this context; yields a response if it cannot be acquired."""
        try:
            refusal = None if self._lock.acquire() else self._in_progress()
        except BackendUnavailable as error:
            refusal = self._unavailable(error)
        if refusal is not None:
            yield refusal
            return
        try:
            yield None
        finally:
            if self._page is None:
                self._release()
            else:
                self._release_after_page()
                self._lock._end_within(LONGEST_PAGE)

    @asynccontextmanager
    async def alock_or_refusal(self) -> AsyncIterator[Response | None]:
        """As ``lock_or_refusal``; who waits for the lock needs no thread."""
        try:
            acquired = await self._lock.aacquire()
            refusal = None if acquired else await sync_to_async(self._in_progress)()
        except BackendUnavailable as error:
            refusal = await sync_to_async(self._unavailable)(error)
        if refusal is not None:
            yield refusal
            return
        try:
            yield None
        finally:
            if self._page is None:
                try:
                    if not self._is_kept:
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
        self._page.add_post_render_callback(lambda page: held.close())
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
            self._mark_failed(self._claim, "cancelled before the view began")

    def store(self, claim: Claim, response: Response) -> bool:
        """Record the answer; ``False`` if it is not stored, and the key may be tried again.

        Raises:
            StaleToken: Another request has the key by now.
        """
        if not stored.is_final(response):
            return False
        if not self._rules.is_done(response):
            self._is_open = True
            logger.info(
                "%s: by done_if, HTTP %s means that nothing was done: rolled back",
                path_of(self._request),
                response.status_code,
                about=self._lock,
            )
            return False
        if is_unrendered(response):
            # A middleware may change the page before Django renders it.
            idempotency.complete(claim, stored.NOT_RENDERED)
            self._page = response
            self._page.add_post_render_callback(partial(self._store_page, claim))
        else:
            idempotency.complete(claim, self._encoded(response))
        self._stored = response
        return True

    def _store_page(self, claim: Claim, page: Response) -> None:
        """Store the page as it is sent; the work is done, so no error may replace it."""
        try:
            idempotency.replace_result(claim, stored.NOT_RENDERED, self._encoded(page))
        except Error as error:
            logger.error(
                "%s: the answer is not stored, so it cannot be repeated: %s",
                path_of(self._request),
                error,
                about=self._lock,
            )

    def _encoded(self, response: Response) -> str:
        messages, cookies = flash.added(self._request), self._rules.store_cookies
        try:
            return stored.encode(response, cookies=cookies, messages=messages)
        except stored.NotKept as why:
            logger.warning(
                "%s: the answer cannot be repeated: %s",
                path_of(self._request),
                why,
                about=self._lock,
            )
            return stored.encode_without_answer()

    def finished(self, claim: Claim, response: Response) -> None:
        """The answer is stored, or its transaction was rolled back."""
        if self._is_open:
            self._forget(claim)
        elif self._stored is None:
            self._mark_failed(claim, f"HTTP {response.status_code}")

    def record(self, claim: Claim, response: Response) -> Response:
        """Record the answer of a view whose effects are committed already; returns what to send."""
        try:
            try:
                self.store(claim, response)
            except Error as error:
                # Once more, because a repeated request would run the view again.
                self._complete_without_answer(claim, error)
            else:
                self.finished(claim, response)
        except Error as error:
            self.keep_lock()
            logger.error(
                "%s: the view is done, but its record could not be written (%s). This process "
                "holds its lock until it ends; after that, a repeated request would run again",
                path_of(self._request),
                error,
                about=self._lock,
            )
        except Exception as error:  # noqa: BLE001 - recorded, and raised again
            return self.failed(claim, error)
        return response

    def _complete_without_answer(self, claim: Claim, error: Error) -> None:
        logger.warning(
            "%s: the answer was not stored: %s", path_of(self._request), error, about=self._lock
        )
        connections[claim.using].close_if_unusable_or_obsolete()
        if not idempotency.has_succeeded(claim):
            idempotency.complete(claim, stored.encode_without_answer())

    def keep_lock(self) -> None:
        """Do not release the lock when its context ends, but with this process."""
        self._is_kept = True
        keep_until_exit(self._lock)

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
        explain_upload(error)
        self._mark_failed(claim, stored.describe(error))
        raise error

    def _forget(self, claim: Claim) -> None:
        """Free the key: nothing was done, and the next request may be another one."""
        try:
            retention.delete(claim.record().filter(state=IdempotencyRecord.State.RUNNING))
        except Error as trouble:
            self._not_recorded(trouble)

    def _mark_failed(self, claim: Claim, error: str) -> None:
        try:
            idempotency.mark_failed(claim, error)
        except Error as trouble:
            self._not_recorded(trouble)

    def _not_recorded(self, trouble: Error) -> None:
        # Its run counts as one that died in the middle, so the key can be tried again.
        logger.warning("%s: not recorded: %s", path_of(self._request), trouble, about=self._lock)

    def _in_progress(self) -> Response:
        try:
            info = locks[self._lock.alias].get(self._lock.name)
        except BackendUnavailable:
            info = None
        return refusals.in_progress(self._request, info)
