"""``idempotent_view``: a view that runs once for each ``Idempotency-Key``; its answer is repeated.

The header is that of the IETF draft "The Idempotency-Key HTTP Header Field". Lock and record are
those of tasks: the lock keeps two requests with one key apart, the record decides what counts.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import method_decorator

from ..core.options import DEFAULT, Default, Seconds
from ..decorators import CommonKeywords, LockKeywords, check_options, full_name
from ..keys import compile_key
from ..records.idempotency import Finished
from . import disconnects
from .done import DoneIf, done_test
from .idempotency_key import WHAT, KeyOption, key_source
from .idempotent_options import (
    check_flags,
    check_lock_options,
    check_record_options,
    patience_of,
)
from .locking import AFTER_TRANSACTION
from .noted import note
from .payload import PayloadOption, compile_payload
from .requests import OnDisconnect, check_on_disconnect, method_test, of_list
from .responses import response_of
from .run import Rules
from .signature import CLASS_BASED, is_async, method_of, name_of, signature_of, used_ninja
from .transactions import OwnTransactions

if TYPE_CHECKING:
    from typing_extensions import Unpack

V = TypeVar("V", bound=Callable[..., Any])
Response: TypeAlias = HttpResponseBase

ReplayIf: TypeAlias = Callable[..., Any]

WEEK = dt.timedelta(days=7)


@overload
def idempotent_view(view: V, /) -> V: ...


@overload
def idempotent_view(
    *,
    key: KeyOption | None = ...,
    header: str | None = ...,
    required: bool | None = ...,
    payload: PayloadOption | None = ...,
    if_contended: Literal["reject", "wait"] = ...,
    wait: Seconds | Default | None = ...,
    done_if: DoneIf | None = ...,
    methods: Sequence[str] | Literal["unsafe"] = ...,
    client: str | Sequence[str] | Callable[..., str] = ...,
    idempotency_scope: str = ...,
    idempotency_ttl: dt.timedelta | float = ...,
    idempotency_using: str | None = ...,
    if_unavailable: Literal["raise", 503] = ...,
    replay_if: ReplayIf | None = ...,
    store_cookies: bool = ...,
    on_disconnect: OnDisconnect = ...,
    **options: Unpack[CommonKeywords],
) -> Callable[[V], V]: ...


def idempotent_view(
    view: Any = None,
    /,
    *,
    key: KeyOption | None = None,
    header: str | None = None,
    required: bool | None = None,
    payload: PayloadOption | None = None,
    if_contended: Literal["reject", "wait"] = "reject",
    wait: Seconds | Default | None = DEFAULT,
    done_if: DoneIf | None = None,
    methods: Sequence[str] | Literal["unsafe"] = "unsafe",
    client: str | Sequence[str] | Callable[..., str] = "{request.user.pk}",
    idempotency_scope: str = "",
    idempotency_ttl: dt.timedelta | float = WEEK,
    idempotency_using: str | None = None,
    if_unavailable: Literal["raise", 503] = "raise",
    replay_if: ReplayIf | None = None,
    store_cookies: bool = False,
    on_disconnect: OnDisconnect = "finish",
    **options: Unpack[CommonKeywords],
) -> Any:
    """Run a view once for each key of a client, and repeat its answer.

    The key is the header ``Idempotency-Key``, or what ``header`` or ``key`` says. Use it as
    ``locked_view``: on functions, sync or async, on class-based views, and outermost.
    The first answer is stored in the idempotency table, in the transaction of the view, and sent
    again, with its own status and headers, but without cookies, to every later request with the
    key. Answers of 500 and above, and those that may change (401, 403, 408, 409, 423, 425, 429),
    are not stored: the transaction is rolled back, and the key may be tried again; likewise where
    the view itself has called ``set_rollback``. An async view has no transaction: its effects are
    committed before its answer is stored. So it counts as done when it has returned, even if its
    page cannot be rendered or ``done_if`` raises.

    Requests that do not run:

    * Another request with the key is in progress: 409 with ``Retry-After``; with
      ``if_contended="wait"``, this one waits for its answer first.
    * Its answer could not be stored, was erased, or is damaged: 409 without ``Retry-After``.
    * The key was used with another method, path, query or body: 422; see ``payload``.
    * The key is missing and ``required``, or what a client has sent as a key is not 1 to 200
      visible ASCII characters: 400.
    * The client is anonymous, and ``client`` needs a user: as ``login_required``; 403 for JSON.
    * ``client`` has no value for another reason: 401.

    Args:
        key: ``BodyField()``, a field of a form or JSON object; a template over ``request`` and
            the arguments of the URL; a list as for ``locked_view``; or a callable with the view's
            arguments, which returns ``None`` if the request has no key.
        header: The header with the key, instead of ``Idempotency-Key``.
        required: Whether a request without a key is refused; otherwise it runs as usual. By
            default only if there is a ``key``.
        payload: What must be the same when a key comes again, besides method and path: names of
            fields of the form or JSON object, where a dot leads into an object; none, if it is
            ``[]``; or a callable with the view's arguments that returns text, numbers, or lists
            and dicts of them. By default query and body, too.
        if_contended: If the key is in progress: ``"reject"`` at once, or ``"wait"`` for the
            answer of the other request, and repeat it.
        wait: With ``if_contended="wait"``, seconds to wait before refusing; ``DEFAULT`` is the
            alias's ``WAIT``, ``None`` waits for ever.
        done_if: Which answers mean that the work is done: ``"redirect"``, for a form that is
            shown again with errors until it redirects; or a callable with the response. After
            any other answer, the transaction is rolled back and the key is free, also for other
            values. By default all answers mean it.
        methods: The HTTP methods that have keys, as for ``locked_view``; others run as usual.
            By default all but GET, HEAD, OPTIONS and TRACE.
        client: Whose keys these are: a template over ``request`` and the arguments of the URL, a
            list as for ``locked_view``, or a callable with the view's arguments. It must come
            from what the server has verified: whoever can name another client gets that client's
            answers. Two clients may use the same key. A callable knows no client if it returns
            ``None`` or an empty string, or raises ``LookupError``, ``AttributeError`` or
            ``ObjectDoesNotExist``.
        idempotency_scope: The scope of the records; by default the view's name. Set it, so that
            records survive a new name of the view.
        idempotency_ttl: How long answers are kept: seconds or a ``timedelta``; 7 days by default.
        idempotency_using: The database of the records; by default that of the routers. It must be
            the database of the view's effects.
        if_unavailable: If the lock's backend does not answer: ``"raise"``
            ``BackendUnavailable``, or refuse with ``503``.
        replay_if: Asked with the view's arguments, before an answer is repeated. If it returns
            ``False``, the request is refused with 403; if it returns a response, that is the
            answer. An exception is handled like one of the view. For an asynchronous view, it may
            be a coroutine function. Without it, whoever has the key gets the answer, also after a
            permission that the view has checked is gone.
        store_cookies: Whether the cookies of an answer are stored and set again.
        on_disconnect: As for ``locked_view``. With ``"cancel"``, the key of a cancelled view may be
            tried again.
        options: Options of ``Lock``.

    Raises:
        TypeError, ValueError: At decoration: an option is wrong. In a request: the view returns no
            response.
        BackendUnavailable: In a request; see ``if_unavailable``.
        AttemptsExhausted: In a request: five runs of the key in a row died in the middle or lost
            their lease. The key stays refused until its record is forgotten or expires.
    """
    check_on_disconnect(on_disconnect, "@idempotent_view")
    check_lock_options(if_unavailable, options)
    required = key is not None if required is None else required
    check_flags(required=required, store_cookies=store_cookies)
    ttl = check_record_options(idempotency_scope, idempotency_ttl, idempotency_using, replay_if)
    if done_if == "redirect" and key is None:
        raise ValueError(
            "done_if='redirect' is for a form, whose key is not a header: set key=BodyField(), or "
            "a callable as done_if"
        )
    source = key_source(key, header)
    # Never the alias's IF_UNAVAILABLE: with "local", two requests with one key could run at once.
    patience = patience_of(if_contended, wait)
    keywords = cast("LockKeywords", {**options, "wait": patience, "if_unavailable": "raise"})
    check_options(keywords)
    what = "client of @idempotent_view"
    of_client = compile_key(client, CLASS_BASED, what=what, of_list=of_list)
    notes = [note(what, client)]
    if isinstance(key, str | list | tuple):
        notes.append(note(WHAT, key))
    rules = Rules(
        required=required,
        key_source=source,
        payload=compile_payload(payload),
        is_done=done_test(done_if),
        has_keys=method_test(methods),
        client=of_client,
        client_is_callable=callable(client),
        scope=idempotency_scope,
        ttl=ttl,
        using=idempotency_using,
        if_unavailable=if_unavailable,
        replay_if=replay_if,
        store_cookies=store_cookies,
        finishes=on_disconnect == "finish",
        options=keywords,
    )

    def decorate(view: V) -> V:
        if isinstance(view, type):
            return cast("V", method_decorator(decorate, name="dispatch")(view))
        if not callable(view):
            raise TypeError(f"@idempotent_view takes a view, and options by name; not {view!r}")
        signature = signature_of(view, "@idempotent_view")  # refuses a method
        wrap = _async if is_async(view) else _sync
        # ``method_decorator`` shows a plain function in place of the method, also of an async one.
        if wrap is _sync and signature is not CLASS_BASED and iscoroutinefunction(replay_if):
            raise TypeError(
                f"replay_if of @idempotent_view on {full_name(view)} is a coroutine function, but "
                "the view is not asynchronous"
            )
        ninja = used_ninja() if signature is not CLASS_BASED else None
        where = f"@idempotent_view on {name_of(view)}"
        if ninja:
            ninja.refuse_above(view, where, around=False)
        scope, of_view = rules.scope or _scope_of(view), source
        if key is not None and signature is not CLASS_BASED:
            of_view = key_source(key, header, view, signature)
        guarded = wrap(view, rules._replace(scope=scope, key_source=of_view))
        if ninja:
            ninja.prepare(guarded, view, where, makes_response=True)
        for noted in notes:
            noted.on(view, name_of(view), guarded)
        return cast("V", guarded)

    return decorate if view is None else decorate(view)


def _scope_of(view: Callable[..., Any]) -> str:
    """The name of the view and, if a method such as ``post`` is decorated, of the method.

    Not the full name of what is decorated: ``dispatch`` is Django's, for all classes.
    """
    method = method_of(view)
    if method is None or method.__name__ == "dispatch":
        return name_of(view)
    return f"{name_of(view)}.{method.__name__}"


# -- the view ------------------------------------------------------------------------------


def _sync(view: Callable[..., Response], rules: Rules) -> Callable[..., Response]:
    own = _own_transactions(view)
    # As in ``locked_view``: on a method, Django's transaction is the outer one.
    rules = rules._replace(options={**rules.options, "hold_until": AFTER_TRANSACTION})

    def run(using: Sequence[str], body: Callable[[], Response]) -> Response:
        for database in using:
            body = transaction.atomic(using=database)(body)
        return body()

    @functools.wraps(view)
    def respond(request: HttpRequest, *args: Any, **kwargs: Any) -> Response:
        started = rules.begin(view, request, args, kwargs)
        if isinstance(started, HttpResponseBase):
            return started
        answer = functools.partial(view, request, *args, **kwargs)
        if started is None:
            return run(own.databases(), answer)
        with started.lock_or_refusal() as refusal:
            if refusal is not None:
                return refusal
            claim = started.claim()
            if isinstance(claim, HttpResponseBase):
                return claim
            if isinstance(claim, Finished):
                may = rules.replay_if
                return started.replay(claim, may is None or may(request, *args, **kwargs))
            # The record's transaction is the outer one, so that it commits last.
            databases = [*(name for name in own.databases() if name != claim.using), claim.using]

            def store() -> Response:
                response: Response = response_of(answer(), view, request, kwargs)
                # REST framework rolls back what its exceptions have left, and returns an answer.
                undone = any(transaction.get_rollback(using=name) for name in databases)
                if undone or not started.recording.store(claim, response):
                    for database in databases:
                        transaction.set_rollback(True, using=database)
                return response

            try:
                response = run(databases, store)
            except BaseException as error:  # noqa: BLE001 - recorded, and raised again
                return started.recording.failed(claim, error)
            started.recording.finished(claim, response)
            return response

    respond._non_atomic_requests = own  # type: ignore[attr-defined]
    return respond


def _async(view: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    own = _own_transactions(view)

    @functools.wraps(view)
    async def respond(request: HttpRequest, *args: Any, **kwargs: Any) -> Response:
        if own.databases():
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
        # The client may be that of a session, and a refusal may be a page: both may do I/O.
        started = await sync_to_async(rules.begin)(view, request, args, kwargs)
        if started is None:
            return cast("Response", await view(request, *args, **kwargs))
        if isinstance(started, HttpResponseBase):
            return started

        async def guarded(begin: disconnects.Begin) -> Response:
            async with AsyncExitStack() as held:
                refusal = await held.enter_async_context(started.alock_or_refusal())
                if refusal is not None:
                    return refusal
                begin()
                try:
                    claim = await sync_to_async(started.claim)()
                except asyncio.CancelledError:
                    # The client has gone, but the claim is made all the same.
                    await sync_to_async(started.withdraw)()
                    raise
                if isinstance(claim, HttpResponseBase):
                    return claim
                if isinstance(claim, Finished):
                    allowed = await _allowed(rules.replay_if, request, args, kwargs)
                    return await sync_to_async(started.replay)(claim, allowed)
                try:
                    result = await view(request, *args, **kwargs)
                except BaseException as error:
                    if isinstance(error, asyncio.CancelledError) and disconnects.is_cut_short():
                        # As if the process had died: the record of a run in progress stays.
                        started.recording.keep_lock()
                        raise
                    return await sync_to_async(started.recording.failed)(claim, error)

                def make_response() -> Response:
                    made: Response = response_of(result, view, request, kwargs)
                    return made

                async def record(begin: disconnects.Begin) -> Response:
                    begin()
                    try:
                        return await sync_to_async(started.recording.record)(claim, make_response)
                    except asyncio.CancelledError:
                        # By the end of the event loop, while a thread may still write.
                        started.recording.keep_lock()
                        raise

                # Also with ``on_disconnect="cancel"``: what is done stays done.
                return await disconnects.finish(record, started.lock)

        if rules.finishes:
            return await disconnects.finish(guarded, started.lock)
        return await guarded(lambda: None)

    return respond


async def _allowed(
    may: Callable[..., Any] | None,
    request: HttpRequest,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """What ``replay_if`` says; it may be asynchronous or not."""
    if may is None:
        return True
    ask = may if iscoroutinefunction(may) else sync_to_async(may)
    allowed = await ask(request, *args, **kwargs)
    return await allowed if inspect.isawaitable(allowed) else allowed


def _own_transactions(view: Callable[..., Any]) -> OwnTransactions:
    marks = getattr(view, "_non_atomic_requests", ())
    if isinstance(marks, OwnTransactions):
        raise TypeError(
            f"@idempotent_view on {full_name(view)}: put @locked_view above @idempotent_view, so "
            "that its lock outlives the transaction"
        )
    return OwnTransactions(marks)
