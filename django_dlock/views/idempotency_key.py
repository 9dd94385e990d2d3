"""Where the key of a request to ``idempotent_view`` comes from: a header, a field, or ``key``."""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ObjectDoesNotExist
from django.http import HttpRequest
from django.utils.translation import gettext

from ..keys import Key, KeySpec, MissingValue, compile_key
from ..keys.template_secrets import secret_in
from ..log import logger
from .body import values_of
from .requests import of_list
from .signature import CLASS_BASED, is_made_by_class, name_of
from .visitors import is_chosen

DEFAULT_HEADER = "Idempotency-Key"
DEFAULT_FIELD = "idempotency_key"
"""What the template tag calls its hidden field."""

WHAT = "key of @idempotent_view"


@dataclass(frozen=True)
class BodyField:
    """A field of the request's body, whose value is the key of ``idempotent_view``.

    The body may be a form, also one with uploads, or a JSON object.

    Args:
        name: Of the field; by default that of the template tag ``{% idempotency_key %}``. In a
            JSON object, a dot leads into an object or list: ``"event.id"``.

    Raises:
        TypeError, ValueError: The name is no string, is empty or shows a secret.
    """

    name: str = DEFAULT_FIELD

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"BodyField takes the name of a field, not {self.name!r}")
        if not self.name:
            raise ValueError("BodyField takes the name of a field, which is empty here")
        if secret := secret_in(f"request.POST.{self.name}"):
            raise ValueError(
                f"BodyField({self.name!r}): the field is {secret}, but keys of records are shown "
                "to operators, in logs and in traces"
            )


KeyOption: TypeAlias = str | Sequence[str] | Callable[..., str | None] | BodyField


class MalformedKey(ValueError):
    """The request has a key that may not be one; the text does not quote it."""


class KeySource(NamedTuple):
    """Finds the key of a request.

    Attributes:
        needs: What a request without its key is told.
    """

    find: Callable[[HttpRequest, Sequence[Any], Mapping[str, Any]], str | None]
    needs: Callable[[], str]


def key_source(
    key: KeyOption | None,
    header: str | None,
    view: Callable[..., Any] | None = None,
    signature: inspect.Signature = CLASS_BASED,
) -> KeySource:
    """How the options ``key`` and ``header`` find a key.

    Args:
        view: ``None`` checks the options only.

    Raises:
        TypeError, ValueError: An option is wrong, or there are both.
    """
    if key is None:
        return _of_header(DEFAULT_HEADER if header is None else header)
    if header is not None:
        raise ValueError(
            f"key is {key!r}, and header is {header!r}; @idempotent_view takes one of them"
        )
    if isinstance(key, BodyField):
        return _of_field(key.name)
    if callable(key) and (
        iscoroutinefunction(key) or isinstance(key, type) or is_made_by_class(key)
    ):
        raise TypeError(
            f"{WHAT} is {key!r}; it takes a template such as '{{number}}', a list of names, a "
            "plain function with the view's arguments, or an instance such as BodyField()"
        )
    if isinstance(key, str) and not any(field for _, field, _, _ in _parts(key)):
        raise ValueError(
            f"{WHAT} is {key!r}, a template without a field, so all requests of a client would be "
            f"the same one; for a field of the body, use BodyField({key!r})"
        )
    of_view = WHAT if view is None else f"{WHAT} on {name_of(view)}"
    prefix = "" if view is None else name_of(view)
    made = compile_key(
        cast("KeySpec", key), signature, what=of_view, prefix=prefix, of_list=of_list
    )
    return _of_call(made, view, callable(key))


def _parts(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        return list(string.Formatter().parse(template))
    except ValueError:
        # ``compile_key`` says what is wrong with it.
        return [("", template, None, None)]


def _of_header(header: str) -> KeySource:
    if not isinstance(header, str) or not re.fullmatch(r"[A-Za-z0-9-]+", header):
        raise ValueError(
            f"header of @idempotent_view is {header!r}; it takes the name of a header, of "
            "letters, digits and hyphens, such as 'X-Request-Id'"
        )
    if secret := secret_in(f"request.headers.{header}"):
        raise ValueError(
            f"header of @idempotent_view is {header!r}, which is {secret}, but keys of records "
            "are shown to operators, in logs and in traces"
        )

    def find(request: HttpRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        sent = request.headers.get(header)
        return None if sent is None else _checked(sent)

    def needs() -> str:
        text = gettext("This request needs an {header} header of 1 to 200 visible characters.")
        return text.format(header=header)

    return KeySource(find, needs)


def _of_field(name: str) -> KeySource:
    def find(request: HttpRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        sent = values_of(request, [name]).get(name)
        if isinstance(sent, tuple):
            # Of a form; the last one counts, as for ``request.POST[name]``.
            sent = sent[-1]
        if sent is None:
            return None
        if isinstance(sent, int) and not isinstance(sent, bool):
            sent = str(sent)
        return _checked(sent)

    def needs() -> str:
        text = gettext("This request needs the field {name} with 1 to 200 visible characters.")
        return text.format(name=name)

    return KeySource(find, needs)


def _checked(sent: Any) -> str:
    """The key that a client has sent, with or without the quotes of the draft.

    Raises:
        MalformedKey: It is not 1 to 200 visible ASCII characters.
    """
    pattern = r'"([!#-\[\]-~]{1,200})"|([!#-~]{1,200})'
    found = re.fullmatch(pattern, sent) if isinstance(sent, str) else None
    if found is None:
        raise MalformedKey
    return found[1] or found[2]


def _of_call(made: Key, view: Callable[..., Any] | None, by_callable: bool) -> KeySource:
    def find(request: HttpRequest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        try:
            return made((request, *args), kwargs)
        except MissingValue as missing:
            if not by_callable and (missing.of_call or not is_chosen(missing.field)):
                raise
            return None
        except (AttributeError, LookupError, ObjectDoesNotExist) as error:
            if not by_callable:
                raise
            # What a callable raises if a header, a field or a row does not exist. A ``KeyError``
            # shows the key that was looked up, which may be a credential.
            why = type(error).__name__
            name = "?" if view is None else name_of(view)
            logger.info("@idempotent_view on %s: no key: %s", name, why)
            return None

    def needs() -> str:
        return gettext("This request lacks a value that it needs.")

    return KeySource(find, needs)
