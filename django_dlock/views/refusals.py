"""Refusals: the lock is held, its backend does not answer, or the visitor is not logged in.

Clients that prefer JSON get problem details (RFC 9457). Others get a page, which tells people
whether to send again: whoever is not told does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext

from ..databases import errors as database_errors
from ..keys import MissingValue
from ..lease import LeaseInfo
from ..log import logger
from ..text.request_path import path_of
from .signature import name_of
from .visitors import is_chosen

LONGEST_RETRY_AFTER = 60
"""Seconds. A long lease may be released at any moment, so clients should not wait for its end."""

OUTAGE_RETRY_AFTER = 5
"""Seconds after which a client may try again in an outage of the lock's backend."""

TEMPLATE = "django_dlock/refused.html"
STYLE = "django_dlock/refused.css"


class Page(NamedTuple):
    """What a person reads, in place of title and detail of the problem.

    Attributes:
        note: For the developer of the page.
    """

    heading: str
    text: str
    note: str = ""


def contended(request: HttpRequest, status: int, info: LeaseInfo | None) -> HttpResponse:
    """The lock is held by someone else; the response does not say by whom."""
    page = Page(
        gettext("Another request is in progress"),
        gettext(
            "This request was not carried out. If you have just sent the same one, please do not "
            "send it again: look in a moment whether the first one has arrived."
        ),
    )
    return _contended(request, status, info, page)


def in_progress(request: HttpRequest, info: LeaseInfo | None) -> HttpResponse:
    """The same request is in progress."""
    page = Page(
        gettext("Your request is in progress"),
        gettext(
            "We have received it and are working on it. Please do not send it again. To see the "
            "result, reload this page in a few seconds: nothing is done twice."
        ),
    )
    return _contended(request, HTTPStatus.CONFLICT, info, page)


def _contended(
    request: HttpRequest, status: int, info: LeaseInfo | None, page: Page
) -> HttpResponse:
    wait = 0.0
    if info is not None:
        # How long the holder still needs is unknown. The time that it has taken so far is a fair
        # guess, and is short for a request that has just begun.
        wait = info.age if info.kind == "held" else info.ttl or 0.0
    return problem(
        request,
        status,
        gettext("Another request for this resource is in progress. Try again later."),
        retry_after=min(max(math.ceil(wait), 1), LONGEST_RETRY_AFTER),
        page=page,
    )


def unavailable(request: HttpRequest) -> HttpResponse:
    """The lock's backend does not answer."""
    return problem(
        request,
        HTTPStatus.SERVICE_UNAVAILABLE,
        gettext("This service is unavailable for the moment. Try again later."),
        retry_after=OUTAGE_RETRY_AFTER,
        page=Page(
            gettext("Unavailable for the moment"),
            gettext("Your request was not carried out. Please try again in a few seconds."),
        ),
    )


def other_request(request: HttpRequest) -> HttpResponse:
    """The key was used for another request."""
    return problem(
        request,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        gettext("This idempotency key was used for another request."),
        page=Page(
            gettext("This form was sent before"),
            gettext(
                "It was sent with other values; this time, nothing was done. Please do not send it "
                "again: look whether the first one has arrived. For another request, open the "
                "form anew."
            ),
        ),
    )


def answer_is_gone(request: HttpRequest) -> HttpResponse:
    """The work is done, and there is no answer to repeat."""
    return problem(
        request,
        HTTPStatus.CONFLICT,
        gettext("This request was carried out, but its answer was not kept."),
        page=Page(
            gettext("Your request was carried out"),
            gettext(
                "Its confirmation cannot be shown again. Please do not send it again: it is done."
            ),
        ),
    )


def without_key(request: HttpRequest, needs: str) -> HttpResponse:
    """The request has no valid key."""
    return problem(
        request,
        HTTPStatus.BAD_REQUEST,
        needs,
        page=Page(
            gettext("This request is incomplete"),
            gettext(
                "It was not carried out. Please open the page that it was sent from anew, and "
                "send it once more."
            ),
            note=needs,
        ),
    )


def without_client(request: HttpRequest) -> HttpResponse:
    """It is not known whose the request is."""
    return problem(
        request,
        HTTPStatus.UNAUTHORIZED,
        gettext("Authentication is required."),
        page=Page(
            gettext("We do not know who you are"),
            gettext(
                "This request was not carried out. Please allow cookies for this site, or log in, "
                "and open the page that it was sent from anew. If you have just sent the same "
                "request, look first whether that one has arrived."
            ),
        ),
    )


def without_database(request: HttpRequest, error: Error, *, refuses: bool) -> HttpResponse:
    """The answer if a database does not answer before the view has begun.

    Raises:
        Error: ``error``, unless ``refuses``.
    """
    if not refuses:
        raise error
    logger.warning("%s %s: no answer of a database: %s", request.method, path_of(request), error)
    return unavailable(request)


def key_failed(
    error: MissingValue | Error,
    view: Callable[..., Any],
    request: HttpRequest,
    kwargs: Mapping[str, Any],
    *,
    refuses: bool,
) -> HttpResponseBase:
    """The answer to a request whose key cannot be made: a value or a database is missing.

    Args:
        refuses: Whether a database that is away is a refusal, and not an error.

    Raises:
        MissingValue: See ``login_or_error``.
        Error: See ``without_database``.
    """
    if isinstance(error, MissingValue):
        return login_or_error(error, view, request, kwargs)
    refuses = refuses and database_errors.is_away_or_busy(error)
    return without_database(request, error, refuses=refuses)


def is_anonymous(request: HttpRequest) -> bool:
    """Whether the project has users and this request belongs to none of them."""
    user = getattr(request, "user", None)
    return user is not None and not user.is_authenticated


def login_or_error(
    missing: MissingValue, view: Callable[..., Any], request: HttpRequest, kwargs: Mapping[str, Any]
) -> HttpResponseBase:
    """The answer to a request in which a field has no value.

    A redirect to the login page, or 403, if a login may add it; 400 if the visitor has left it out.

    Raises:
        MissingValue: The view or the server does not have it.
    """
    if missing.of_user and is_anonymous(request):
        return login_required(request)
    if missing.field and not missing.of_call and is_chosen(missing.field):
        detail = gettext("This request lacks a value that it needs.")
        return problem(request, HTTPStatus.BAD_REQUEST, detail)
    text = f"{missing}. The view {name_of(view)} was called with {', '.join(['request', *kwargs])}"
    raise MissingValue(text, of_user=missing.of_user) from missing


def login_required(request: HttpRequest) -> HttpResponseBase:
    """Redirect to the login page, as Django's decorator; 403 for a client that prefers JSON."""
    from django.contrib.auth import decorators

    if prefers_json(request):
        detail = gettext("Authentication is required.")
        return problem(request, HTTPStatus.FORBIDDEN, detail)
    response: HttpResponseBase = decorators.login_required(_never)(request)
    patch_vary_headers(response, ["Accept"])
    return response


def _never(request: HttpRequest) -> HttpResponse:
    """The view behind the login; an anonymous request never reaches it."""
    return HttpResponse(status=HTTPStatus.FORBIDDEN)


def prefers_json(request: HttpRequest) -> bool:
    """Whether the client asks for JSON, or sends it and accepts anything."""
    json, html = ["application/problem+json", "application/json"], ["text/html"]
    # If the client accepts both equally, the first wins; a client that sends JSON can read it.
    sends_json = (request.content_type or "").partition(";")[0].endswith("json")
    return request.get_preferred_type(json + html if sends_json else html + json) in json


def problem(
    request: HttpRequest,
    status: int,
    detail: str,
    *,
    retry_after: int | None = None,
    page: Page | None = None,
) -> HttpResponse:
    """The response in the form that the client prefers: problem details (RFC 9457) or a page."""
    problem: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        "instance": request.path,
    }
    if retry_after is not None:
        problem["retry_after"] = retry_after
    if prefers_json(request):
        response: HttpResponse = JsonResponse(
            problem, status=status, content_type="application/problem+json"
        )
    else:
        response = _page(request, problem, page or Page(problem["title"], detail))
    if retry_after is not None:
        response["Retry-After"] = str(retry_after)
    patch_vary_headers(response, ["Accept"])
    return response


def _page(request: HttpRequest, problem: Mapping[str, Any], page: Page) -> HttpResponse:
    from django.template import TemplateDoesNotExist
    from django.template.loader import render_to_string

    context = {"problem": problem, "page": page, "style": _style()}
    try:
        body: str = render_to_string(TEMPLATE, context, request)
        content_type = "text/html"
    except TemplateDoesNotExist:
        # A JSON-only project may have no template engine.
        body, content_type = f"{problem['title']}: {problem['detail']}\n", "text/plain"
    return HttpResponse(
        body, status=problem["status"], content_type=f"{content_type}; charset=utf-8"
    )


def _style() -> str:
    """The address of the style sheet; empty if the project serves none."""
    from django.templatetags.static import static

    try:
        return static(STYLE)
    except (ImproperlyConfigured, ValueError):
        # STATIC_URL is not set, or ``collectstatic`` has not run since the package was installed.
        return ""
