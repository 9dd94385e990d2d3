"""The keys that templates, argument names and callables make from a call.

Used by ``locked``, ``locked_view`` and ``LockedTask``; knows no tasks, and of requests only what
``template_secrets`` refuses.

A template gives plain text, so that ``"order:{order_id}"`` and ``Lock("order:1")`` mean the same
lock. So ``1`` and ``"1"`` make the same key, and a value that contains the text between two
fields can produce the key of other values. For arguments from outside, use argument names: they
make a digest that includes types, and that no other values produce.
"""

from __future__ import annotations

import datetime as dt
import enum
import inspect
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

from django.conf import settings
from django.utils.crypto import salted_hmac

from ..text.names import DIGEST_LENGTH, REFUSED, fit, plain
from .arguments import Arguments
from .template_secrets import secret_in

__all__ = [
    "ALL_ARGUMENTS",
    "AllArguments",
    "Key",
    "KeySpec",
    "MissingValue",
    "compile_key",
    "keyed_digest",
    "keyed_digests",
    "template_of",
]


class AllArguments(enum.Enum):
    """Type of ``ALL_ARGUMENTS``."""

    ALL_ARGUMENTS = enum.auto()

    def __repr__(self) -> str:
        return self.name


ALL_ARGUMENTS: Final = AllArguments.ALL_ARGUMENTS
"""The key is a digest of all arguments."""

KeySpec: TypeAlias = str | Sequence[str] | Callable[..., str] | AllArguments
"""A template, names of arguments, a callable with the arguments, or ``ALL_ARGUMENTS``."""

PlainValue: TypeAlias = str | int | uuid.UUID | dt.date | enum.Enum
"""What a template renders: a value with one text that never changes."""


OF_USER = "request.user"
"""Fields that begin with this may have no value for an anonymous user."""


class MissingValue(TypeError):
    """A field of a key has no value in this call, so that many calls would share the key.

    Attributes:
        of_user: Whether it might have a value if the user were logged in.
        of_call: Whether the call has no such argument, so that the key itself is wrong.
        field: The field, such as ``request.user.pk``; empty if it is a callable that has no value.
    """

    def __init__(
        self, message: str, *, of_user: bool = True, of_call: bool = False, field: str = ""
    ) -> None:
        super().__init__(message)
        self.of_user, self.of_call, self.field = of_user, of_call, field


class Key(Protocol):
    """Makes the key of one call."""

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        """The key of a call with these arguments.

        Raises:
            TypeError: The arguments do not fit the signature, or one of them has no stable form.
        """


def template_of(key: Key) -> str:
    """The template that the key is made from, as it stands in the code; else empty.

    For a list of names, the text before the digest, and ``{digest}``.
    """
    return getattr(key, "template", "")


def compile_key(
    spec: KeySpec,
    signature: inspect.Signature,
    *,
    what: str,
    prefix: str = "",
    normalise: Callable[[Any], Any] = lambda value: value,
    of_list: Callable[..., Key] | None = None,
) -> Key:
    """Check a key against the signature of the function, and return the function that makes it.

    Args:
        signature: Without ``self`` if the caller does not pass it.
        what: Where the key is set, for messages: ``"lock_key of task shop.charge"``.
        prefix: The beginning of a digest; templates and callables are used without it.
        normalise: Converts an argument to the form that it has after a queue, so that both sides
            of the queue make the same digest; applied to arguments and defaults.
        of_list: Makes the key of a list of names, in place of ``Digest``.

    Raises:
        TypeError: It is not a template, list of names or callable.
        ValueError: The template is malformed or shows a secret, or a name is not that of an
            argument.
    """
    if isinstance(spec, str):
        return _Template(spec, Arguments(signature, what))
    if isinstance(spec, AllArguments):
        # Loaded here and below, because most keys are templates.
        from .digests import Digest

        return Digest(None, Arguments(signature, what), prefix, normalise)
    if callable(spec):
        return _Called(spec, what)
    if isinstance(spec, Sequence) and all(isinstance(name, str) for name in spec):
        from .digests import Digest

        return (of_list or Digest)(spec, Arguments(signature, what), prefix, normalise)
    raise TypeError(
        f"{what} is {spec!r}; it takes a template such as 'order:{{order_id}}', a list of "
        "argument names, or a callable"
    )


def keyed_digest(value: PlainValue | None) -> str:
    """A digest of a secret, for the name of a lock: ``f"cart:{keyed_digest(session_key)}"``.

    Names are shown to operators, in logs and in traces. Without ``SECRET_KEY``, nobody can
    compute the value from its digest, or check a guess. Every process with the same
    ``SECRET_KEY`` makes the same digest; a new ``SECRET_KEY`` gives new digests, so the locks get
    new names, and the records new keys.

    Args:
        value: A ``str``, ``int``, ``UUID``, ``date``, ``datetime`` or ``Enum``. As in a template,
            ``1`` and ``"1"`` give the same digest.

    Returns:
        32 hexadecimal digits, which are 128 bits.

    Raises:
        TypeError: The value is ``None``, empty or of another type. If the value of the key of a
            view is ``None`` or empty, an anonymous visitor is sent to the login page.
        ImproperlyConfigured: ``SECRET_KEY`` is empty.
    """
    plain = _without_enum(value)
    if plain is None or plain == "":
        raise MissingValue(
            f"keyed_digest() got {plain!r}: everybody without a value would share this key"
        )
    if not _is_plain(plain):
        # Without the value, because this may be logged.
        raise TypeError(
            f"keyed_digest() got a value of type {type(plain).__name__}; it takes str, int, UUID, "
            "date, datetime and Enum"
        )
    return _under(settings.SECRET_KEY, _as_text(plain))


def keyed_digests(text: str) -> Sequence[str]:
    """The ``keyed_digest`` of a text under ``SECRET_KEY`` and each of ``SECRET_KEY_FALLBACKS``."""
    secrets = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return [_under(secret, text) for secret in secrets]


def _under(secret: str | bytes, text: str) -> str:
    value = text.encode("utf-8", "surrogatepass")
    made = salted_hmac("django_dlock.keyed_digest", value, secret, algorithm="sha256")
    return made.hexdigest()[:DIGEST_LENGTH]


def _without_enum(value: Any) -> Any:
    while isinstance(value, enum.Enum):
        value = value.value
    return value


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | uuid.UUID | dt.date) and not isinstance(value, bool)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return plain(value)
    return value.isoformat() if isinstance(value, dt.date) else str(value)


# -- templates -----------------------------------------------------------------------------


_FORMATTER = string.Formatter()
SHOWN = (
    "but names of locks and keys of records are shown to operators, in logs and in traces; use a "
    "callable that returns f'...:{keyed_digest(value)}'"
)


def root_of(field: str) -> str:
    """The argument to which a field belongs."""
    return re.split(r"[.\[]", field, maxsplit=1)[0]


def value_of(field: str, named: Mapping[str, Any], where: str) -> Any:
    """The value of a field, without its ``Enum``.

    Raises:
        MissingValue: It has none.
    """
    of_user = field.startswith(OF_USER)
    try:
        value, _ = _FORMATTER.get_field(field, (), named)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        text, of_call = f"{where} cannot be looked up: {error!r}", root_of(field) not in named
        if isinstance(error, AttributeError) and isinstance(error.obj, Mapping):
            # As it is for a task with ``pydantic=True``, whose models are made later.
            text += f"; it is a dict here: use {{{_indexed(field, error.name or '')}}}"
        raise MissingValue(text, of_user=of_user, of_call=of_call, field=field) from error
    value = _without_enum(value)
    if value is None or value == "":
        why = " (an anonymous user has no primary key)" if of_user else ""
        raise MissingValue(
            f"{where} is {value!r}{why}: everybody without a value would share this key. If you "
            "want that, use a callable",
            of_user=of_user,
            field=field,
        )
    return value


def _indexed(field: str, name: str) -> str:
    return re.sub(rf"\.{re.escape(name)}\b", f"[{name}]", field, count=1)


class _Template:
    """``"order:{order_id}"``, with attributes, indexes and format specs."""

    def __init__(self, template: str, arguments: Arguments) -> None:
        self.template, self.arguments = template, arguments
        # Literal text, field (``None`` at the end) and format spec.
        self.parts: list[tuple[str, str | None, str]] = []
        try:
            parsed = list(_FORMATTER.parse(template))
        except ValueError as error:
            raise self._malformed(str(error)) from None
        if not parsed:
            raise self._malformed("it is empty")
        for place, (literal, field, spec, conversion) in enumerate(parsed):
            if REFUSED.search(literal):
                raise self._malformed("control characters and lone surrogates are not allowed")
            if field is not None:
                self._check_field(field, spec or "", conversion)
                if place and not literal:
                    raise self._malformed(
                        f"there must be text between the field {field!r} and the one before it"
                    )
            self.parts.append((literal, field, spec or ""))
        if all(field is None for _, field, _ in self.parts):
            self._check_text("".join(literal for literal, _, _ in self.parts))

    def _malformed(self, why: str) -> ValueError:
        return ValueError(f"{self.arguments.what}: the template {self.template!r}: {why}")

    def _check_field(self, field: str, spec: str, conversion: str | None) -> None:
        name = root_of(field)
        if not name or name.isdigit():
            raise self._malformed(f"the field {{{field}}} has no name; use the name of an argument")
        if not name.isidentifier():
            raise self._malformed(f"the field {{{field}}} does not begin with an argument's name")
        if conversion:
            raise self._malformed(f"the conversion !{conversion} is not allowed")
        if "{" in spec:
            raise self._malformed(f"the format spec of {{{field}}} cannot contain a field")
        self.arguments.check(name, f"the template {self.template!r}")
        if secret := secret_in(field):
            raise self._malformed(f"the field {{{field}}} is {secret}, {SHOWN}")

    def _check_text(self, text: str) -> None:
        for name in self.arguments.names:
            # With doubled braces, or from another language of templates.
            if f"{{{name}}}" in text or f"%({name})" in text:
                raise self._malformed(
                    f"it is the same for all calls; for the value of {name}, write {{{name}}}"
                )

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        bound = self.arguments.bind(args, kwargs)
        bound.apply_defaults()
        named = self.arguments.named(bound)
        texts = []
        for literal, field, spec in self.parts:
            texts.append(literal)
            if field is not None:
                texts.append(self._render(field, spec, named))
        return fit("".join(texts))

    def _render(self, field: str, spec: str, named: Mapping[str, Any]) -> str:
        where = f"{self.arguments.what}: the field {{{field}}} of {self.template!r}"
        value = value_of(field, named, where)
        if not _is_plain(value):
            # Without the value, which may contain all headers, and may be logged.
            raise TypeError(
                f"{where} is of type {type(value).__name__}; a template renders str, "
                "int, UUID, date, datetime and Enum. Use an attribute of it, or a callable"
            )
        if not spec:
            return _as_text(value)
        try:
            return format(value, spec)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise TypeError(f"{where} has a value of type {kind}: {error}") from error


# -- callables -----------------------------------------------------------------------------


class _Called:
    """A key that the user's function makes from the arguments, passed as in the call."""

    def __init__(self, function: Callable[..., object], what: str) -> None:
        if inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{what} is the coroutine function {function!r}; it must be a plain function"
            )
        self.function, self.what = function, what

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        try:
            key = self.function(*args, **kwargs)
        except TypeError as error:
            if _takes(self.function, args, kwargs):
                raise
            text = f"{self.what}: {self.function!r} does not take the arguments of this call"
            raise TypeError(f"{text}: {error}") from error
        if not isinstance(key, str) or not key:
            missing = key is None or key == ""
            got = repr(key) if missing else f"a value of type {type(key).__name__}"
            kind = MissingValue if missing else TypeError
            raise kind(f"{self.what}: {self.function!r} returned {got}, not a non-empty string")
        if "{" in key:
            from ..text.mistakes import warn_of_argument

            warn_of_argument(key, self.function, self.what)
        return fit(key)


def _takes(function: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments fit; true if the function does not tell its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
