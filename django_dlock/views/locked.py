"""``locked_view``: a view that runs under a lock, or refuses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import method_decorator

from .. import conf
from ..core.options import DEFAULT, Default, Seconds
from ..decorators import CommonKeywords, LockKeywords, check_options
from ..exceptions import LockError
from ..keys import compile_key
from ..lock import Lock
from .locking import AFTER_TRANSACTION, IfUnavailable, ViewRules
from .noted import note
from .requests import (
    OnDisconnect,
    check_on_disconnect,
    every_method,
    method_test,
    of_list,
    read_body,
    sends_body,
)
from .signature import CLASS_BASED, is_async, is_made_by_class, name_of, signature_of, used_ninja
from .transactions import OwnTransactions, release_when_closed

if TYPE_CHECKING:
    from typing_extensions import Unpack

V = TypeVar("V", bound=Callable[..., Any])
Response: TypeAlias = HttpResponseBase


def locked_view(
    key: str | Sequence[str] | Callable[..., str],
    *,
    wait: Seconds | Default | None = 0,
    status: Literal[409, 423] = 409,
    if_contended: Literal["reject", "wait"] = "reject",
    methods: Sequence[str] | Literal["unsafe"] | None = None,
    if_unavailable: IfUnavailable = "raise",
    stream_max_hold: Seconds | Default = DEFAULT,
    on_disconnect: OnDisconnect = "finish",
    **options: Unpack[CommonKeywords],
) -> Callable[[V], V]:
    """Run a view under the lock that ``key`` names, one request at a time.

    Use it on functions, sync or async, on ``V.as_view()``, on a class-based view itself and,
    with ``method_decorator``, on its methods. Make it the outermost decorator: with
    ``ATOMIC_REQUESTS`` the transaction then begins inside the lock, ends before the release, and
    is rolled back if the lease is lost before that. If it began before, as for a method, the lock
    is released when it has ended, unless ``hold_until="release"``. A streamed response keeps the
    lock until it is closed, for at most ``stream_max_hold``. A ``TemplateResponse`` is rendered
    after the release, as it is after the transaction.

    If the key needs a value that an anonymous visitor does not have, such as a primary key, the
    visitor is redirected to the login page, as by ``login_required``; a client that prefers JSON
    gets 403.

    A refusal has a ``Retry-After`` of 1 to 60 seconds. Clients that prefer JSON get problem
    details (RFC 9457), others the page ``django_dlock/contended.html``.

    Args:
        key: A template over ``request`` and the arguments of the URL
            (``"checkout:{request.user.pk}"``); a list of such arguments and fields of the
            request (``["request.user.pk", "slug"]``), from which a digest is made that no other
            values produce, and no other view; or a callable with the view's arguments.
        wait: With ``if_contended="wait"``, seconds to wait before refusing; ``DEFAULT`` is the
            alias's ``WAIT``, ``None`` waits for ever.
        status: Of a refusal: 409 (Conflict) or 423 (Locked).
        if_contended: ``"reject"`` at once, or ``"wait"``.
        methods: The HTTP methods that need the lock, such as ``["POST", "PUT"]``, or
            ``"unsafe"`` for all but GET, HEAD, OPTIONS and TRACE, also for methods of your own.
            Other methods run without it. By default all methods need it.
        if_unavailable: If the lock's backend does not answer: ``"raise"``
            ``BackendUnavailable``, ``"local"`` (lock the name in this process only), ``"pass"``
            (run the view without its lock) or ``503`` (refuse). All but the first log a warning.
            The alias's ``IF_UNAVAILABLE`` does not count here.
        stream_max_hold: Seconds for which the lock is held at most while a streamed response is
            sent, after which it is lost; the response goes on. ``DEFAULT`` is the alias's
            ``STREAM_MAX_HOLD``, five minutes.
        on_disconnect: What becomes of an asynchronous view whose client goes away under ASGI, once
            it has its lock: ``"finish"`` it, or ``"cancel"`` it where it waits, as Django does
            with other views. Threads that a cancelled view waits for may go on after the release.
        options: All other options of ``Lock``. The request's path and user are added to
            ``metadata``.

    Raises:
        TypeError, ValueError: At decoration: an option or the key is wrong, or two contradict
            each other. In a request: a field of the key is ``None`` or of a type that templates
            do not render.
        LeaseLost: In a request: the view ended normally, but its lease was lost.
        BackendUnavailable: In a request: the lock's backend did not answer, and
            ``if_unavailable="raise"``.
    """
    _check_contention(wait, status, if_contended)
    check_on_disconnect(on_disconnect, "@locked_view")
    if if_unavailable not in ("raise", "local", "pass", 503):
        raise ValueError(
            f"if_unavailable is {if_unavailable!r}; @locked_view takes 'raise', 'local', 'pass' "
            "or 503"
        )
    if not isinstance(stream_max_hold, Default):
        stream_max_hold = conf.seconds(stream_max_hold, what="stream_max_hold", minimum=0.1)
    is_guarded = every_method if methods is None else method_test(methods)
    # A plain function may be a key or a view; if it is a view, the first request raises.
    if callable(key) and (
        isinstance(key, type)
        or (inspect.isfunction(key) and is_made_by_class(key))
        or iscoroutinefunction(key)
    ):
        raise _no_key(key)
    # ``without_lock`` handles the other values, because it knows the request.
    policy = "local" if if_unavailable == "local" else "raise"
    keywords = cast("LockKeywords", {**options, "wait": wait, "if_unavailable": policy})
    check_options(keywords)
    what = "The key of @locked_view"
    in_class = partial(compile_key, key, CLASS_BASED, what=what, of_list=of_list)
    class_key, noted = in_class(), note(what, key)

    # If the view was taken for the key, this is called with a request, or self and a request.
    def decorate(view: V, *args: Any, **kwargs: Any) -> V:
        if isinstance(view, type):
            return cast("V", method_decorator(decorate, name="dispatch")(view))
        if args or kwargs or not callable(view):
            if callable(key):
                raise _no_key(key)
            raise TypeError(f"@locked_view takes a view, not {view!r}")
        signature, name = signature_of(view, "@locked_view"), name_of(view)
        if signature is not CLASS_BASED:
            of_view = f"{what} on {name}"
            make_key = compile_key(key, signature, what=of_view, prefix=name, of_list=of_list)
        elif isinstance(key, str) or callable(key):
            # ``method_decorator`` calls this with every request, so the key is compiled already.
            make_key = class_key
        else:
            make_key = in_class(prefix=name)
        rules = ViewRules(
            *(view, make_key, keywords, status, is_guarded, if_unavailable, stream_max_hold)
        )
        ninja = used_ninja() if signature is not CLASS_BASED else None
        if ninja:
            ninja.refuse_above(view, f"@locked_view on {name}", around=True)
        if not is_async(view):
            guarded = _sync(view, rules)
        elif keywords.get("hold_until") == "commit":
            raise ValueError(
                "@locked_view: hold_until='commit' follows the transaction of a thread; an "
                "asynchronous view has none"
            )
        else:
            from .locked_async import asynchronous

            guarded = asynchronous(view, rules, key, finishes=on_disconnect == "finish")
        if ninja:
            ninja.prepare(guarded, view, f"@locked_view on {name}", makes_response=False)
        return cast("V", noted.on(view, name, guarded))

    return decorate


def _no_key(given: Callable[..., Any]) -> TypeError:
    return TypeError(
        f"@locked_view took {name_of(given)} for its key, which is a template or a plain function. "
        "If that is the view, it needs a key first: @locked_view('order:{number}')"
    )


def _check_contention(wait: object, status: int, if_contended: str) -> None:
    if status not in (409, 423):
        raise ValueError(f"status is {status!r}; @locked_view refuses with 409 or 423")
    if if_contended not in ("reject", "wait"):
        raise ValueError(f"if_contended is {if_contended!r}; it takes 'reject' or 'wait'")
    waits = wait != 0
    if waits and if_contended == "reject":
        raise ValueError(
            f"wait is {wait!r}, but if_contended='reject' never waits; set if_contended='wait'"
        )
    if not waits and if_contended == "wait":
        raise ValueError(
            "if_contended='wait' needs a wait: seconds, or DEFAULT for the alias's WAIT"
        )


# -- the view ------------------------------------------------------------------------------


def _sync(view: Callable[..., Response], rules: ViewRules) -> Callable[..., Response]:
    marks = getattr(view, "_non_atomic_requests", None)
    # If a locked view is inside this one, it opens the transactions, inside both locks.
    inner = marks if isinstance(marks, OwnTransactions) else None
    own = OwnTransactions(marks or ()) if inner is None else inner
    # On a method, or below ``api_view`` of REST framework, Django does not see the mark.
    # Then its transaction is the outer one.
    rules = rules._replace(options={"hold_until": AFTER_TRANSACTION, **rules.options})

    @functools.wraps(view)
    def respond(request: HttpRequest, *args: Any, **kwargs: Any) -> Response:
        lock = rules.lock(request, args, kwargs)
        if isinstance(lock, partial):
            return lock()
        if lock is not None and sends_body(request):
            read_body(request)

        def run() -> Response:
            response = view(request, *args, **kwargs)
            if isinstance(lock, Lock):
                # Check now, while transactions can still be rolled back.
                lock.check()
            return response

        databases = own.databases() if inner is None else []
        with ExitStack() as held:
            if lock is not None:
                held.callback(release_when_closed, request, lock)
                try:
                    held.enter_context(lock)
                except LockError as error:
                    refusal = rules.without_lock(request, lock, error)
                    if refusal is not None:
                        return refusal
                    lock = None
            body = run
            for database in databases:
                body = transaction.atomic(using=database)(body)
            response = body()
            if lock is not None and getattr(response, "streaming", False):
                from .streams import hold_until_closed

                hold_until_closed(request, response, lock)
                lock._end_within(rules.longest_stream(lock))
                held.pop_all()
            return response

    respond._non_atomic_requests = own  # type: ignore[attr-defined]
    return respond
