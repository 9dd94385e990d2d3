"""How a request to an idempotent view ends, as its record says: its answer, or that it failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from django.db import Error, connections
from django.http import HttpRequest, HttpResponseBase

from ..exceptions import BackendUnavailable, StaleToken
from ..handler import locks
from ..lock import Lock
from ..log import logger
from ..models import IdempotencyRecord
from ..records import idempotency, retention
from ..records.idempotency import Claim
from ..text.request_path import path_of
from . import flash, refusals, stored
from .disconnects import keep_until_exit
from .requests import explain_upload
from .responses import is_unrendered

Response: TypeAlias = HttpResponseBase


class Recording:
    """What is written about the run of one request.

    Args:
        is_done: The test of ``done_if``.

    Attributes:
        page: The answer that Django renders later; it is stored when that has happened.
        keeps_lock: Whether the lock is held until this process ends.
    """

    def __init__(
        self,
        request: HttpRequest,
        lock: Lock,
        *,
        is_done: Callable[[Response], Any],
        store_cookies: bool,
    ) -> None:
        self.page: Any = None
        self.keeps_lock = False
        self._request, self._lock = request, lock
        self._is_done, self._store_cookies = is_done, store_cookies
        self._stored: Response | None = None
        self._is_open = False

    def store(self, claim: Claim, response: Response) -> bool:
        """Record the answer; ``False`` if it is not stored, and the key may be tried again.

        Raises:
            StaleToken: Another request has the key by now.
        """
        if not stored.is_final(response):
            return False
        if not self._is_done(response):
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
            self.page = response
            self.page.add_post_render_callback(partial(self._store_page, claim))
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
        messages, cookies = flash.added(self._request), self._store_cookies
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
            self.mark_failed(claim, f"HTTP {response.status_code}")

    def record(self, claim: Claim, make_response: Callable[[], Response]) -> Response:
        """Record the answer of a view whose effects are committed already; returns what to send.

        Raises:
            Exception: The answer could not be made; a repeated request does not run the view.
        """
        try:
            return self._recorded(claim, make_response)
        except StaleToken as error:
            return self.failed(claim, error)

    def _recorded(self, claim: Claim, make_response: Callable[[], Response]) -> Response:
        response = None
        try:
            response = make_response()
            self.store(claim, response)
            self.finished(claim, response)
        except StaleToken:
            raise
        except Exception as error:
            # Once more, because a repeated request would run the view again.
            self._complete_without_answer(claim, error)
            if response is None or not isinstance(error, Error):
                raise
        return response

    def _complete_without_answer(self, claim: Claim, error: Exception) -> None:
        logger.warning(
            "%s: the answer was not stored: %s", path_of(self._request), error, about=self._lock
        )
        try:
            connections[claim.using].close_if_unusable_or_obsolete()
            if not idempotency.has_succeeded(claim):
                idempotency.complete(claim, stored.encode_without_answer())
        except Error as trouble:
            self.keep_lock()
            logger.error(
                "%s: the view is done, but its record could not be written (%s). This process "
                "holds its lock until it ends; after that, a repeated request would run again",
                path_of(self._request),
                trouble,
                about=self._lock,
            )

    def keep_lock(self) -> None:
        """Do not release the lock when its context ends, but with this process."""
        self.keeps_lock = True
        keep_until_exit(self._lock)

    def failed(self, claim: Claim, error: BaseException) -> Response:
        """The response after an error, if there is one.

        Raises:
            BaseException: ``error``.
        """
        if isinstance(error, StaleToken):
            return in_progress(self._request, self._lock)
        if self._stored is not None and isinstance(error, Error):
            # The COMMIT was not answered, but it may have happened.
            try:
                if idempotency.has_succeeded(claim):
                    return self._stored
            except Error:
                raise error from None
        explain_upload(error)
        self.mark_failed(claim, stored.describe(error))
        raise error

    def _forget(self, claim: Claim) -> None:
        """Free the key: nothing was done, and the next request may be another one."""
        try:
            retention.delete(claim.record().filter(state=IdempotencyRecord.State.RUNNING))
        except Error as trouble:
            self._not_recorded(trouble)

    def mark_failed(self, claim: Claim, error: str) -> None:
        try:
            idempotency.mark_failed(claim, error)
        except Error as trouble:
            self._not_recorded(trouble)

    def _not_recorded(self, trouble: Error) -> None:
        # Its run counts as one that died in the middle, so the key can be tried again.
        logger.warning("%s: not recorded: %s", path_of(self._request), trouble, about=self._lock)


def in_progress(request: HttpRequest, lock: Lock) -> Response:
    """The refusal while another request has the key."""
    try:
        info = locks[lock.alias].get(lock.name)
    except BackendUnavailable:
        info = None
    return refusals.in_progress(request, info)
