"""Operations of django-ninja: what may be guarded where, and the response of a guarded one.

An operation calls its view with parsed arguments, when the client is authenticated, and makes the
response of what it returns. Loaded only in projects that use django-ninja.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from asgiref.sync import markcoroutinefunction
from django.http import HttpRequest

from ..log import logger

F = TypeVar("F", bound=Callable[..., Any])

CURE = "put it below the decorator of django-ninja, such as @api.post, and next to that"
ON_REQUEST = "_dlock_operation"
"""The attribute of a request that holds its operation."""


def refuse_above(view: Callable[..., Any], where: str, *, around: bool) -> None:
    """Refuse a view that an operation calls already, so that its guard would never be called.

    Args:
        where: The decorator and the view, for messages.
        around: Whether the decorator may stand around a whole operation, with its authentication.

    Raises:
        TypeError
    """
    if hasattr(view, "_ninja_operation"):
        raise TypeError(
            f"{where}: django-ninja has registered the function below it already, and would call "
            f"that without the guard; {CURE}"
        )
    if not around and operation_of(view) is not None:
        raise TypeError(
            f"{where}: around an operation of django-ninja, it would repeat answers to clients "
            f"that are not authenticated; {CURE}, and not in decorate_view"
        )


def prepare(guarded: F, view: Callable[..., Any], where: str, *, makes_response: bool) -> F:
    """Let an operation call a guarded view as it would call the view itself.

    Args:
        where: As in ``refuse_above``.
        makes_response: Whether the guarded view calls ``make_response``.
    """
    from ninja.decorators import decorate_view

    if operation_of(view) is not None:
        return guarded
    _resolve_annotations(guarded)

    def bind(run: Callable[..., Any]) -> Callable[..., Any]:
        return _bind(run, where, makes_response=makes_response)

    # Called with ``run`` of each operation that is made with the view, and of each copy of one.
    prepared: F = decorate_view(bind)(guarded)
    return prepared


def make_response(request: HttpRequest, result: Any, kwargs: Mapping[str, Any]) -> Any:
    """The response that the operation of this request makes of what its view has returned."""
    operation = getattr(request, ON_REQUEST, None)
    make = getattr(operation, "_result_to_response", None)
    if operation is None or make is None:
        return result
    # Headers and cookies that the view has set, if it has a parameter for them.
    begun = kwargs.get(operation.signature.response_arg)
    if begun is None:
        begun = operation.api.create_temporal_response(request)
    return make(request, result, begun)


def operation_of(run: Callable[..., Any]) -> Any:
    """The operation whose ``run`` this is, also below other decorators; ``None`` for a view."""
    from ninja.operation import Operation

    owner = getattr(inspect.unwrap(run), "__self__", None)
    return owner if isinstance(owner, Operation) else None


def _bind(run: Callable[..., Any], where: str, *, makes_response: bool) -> Callable[..., Any]:
    operation = operation_of(run)
    if operation is None:
        raise TypeError(
            f"{where}: a decorator below it, given to decorate_view, hides the operation of "
            "django-ninja: use functools.wraps in that decorator"
        )
    if getattr(operation, "stream_format", None) is not None:
        raise TypeError(
            f"{where}: django-ninja streams what this view yields when the guard has ended. A "
            "stream cannot be stored; to hold a lock until it is sent, use "
            "@decorate_view(locked_view(...)), whose lock also covers the authentication"
        )
    if not makes_response:
        return run
    if not hasattr(operation, "_result_to_response"):
        logger.warning(
            "%s: views must return an HttpResponse, because this django-ninja has no "
            "_result_to_response",
            where,
        )

    @functools.wraps(run)
    def run_known(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        setattr(request, ON_REQUEST, operation)
        return run(request, *args, **kwargs)

    return markcoroutinefunction(run_known) if operation.is_async else run_known


def _resolve_annotations(guarded: Callable[..., Any]) -> None:
    """Show the types of the parameters, not their names, which django-ninja would look up here."""
    inner = inspect.unwrap(guarded)
    if not isinstance(inner, FunctionType):
        return
    if any(isinstance(annotation, str) for annotation in inner.__annotations__.values()):
        try:
            guarded.__signature__ = inspect.signature(guarded, eval_str=True)  # type: ignore[attr-defined]
        except NameError:
            # A name that is only there for type checkers; django-ninja says which.
            return
