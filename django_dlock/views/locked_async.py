"""The asynchronous half of ``locked_view``; loaded with the first asynchronous view."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeAlias, cast

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from ..exceptions import LockError
from ..lock import Lock
from . import disconnects
from .locking import ViewRules
from .requests import read_body, sends_body
from .transactions import OwnTransactions

Response: TypeAlias = HttpResponseBase

_AT_HAND = frozenset(
    {"GET", "META", "content_type", "headers", "method", "path", "path_info", "scheme"}
)


def asynchronous(
    view: Callable[..., Any],
    rules: ViewRules,
    key: str | Sequence[str] | Callable[..., str],
    *,
    finishes: bool,
) -> Callable[..., Any]:
    """The view under its lock.

    Args:
        finishes: Whether it goes on when its client has gone.
    """
    key_may_load = _may_load(key)
    own = OwnTransactions(getattr(view, "_non_atomic_requests", ()))

    async def answer(request: HttpRequest, args: Any, kwargs: Any) -> Response:
        response = view(request, *args, **kwargs)
        return cast("Response", await response if inspect.isawaitable(response) else response)

    @functools.wraps(view)
    async def respond(request: HttpRequest, *args: Any, **kwargs: Any) -> Response:
        if own.databases():
            # Django's own check does not see this for methods with ``method_decorator``.
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
        if key_may_load:
            lock = await sync_to_async(rules.lock)(request, args, kwargs)
        else:
            lock = rules.lock(request, args, kwargs)
        if isinstance(lock, partial):
            # It may load the user, and render a page; see below.
            return await sync_to_async(lock)()
        if lock is None:
            return await answer(request, args, kwargs)
        if sends_body(request):
            await sync_to_async(read_body)(request)

        async def guarded(begin: disconnects.Begin) -> Response:
            async with AsyncExitStack() as held:
                try:
                    entered: Lock | None = await held.enter_async_context(lock)
                except LockError as error:
                    refusal = await _refusal(rules, request, lock, error)
                    if refusal is not None:
                        return refusal
                    entered = None
                begin()
                try:
                    response = await answer(request, args, kwargs)
                except asyncio.CancelledError:
                    if entered is not None and disconnects.is_cut_short():
                        disconnects.keep_until_exit(entered)
                        held.pop_all()
                    raise
                if entered is not None and getattr(response, "streaming", False):
                    from .streams import hold_until_closed

                    hold_until_closed(request, response, lock)
                    await lock._aend_within(rules.longest_stream(lock))
                    held.pop_all()
                return response

        return await (disconnects.finish(guarded, lock) if finishes else guarded(lambda: None))

    return respond


async def _refusal(
    rules: ViewRules, request: HttpRequest, lock: Lock, error: LockError
) -> HttpResponse | None:
    # Loaded here, because most requests are not refused.
    from . import refusals

    if refusals.prefers_json(request):
        return rules.without_lock(request, lock, error)
    # A template and its context processors may do synchronous I/O, too.
    return await sync_to_async(rules.without_lock)(request, lock, error)


def _may_load(key: str | Sequence[str] | Callable[..., str]) -> bool:
    """Whether computing the key may do synchronous I/O: load a session, a user or a tenant."""
    if callable(key):
        return True
    fields = key if isinstance(key, str) else f"{{{'{'.join(key)}"
    return not _AT_HAND.issuperset(re.findall(r"\{request\b\.?(\w*)", fields))
