"""Whether an answer says that the work is done: a form that is shown again with errors does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from asgiref.sync import iscoroutinefunction
from django.http import HttpResponseBase

DoneIf: TypeAlias = Literal["redirect"] | Callable[[HttpResponseBase], bool]


def done_test(done_if: DoneIf | None) -> Callable[[HttpResponseBase], Any]:
    """What says whether an answer means that the work is done, by the option ``done_if``.

    Raises:
        TypeError, ValueError: It is neither ``"redirect"`` nor a plain function.
    """
    if done_if is None:
        return lambda response: True
    if isinstance(done_if, str):
        if done_if != "redirect":
            raise ValueError(
                f"done_if is {done_if!r}; @idempotent_view takes 'redirect' or a callable with "
                "the response"
            )
        return _redirects
    if not callable(done_if) or iscoroutinefunction(done_if):
        raise TypeError(
            f"done_if is {done_if!r}; @idempotent_view takes 'redirect' or a plain function with "
            "the response"
        )
    return done_if


def _redirects(response: HttpResponseBase) -> bool:
    return 300 <= response.status_code < 400 and response.has_header("Location")
