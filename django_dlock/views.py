"""``locked_view``: a view that runs under a lock, or refuses."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.cache import patch_vary_headers
from django.utils.decorators import method_decorator
from django.utils.functional import LazyObject, empty
from django.utils.translation import gettext

from .decorators import CommonKeywords, LockKeywords, check_options, full_name
from .exceptions import BackendUnavailable, LeaseLost, LockNotAcquired
from .keys import Key, compile_key
from .lock import Lock
from .lock_options import Default, Seconds

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["locked_view"]

logger = logging.getLogger("django_dlock")

V = TypeVar("V", bound=Callable[..., Any])
Response: TypeAlias = HttpResponseBase

LONGEST_RETRY_AFTER = 60
"""Seconds. A long lease may be released at any moment; a client should not sleep it out."""

TEMPLATE = "django_dlock/contended.html"


def locked_view(
    key: str | Callable[..., str],
    *,
    wait: Seconds | Default | None = 0,
    status: Literal[409, 423] = 409,
    if_contended: Literal["reject", "wait"] = "reject",
    **options: Unpack[CommonKeywords],
) -> Callable[[V], V]:
    """Run a view under the lock that ``key`` names, one request at a time.

    For functions, sync or async, for ``V.as_view()``, for a class-based view itself and, by
    ``method_decorator``, for its methods. Goes outermost: with ``ATOMIC_REQUESTS`` the
    transaction opens inside the lock and ends before it is released, and is rolled back if the
    lease is lost before it ends. A streamed response holds the lock until it is closed. A
    ``TemplateResponse`` is rendered after the release, as it is after the transaction.

    A refusal has a ``Retry-After`` of 1 to 60 seconds, and a body of problem details (RFC 9457)
    for clients that prefer JSON, else the page ``django_dlock/contended.html``.

    Args:
        key: A template over ``request`` and the arguments of the URL
            (``"checkout:{request.user.pk}"``), or a callable that gets what the view gets.
        wait: Seconds that ``if_contended="wait"`` waits before it refuses as well; ``DEFAULT``
            is the alias's ``WAIT``, ``None`` waits for ever.
        status: Of a refusal: 409 (Conflict) or 423 (Locked).
        if_contended: ``"reject"`` at once, or ``"wait"``.
        options: The others of ``Lock``. ``metadata`` is added to the request's path and user.

    Raises:
        TypeError, ValueError: At decoration: an option or the key is wrong, or two contradict
            each other. At a request: a field of the key is ``None`` (an anonymous user has no
            primary key) or has no plain text.
        LeaseLost: At a request: the view ended normally, but no longer under the lock.
        BackendUnavailable: At a request: the lock's backend did not answer.
    """
    _check_contention(wait, status, if_contended)
    if not (isinstance(key, str) or callable(key)):
        raise TypeError(f"The key of @locked_view is {key!r}; it takes a template or a callable")
    keywords = cast("LockKeywords", {**options, "wait": wait})
    check_options(keywords)
    class_key = compile_key(key, _CLASS_BASED, what="The key of @locked_view")

    def decorate(view: V) -> V:
        if isinstance(view, type):
            return cast("V", method_decorator(decorate, name="dispatch")(view))
        signature = _signature(view)
        if signature is _CLASS_BASED:
            # ``method_decorator`` comes here with every request.
            make_key = class_key
        else:
            what = f"The key of @locked_view on {full_name(view)}"
            make_key = compile_key(key, signature, what=what)
        guard = _Guard(make_key, keywords, status)
        if not _is_async(view):
            return cast("V", _sync(view, guard))
        if keywords.get("hold_until") == "commit":
            raise ValueError(
                "@locked_view: hold_until='commit' follows the transaction of a thread; an "
                "asynchronous view has none"
            )
        return cast("V", _async(view, guard, key_may_load=_may_load(key)))

    return decorate


def _check_contention(wait: object, status: int, if_contended: str) -> None:
    if status not in (409, 423):
        raise ValueError(f"status is {status!r}; @locked_view refuses with 409 or 423")
    if if_contended not in ("reject", "wait"):
        raise ValueError(f"if_contended is {if_contended!r}; it takes 'reject' or 'wait'")
    waits = wait != 0
    if waits and if_contended == "reject":
        raise ValueError(f"wait is {wait!r}, but if_contended='reject' never waits; say 'wait'")
    if not waits and if_contended == "wait":
        raise ValueError(
            "if_contended='wait' needs a wait: seconds, or DEFAULT for the alias's WAIT"
        )


# -- the view ------------------------------------------------------------------------------


def _class_based(request: HttpRequest, *args: Any, **kwargs: Any) -> None:
    """What every class-based view takes."""


_CLASS_BASED = inspect.signature(_class_based)


def _signature(view: Callable[..., Any]) -> inspect.Signature:
    """Of a view, with its first parameter called ``request``."""
    # as_view() and ViewSet.as_view() leave their mark; method_decorator hands over a partial.
    # All of them seem to wrap a method, whose signature begins with self.
    if isinstance(view, functools.partial) or hasattr(view, "view_class") or hasattr(view, "cls"):
        return _CLASS_BASED
    parameters = list(inspect.signature(view).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        return _CLASS_BASED
    first, *others = parameters
    if any(other.name == "request" for other in others):
        raise TypeError(
            f"@locked_view on {full_name(view)}: a method takes "
            "@method_decorator(locked_view(...)) instead"
        )
    return inspect.Signature([first.replace(name="request"), *others])


def _is_async(view: Callable[..., Any]) -> bool:
    if iscoroutinefunction(view):
        return True
    # The dispatch of an asynchronous class-based view is a plain method that gives a coroutine.
    method = view.func if isinstance(view, functools.partial) else view
    return getattr(getattr(method, "__self__", None), "view_is_async", False) is True


def _sync(view: Callable[..., Response], guard: _Guard) -> Callable[..., Response]:
    marks = getattr(view, "_non_atomic_requests", None)
    # A locked view inside this one opens the transactions, inside both locks.
    inner = marks if isinstance(marks, _OwnTransactions) else None
    own = _OwnTransactions(marks or ()) if inner is None else inner

    @functools.wraps(view)
    def respond(request: HttpRequest, *args: Any, **kwargs: Any) -> Response:
        lock = guard.lock(request, args, kwargs)

        def run() -> Response:
            response = view(request, *args, **kwargs)
            if databases:
                # While what was written can still be taken back.
                lock.check()
            return response

        databases = own.databases() if inner is None else []
        with ExitStack() as held:
            try:
                held.enter_context(lock)
            except LockNotAcquired:
                return guard.refusal(request, lock)
            body = run
            for database in databases:
                body = transaction.atomic(using=database)(body)
            response = body()
            if _hold_until_closed(response, lock):
                held.pop_all()
            return response

    respond._non_atomic_requests = own  # type: ignore[attr-defined]
    return respond


_AT_HAND = frozenset(
    {"COOKIES", "GET", "META", "content_type", "headers", "method", "path", "path_info", "scheme"}
)


def _may_load(key: str | Callable[..., str]) -> bool:
    """Whether a key may ask for what synchronous code loads: a session, a user, a tenant."""
    if callable(key):
        return True
    return not _AT_HAND.issuperset(re.findall(r"\{request\b\.?(\w*)", key))


def _async(view: Callable[..., Any], guard: _Guard, *, key_may_load: bool) -> Callable[..., Any]:
    own = _OwnTransactions(getattr(view, "_non_atomic_requests", ()))

    @functools.wraps(view)
    async def respond(request: HttpRequest, *args: Any, **kwargs: Any) -> Response:
        if own.databases():
            # Django says so itself, but for methods, whose mark it takes from a dummy of ours.
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
        if key_may_load:
            lock = await sync_to_async(guard.lock)(request, args, kwargs)
        else:
            lock = guard.lock(request, args, kwargs)
        async with AsyncExitStack() as held:
            try:
                await held.enter_async_context(lock)
            except LockNotAcquired:
                if _prefers_json(request):
                    return guard.refusal(request, lock)
                # What a template and its context processors ask for is synchronous, too.
                return await sync_to_async(guard.refusal)(request, lock)
            response = view(request, *args, **kwargs)
            if inspect.isawaitable(response):
                response = await response
            if _hold_until_closed(response, lock):
                held.pop_all()
            return cast("Response", response)

    return respond


class _OwnTransactions(set[str]):
    """The databases that ``non_atomic_requests`` marked, on a view that opens the others' itself.

    Django opens a transaction for a database that is not ``in`` the marks of the view. Its
    transaction would begin outside the lock and end after the release.
    """

    def __contains__(self, database: object) -> bool:
        return True

    def databases(self) -> list[str]:
        """Those that ``ATOMIC_REQUESTS`` asks for, less the marked ones."""
        marked = set(self)
        return [
            database
            for database, settings in connections.settings.items()
            if settings["ATOMIC_REQUESTS"] and database not in marked
        ]


def _hold_until_closed(response: object, lock: Lock) -> bool:
    """Let a streamed response keep the lock; false for others.

    The server closes a response when it is sent, or when the client has gone.
    """
    if not getattr(response, "streaming", False):
        return False
    # Another thread or task may send it.
    lock.hand_over()
    closers: list[Callable[[], object]] = response._resource_closers  # type: ignore[attr-defined]
    closers.append(functools.partial(_release_closed, lock))
    return True


def _release_closed(lock: Lock) -> None:
    try:
        lock.release()
    except (BackendUnavailable, LeaseLost) as error:
        # The answer is sent: nobody is left to be told but the log.
        logger.warning("After a streamed response: %s", error)


# -- the lock and the refusal --------------------------------------------------------------


class _Guard(NamedTuple):
    make_key: Key
    options: LockKeywords
    status: int

    def lock(self, request: HttpRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Lock:
        """A fresh handle for this request."""
        name = self.make_key((request, *args), kwargs)
        metadata = {**_facts(request), **(self.options.get("metadata") or {})}
        options: LockKeywords = {**self.options, "metadata": metadata}
        return Lock(name, **options)

    def refusal(self, request: HttpRequest, lock: Lock) -> HttpResponse:
        """Held by another, in the form that the client prefers."""
        remaining = 0.0 if lock.contention is None else lock.contention.remaining
        retry_after = min(max(math.ceil(remaining), 1), LONGEST_RETRY_AFTER)
        problem = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": gettext("Another request for the same thing is at work. Try again later."),
            "instance": request.path,
            "retry_after": retry_after,
        }
        if _prefers_json(request):
            response: HttpResponse = JsonResponse(
                problem, status=self.status, content_type="application/problem+json"
            )
        else:
            response = _page(request, problem)
        response["Retry-After"] = str(retry_after)
        patch_vary_headers(response, ["Accept"])
        return response


def _facts(request: HttpRequest) -> dict[str, str]:
    """Whose request it is, for operators; loads no session and no user for that."""
    facts = {"path": request.path}
    user = getattr(request, "user", None)
    loaded = not (isinstance(user, LazyObject) and user._wrapped is empty)
    if user is not None and loaded and user.is_authenticated:
        facts["user"] = user.get_username()
    return facts


def _prefers_json(request: HttpRequest) -> bool:
    json, html = ["application/problem+json", "application/json"], ["text/html"]
    # The first wins where the client likes both as much: who sends JSON can read it.
    sends_json = (request.content_type or "").partition(";")[0].endswith("json")
    return request.get_preferred_type(json + html if sends_json else html + json) in json


def _page(request: HttpRequest, problem: Mapping[str, Any]) -> HttpResponse:
    from django.template import TemplateDoesNotExist
    from django.template.loader import render_to_string

    try:
        body: str = render_to_string(TEMPLATE, {"problem": problem}, request)
        content_type = "text/html"
    except TemplateDoesNotExist:
        # A project of JSON alone may have no template engine.
        body, content_type = f"{problem['title']}: {problem['detail']}\n", "text/plain"
    return HttpResponse(
        body, status=problem["status"], content_type=f"{content_type}; charset=utf-8"
    )
