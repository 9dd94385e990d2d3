"""The response of a guarded view with its content, whatever framework makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.http import HttpResponseBase
from django.utils.module_loading import import_string

from .signature import name_of, used_ninja


def response_of(
    result: Any, view: Callable[..., Any], request: Any, kwargs: Mapping[str, Any]
) -> Any:
    """The response, with its content, that is made of what a view has returned.

    A page has its content later if a middleware may change it before that.

    Raises:
        TypeError, ValueError: It is not a response.
    """
    response: Any = result
    if not isinstance(response, HttpResponseBase) and (ninja := used_ninja()):
        response = ninja.make_response(request, result, kwargs)
    if response is None:
        raise ValueError(
            f"The view {name_of(view)} didn't return an HttpResponse object. It returned None "
            "instead."
        )
    if not isinstance(response, HttpResponseBase):
        raise TypeError(
            f"The view {name_of(view)} returned an object of type {type(result).__name__}; "
            "@idempotent_view stores an HttpResponse. If something makes the response later, put "
            "@idempotent_view above that, where a response is returned"
        )
    if is_unrendered(response) and hasattr(request, "accepted_renderer"):
        response = _finalized(response, request)
    if is_unrendered(response) and not _may_change_pages(tuple(settings.MIDDLEWARE)):
        response.render()
    return response


def is_unrendered(response: Any) -> bool:
    """Whether it is the response of a template, or of REST framework, without its content."""
    return callable(getattr(response, "render", None)) and not response.is_rendered


@functools.lru_cache(maxsize=8)
def _may_change_pages(middleware: tuple[str, ...]) -> bool:
    return any(hasattr(import_string(name), "process_template_response") for name in middleware)


def _finalized(response: Any, request: Any) -> Any:
    """The response of a method of REST framework, with its renderer and headers."""
    view = request.parser_context["view"]
    finalize = view.finalize_response
    finalized = finalize(request, response, *view.args, **view.kwargs)

    # The names of its parameters are REST framework's, for callers that use them.
    def finalize_others(request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        return response if response is finalized else finalize(request, response, *args, **kwargs)

    # REST framework calls it when the method has returned. There is a view for each request.
    view.finalize_response = finalize_others
    return finalized
