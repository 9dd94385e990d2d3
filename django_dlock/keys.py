"""Lock names, and the keys that templates, argument names and callables make of a call.

Shared by ``locked``, ``locked_view`` and ``LockedTask``; knows neither requests nor tasks.

A template is plain text on purpose: ``"order:{order_id}"`` has to meet ``Lock("order:1")``. So
``1`` and ``"1"`` are one key there, and a string that itself holds the text between two fields
can imitate their border. Where arguments are not one's own, argument names are the better key:
they give a digest that is typed and cannot be imitated.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import hashlib
import inspect
import json
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

__all__ = [
    "ALL_ARGUMENTS",
    "AllArguments",
    "Key",
    "KeySpec",
    "check_name",
    "compile_key",
    "fingerprint",
    "fit",
]

MAX_NAME = 255
MAX_KEY = 200
"""A longer key ends in a digest, so that a prefix and a name of a user's own still fit."""

# Control characters break lists and logs; a lone surrogate cannot be encoded.
_REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_name(name: str) -> str:
    """The name itself, if it may name a lock.

    Raises:
        TypeError: Not a string.
        ValueError: Empty, longer than 255 characters, or with a control character or a lone
            surrogate.
    """
    if not isinstance(name, str):
        raise TypeError(f"A lock's name is a string, not {name!r}")
    if not 1 <= len(name) <= MAX_NAME:
        raise ValueError(
            f"A lock's name has 1 to {MAX_NAME} characters, not {len(name)}: {name[:80]!r}"
        )
    found = _REFUSED.search(name)
    if found is not None:
        raise ValueError(
            f"A lock's name has no control characters and no lone surrogates, "
            f"but {name!r} has {found.group()!r}"
        )
    return name


class AllArguments(enum.Enum):
    """Type of ``ALL_ARGUMENTS``."""

    ALL_ARGUMENTS = enum.auto()

    def __repr__(self) -> str:
        return self.name


ALL_ARGUMENTS: Final = AllArguments.ALL_ARGUMENTS
"""The key is a digest of all arguments."""

KeySpec: TypeAlias = str | Sequence[str] | Callable[..., str] | AllArguments
"""A template, names of arguments, a callable that gets the arguments, or ``ALL_ARGUMENTS``."""


class Key(Protocol):
    """Makes the key of one call."""

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        """The key of a call with these arguments.

        Raises:
            TypeError: The arguments do not fit the signature, or one of them has no stable form.
        """


def compile_key(
    spec: KeySpec,
    signature: inspect.Signature,
    *,
    what: str,
    prefix: str = "",
    normalise: Callable[[Any], Any] | None = None,
) -> Key:
    """Check a key against the signature of what it guards.

    Args:
        signature: Without ``self`` where the caller does not pass it.
        what: Where the key is set, for messages: ``"lock_key of task shop.charge"``.
        prefix: What a digest begins with; templates and callables are used as they stand.
        normalise: Gives an argument the form in which the other side of a queue will see it,
            so that a digest is the same on both; applied to arguments and to defaults.

    Raises:
        TypeError: No template, list of names or callable.
        ValueError: A malformed template, or a name that is no argument.
    """
    if isinstance(spec, str):
        return _Template(spec, _Arguments(signature, what))
    if isinstance(spec, AllArguments):
        return _Digest(None, _Arguments(signature, what), prefix, normalise)
    if callable(spec):
        return _Called(spec, what)
    if isinstance(spec, Sequence) and all(isinstance(name, str) for name in spec):
        return _Digest(spec, _Arguments(signature, what), prefix, normalise)
    raise TypeError(
        f"{what} is {spec!r}; it takes a template such as 'order:{{order_id}}', a list of "
        "argument names, or a callable"
    )


def fingerprint(arguments: Mapping[str, Any], *, what: str) -> str:
    """A versioned digest of named values: typed, whatever the order of names and of dicts.

    Lists and tuples are the same, as they are after JSON; an ``Enum`` is its value.

    Args:
        what: For messages.

    Raises:
        TypeError: A value has no stable form.
    """
    tagged = [[name, _tag_argument(name, arguments[name], what)] for name in sorted(arguments)]
    return f"v1:{_sha(json.dumps(tagged))}"


def _tag_argument(name: str, value: Any, what: str) -> Any:
    try:
        return _tag(value)
    except _Unstable as error:
        raise TypeError(
            f"{what}: the argument {name!r} holds {error.value!r}, which has no stable form: "
            "pass plain data instead (the primary key of a model instance), or make the key by "
            "a template or a callable"
        ) from None


def _sha(text: str) -> str:
    # 128 bits: no two keys meet by chance, and the name stays short.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def fit(key: str, longest: int = MAX_KEY) -> str:
    """The key as a lock's name: one that is too long or cannot be a name ends in a digest."""
    name = _REFUSED.sub("?", key)
    if name == key and len(key) <= longest:
        return key
    digest = _sha(key)
    return f"{name[: longest - len(digest) - 1]}~{digest}"


_BY_PLACE = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


class _Arguments:
    """The signature that a key is made over."""

    def __init__(self, signature: inspect.Signature, what: str) -> None:
        self.signature = signature
        self.what = what
        self.names = list(signature.parameters)
        kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
        self.rest = kinds.get(inspect.Parameter.VAR_KEYWORD)
        self._all_by_place = set(kinds) <= _BY_PLACE

    def check(self, name: str, where: str) -> None:
        """Refuse a name that no call can pass."""
        if name not in self.names and self.rest is None:
            known = ", ".join(self.names) or "none"
            raise ValueError(
                f"{self.what}: {where} names the argument {name!r}, which does not exist; "
                f"known arguments: {known}"
            )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.what}: {error}") from None

    def all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument of a call by its name, defaults included."""
        if self._all_by_place and not kwargs and len(args) == len(self.names):
            # What most tasks are called with; to bind it takes eight times as long.
            return dict(zip(self.names, args, strict=True))
        bound = self.bind(args, kwargs)
        bound.apply_defaults()
        return self.named(bound)

    def named(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Every argument by its name, those that ``**kwargs`` took in included."""
        if self.rest is None:
            return bound.arguments
        return {**bound.arguments.get(self.rest, {}), **bound.arguments}


# -- templates -----------------------------------------------------------------------------


class _Template:
    """``"order:{order_id}"``, with attributes, indexes and format specs."""

    def __init__(self, template: str, arguments: _Arguments) -> None:
        self.template, self.arguments = template, arguments
        self.formatter = string.Formatter()
        # Literal text, then field and format spec, or None at the end.
        self.parts: list[tuple[str, str | None, str]] = []
        try:
            parsed = list(self.formatter.parse(template))
        except ValueError as error:
            raise self._malformed(str(error)) from None
        if not parsed:
            raise self._malformed("it is empty")
        for place, (literal, field, spec, conversion) in enumerate(parsed):
            if _REFUSED.search(literal):
                raise self._malformed("control characters and lone surrogates are not allowed")
            if field is not None:
                self._check_field(field, spec or "", conversion)
                if place and not literal:
                    raise self._malformed(
                        f"nothing stands before the field {field!r} that tells it from the one "
                        "before"
                    )
            self.parts.append((literal, field, spec or ""))

    def _malformed(self, why: str) -> ValueError:
        return ValueError(f"{self.arguments.what}: the template {self.template!r}: {why}")

    def _check_field(self, field: str, spec: str, conversion: str | None) -> None:
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        if not name or name.isdigit():
            raise self._malformed(f"the field {{{field}}} has no name; fields go by argument name")
        if not name.isidentifier():
            raise self._malformed(f"the field {{{field}}} does not begin with an argument's name")
        if conversion:
            raise self._malformed(f"!{conversion} is not allowed: values are rendered as they are")
        if "{" in spec:
            raise self._malformed(f"the format spec of {{{field}}} cannot hold a field")
        self.arguments.check(name, f"the template {self.template!r}")

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        named = self.arguments.all(args, kwargs)
        texts = []
        for literal, field, spec in self.parts:
            texts.append(literal)
            if field is not None:
                texts.append(self._render(field, spec, named))
        return fit("".join(texts))

    def _render(self, field: str, spec: str, named: Mapping[str, Any]) -> str:
        where = f"{self.arguments.what}: the field {{{field}}} of {self.template!r}"
        try:
            value, _ = self.formatter.get_field(field, (), named)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise TypeError(f"{where} cannot be looked up: {error!r}") from error
        while isinstance(value, enum.Enum):
            value = value.value
        if value is None or value == "":
            raise TypeError(
                f"{where} is {value!r} (an anonymous user has no primary key): everybody without "
                "a value would share this key. Use a callable if that is meant"
            )
        if isinstance(value, bool) or not isinstance(value, str | int | uuid.UUID | dt.date):
            raise TypeError(
                f"{where} is {value!r} of type {type(value).__name__}; a template renders str, "
                "int, UUID, date, datetime and Enum. Name an attribute of it, or use a callable"
            )
        if not spec:
            return value.isoformat() if isinstance(value, dt.date) else str(value)
        try:
            return format(value, spec)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{where} is {value!r}: {error}") from error


# -- digests -------------------------------------------------------------------------------


class _Digest:
    """Of all arguments, or of those named; defaults are left out.

    So a new optional parameter changes no key while old and new code run side by side.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        arguments: _Arguments,
        prefix: str,
        normalise: Callable[[Any], Any] | None,
    ) -> None:
        if names is not None:
            if not names:
                raise ValueError(f"{arguments.what} is an empty list; it takes argument names")
            for name in names:
                arguments.check(name, f"the list {list(names)!r}")
        self.names, self.arguments = names, arguments
        self.prefix = f"{prefix}:" if prefix else ""
        self.normalise = normalise

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        bound = self.arguments.bind(args, kwargs)
        named: Mapping[str, Any] = bound.arguments
        if self.names is not None:
            flat = self.arguments.named(bound)
            named = {name: flat[name] for name in self.names if name in flat}
        given = {name: self._normal(value) for name, value in named.items()}
        relevant = {name: value for name, value in given.items() if not self._absent(name, value)}
        return fit(f"{self.prefix}{fingerprint(relevant, what=self.arguments.what)}")

    def _normal(self, value: Any) -> Any:
        return value if self.normalise is None else self.normalise(value)

    def _absent(self, name: str, value: Any) -> bool:
        """Whether leaving the argument out would have been the same."""
        parameter = self.arguments.signature.parameters.get(name)
        if parameter is None or parameter.default is parameter.empty:
            return False
        try:
            # Not the values themselves: for == 1 is True.
            return bool(_tag(value) == _tag(self._normal(parameter.default)))
        except _Unstable:
            # A default that has no stable form is nobody's value; an argument is told later.
            return False


class _Unstable(TypeError):
    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.value = value


def _moment(value: dt.datetime) -> str:
    # The same moment in another zone is the same argument.
    return (value if value.utcoffset() is None else value.astimezone(dt.timezone.utc)).isoformat()


_PLAIN: Sequence[tuple[type[Any] | tuple[type[Any], ...], str, Callable[[Any], str]]] = (
    (bool, "?", str),  # before int, of which it is one
    (str, "s", str),
    (int, "i", int.__repr__),
    (float, "f", float.__repr__),
    (decimal.Decimal, "d", str),
    (uuid.UUID, "u", str),
    (dt.datetime, "dt", _moment),  # before date, of which it is one
    ((dt.date, dt.time), "da", lambda value: value.isoformat()),
    (dt.timedelta, "td", lambda value: str(value // dt.timedelta(microseconds=1))),
    ((bytes, bytearray), "b", lambda value: value.hex()),
)
"""Types whose values have a stable form: type, mark, form."""


def _tag(value: Any) -> Any:
    """The value as JSON data in which every type has a mark of its own."""
    if value is None:
        return None
    if isinstance(value, enum.Enum):
        return _tag(value.value)
    for kind, mark, form in _PLAIN:
        if isinstance(value, kind):
            return [mark, form(value)]
    if isinstance(value, list | tuple):
        return ["l", [_tag(item) for item in value]]
    if isinstance(value, set | frozenset):
        return ["e", sorted((_tag(item) for item in value), key=json.dumps)]
    if isinstance(value, Mapping):
        items = ([_tag(key), _tag(item)] for key, item in value.items())
        return ["m", sorted(items, key=json.dumps)]
    # Anything else would have to be told by its repr, which may be a memory address.
    raise _Unstable(value)


# -- callables -----------------------------------------------------------------------------


class _Called:
    """Whatever a function makes of the arguments, passed on as the call passed them."""

    def __init__(self, function: Callable[..., object], what: str) -> None:
        if inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{what} is the coroutine function {function!r}; it must be a plain one"
            )
        self.function, self.what = function, what

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        key = self.function(*args, **kwargs)
        if not isinstance(key, str) or not key:
            raise TypeError(
                f"{self.what}: {self.function!r} gave {key!r}; it must give a string, not empty"
            )
        return fit(key)
