"""``locked``: a function that runs under a lock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured

from . import conf
from .core.options import Default, IfUnavailable, Seconds
from .core.unfinished import refuse_unfinished
from .handler import locks
from .keys import KeySpec, compile_key, template_of
from .lock import Lock, of_template

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CommonKeywords", "LockKeywords", "check_options", "full_name", "locked"]

CURE = (
    "the lock would be released before that. Put @locked directly on the function that does the "
    "work, below other decorators, or use a Lock inside it"
)

P = ParamSpec("P")
R = TypeVar("R")


class CommonKeywords(TypedDict, total=False):
    """The options of ``Lock`` except ``wait`` and ``if_unavailable``, which views take too."""

    ttl: Seconds | None
    renew: bool
    max_hold: Seconds | Default
    min_hold: Seconds | None
    reentrant: bool
    bound: bool
    using: str
    metadata: Mapping[str, Any] | None
    on_lost: Callable[[Lock, str], object] | None
    hold_until: Literal["release", "commit"]


class LockKeywords(CommonKeywords, total=False):
    """The options of ``Lock``."""

    wait: Seconds | Default | None
    if_unavailable: IfUnavailable | Default


def locked(
    key: KeySpec, **options: Unpack[LockKeywords]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run each call of a function, sync or async, under the lock that ``key`` names.

    Every call makes a new ``Lock``.

    Args:
        key: A template over the arguments, including defaults (``"rebuild:{account_id}"``, in a
            method also ``"{self.pk}"``); or a list of argument names, from which a digest is
            made; or a callable with the function's arguments.
        options: The options of ``Lock``.

    Raises:
        TypeError, ValueError: At decoration: an option or the key is wrong. In a call: an
            argument has no stable form.
        LockNotAcquired: In a call: someone else held the lock for longer than ``wait``, or the
            backend did not answer and ``if_unavailable`` is ``"skip"``.
        AlreadyHeld: In a call: the caller itself holds the name, and not both locks have
            ``reentrant=True``; with ``wait=0``, ``LockNotAcquired``.
        LeaseLost: After a call: the function ended normally, but its lease was lost.
        TypeError: After a call: the function returned what has not run yet: a coroutine, a task, a
            generator. It is closed or cancelled.
        BackendUnavailable: In a call: the lock's backend did not answer.
    """
    check_options(options)

    # ``given`` is missing or not a function if the decorator was written without its key.
    def decorate(given: Any = None) -> Callable[P, R]:
        _refuse_unlockable(given)
        function: Callable[P, R] = given
        name = full_name(function)
        what = f"@locked on {name}: the function"

        def lock(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
            return of_template(Lock(make_key(args, kwargs), **options), template_of(make_key))

        make_key = compile_key(
            key, inspect.signature(function), what=f"The key of @locked on {name}", prefix=name
        )
        if iscoroutinefunction(function):
            if options.get("hold_until") == "commit":
                raise ValueError(
                    f"@locked on {name}: hold_until='commit' follows the transaction of a "
                    "thread; a coroutine has none"
                )
            body = cast("Callable[P, Awaitable[Any]]", function)

            async def awaits(*args: P.args, **kwargs: P.kwargs) -> Any:
                async with lock(args, kwargs):
                    result = await body(*args, **kwargs)
                    refuse_unfinished(result, what, CURE)
                    return result

            return cast("Callable[P, R]", functools.wraps(function)(awaits))

        @functools.wraps(function)
        def calls(*args: P.args, **kwargs: P.kwargs) -> R:
            with lock(args, kwargs):
                result = function(*args, **kwargs)
                refuse_unfinished(result, what, CURE)
                return result

        return calls

    return decorate


def check_options(options: LockKeywords) -> None:
    """Refuse wrong options of ``Lock`` before there is a name to lock; does no I/O.

    Raises:
        TypeError, ValueError: The message names the option.
        InvalidLockBackend: ``using`` is not an alias.
    """
    using = options.get("using")
    try:
        ready = not conf.problems()
        if ready and (using is None or using in conf.aliases()):
            # Builds the backend, which may find more errors in the settings.
            locks[using or conf.DEFAULT_ALIAS]
    except ImproperlyConfigured:
        # The module may be imported without settings.
        ready = False
    if ready:
        Lock("options", **options)
    else:
        # Values cannot be checked without valid settings of the alias. A system check reports what
        # is wrong with those. It imports this module, so it could not run if this raised.
        known = inspect.signature(Lock.__init__).parameters
        if unknown := [name for name in options if name not in known]:
            from .text.mistakes import unknown_option

            raise unknown_option(known, *unknown)


def full_name(function: Callable[..., Any]) -> str:
    """Module and qualified name; the same in every process."""
    # A callable object has no name, so use that of its class.
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def _refuse_unlockable(function: Any) -> None:
    if isinstance(function, classmethod | staticmethod):
        raise TypeError(
            f"Put @locked below @{type(function).__name__}, not above it, on "
            f"{full_name(function.__func__)}"
        )
    if (
        isinstance(function, type)
        or not callable(function)
        or not hasattr(function, "__qualname__")
    ):
        hint = "" if callable(function) else "; it needs a key first: @locked('report:{day}')"
        raise TypeError(f"@locked takes a function or method, not {function!r}{hint}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"@locked on {full_name(function)}: calling a generator function does not run its "
            "body yet, so the lock would be released before the first step. Use a Lock inside it"
        )
