"""Which parts of a request must be the same when its key comes again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from asgiref.sync import iscoroutinefunction
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpRequest

from .body import values_of
from .stored import fingerprint

PayloadOption: TypeAlias = Sequence[str] | Callable[..., Any]
Fingerprint: TypeAlias = Callable[[HttpRequest, Sequence[Any], Mapping[str, Any]], str]


def compile_payload(payload: PayloadOption | None) -> Fingerprint:
    """What makes the fingerprint of a request, by the option ``payload``.

    Raises:
        TypeError: It is neither names of fields nor a plain function.
    """
    if payload is None:
        return lambda request, args, kwargs: fingerprint(request)
    if not isinstance(payload, str | type) and not iscoroutinefunction(payload):
        if callable(payload):
            return _of_callable(payload)
        if isinstance(payload, Sequence) and all(isinstance(it, str) and it for it in payload):
            return _of_fields(list(payload))
    raise TypeError(
        f"payload of @idempotent_view is {payload!r}; it takes a list of fields of the body, such "
        "as ['order', 'amount'], or a plain function with the view's arguments"
    )


def _of_fields(names: Sequence[str]) -> Fingerprint:
    def make(request: HttpRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        found = values_of(request, names)
        if names and not found:
            # Of a kind that nobody has foreseen; without this, all of them would look the same.
            return fingerprint(request)
        try:
            return _digest(request, found)
        except RecursionError:
            return fingerprint(request)

    return make


def _of_callable(function: Callable[..., Any]) -> Fingerprint:
    def make(request: HttpRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        value = function(request, *args, **kwargs)
        try:
            if value is not None:
                return _digest(request, value)
        except (TypeError, ValueError):
            # Without the value, which may be private, and the error may be logged.
            pass
        raise TypeError(
            f"payload of @idempotent_view: {function!r} returned a value of type "
            f"{type(value).__name__}, which has no stable form; return text, numbers, or lists "
            "and dicts of them"
        )

    return make


def _digest(request: HttpRequest, value: Any) -> str:
    """A digest of method, path and value; the query is not compared."""
    parts = [request.method, request.path, value]
    text = json.dumps(parts, sort_keys=True, cls=DjangoJSONEncoder)
    return hashlib.sha256(text.encode()).hexdigest()
