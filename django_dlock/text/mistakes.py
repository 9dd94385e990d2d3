"""Mistakes in a call of ``Lock`` with a known cure: options of other libraries, a forgotten f.

Imported only when one is found.
"""

from __future__ import annotations

import difflib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping


class LockNameWarning(UserWarning):
    """The name of a lock probably lacks a value: it has a field such as ``{order_id}`` in it."""


CURES: Mapping[str, str] = {
    "timeout": "use ttl= for the time of the lease (timeout in redis-py), or wait= for the waiting "
    "time (timeout in threading)",
    "blocking_timeout": "use wait= (seconds; None waits for ever)",
    "blocking": "use wait=0, or acquire(blocking=False)",
    "sleep": "leave it out: a waiter is told when the lock is free, and does not poll",
    "retry_interval": "leave it out: a waiter is told when the lock is free, and does not poll",
    "expire": "use ttl=, and renew=False if the lease must end although its holder works",
    "auto_release_time": "use ttl= (seconds)",
    "auto_renewal": "leave it out: a lease is renewed unless renew=False",
    "id": "leave it out: each grant has an owner of its own; use metadata= to tell operators who "
    "holds the lock, and bound=False to release it elsewhere",
    "strict": "leave it out: only the owner can release a lease",
    "signal_expire": "leave it out",
    "thread_local": "use bound=False for a lock that another thread may release",
    "key": "the name is the first argument",
    "version": "leave it out: a lock has one name in all versions of a cache",
    "client": "use using= with an alias of DLOCKS, which says how to connect",
    "redis_client": "use using= with an alias of DLOCKS, which says how to connect",
    "shared": "leave it out: a lock has one holder",
}
"""Options of redis-py, django-redis, python-redis-lock, pottery, sherlock and django-pglock."""

# A colon and a number also stand in the tag of a Redis key, such as {order:42}.
_FIELD = re.compile(
    r"\{[^\W\d]\w*(?:\.[^\W\d]\w*|\[[^][{}]*\])*(?:![rsa])?(?::(?:0\d|[^{}]*%)[^{}]*)?\}"
)


def unknown_option(known: Iterable[str], name: str, *others: str) -> TypeError:
    """The error for options that ``Lock`` does not have; of several, for one with a cure.

    Args:
        known: The options that it has.
    """
    for option in (name, *others):
        if option in CURES:
            return TypeError(f"Lock() takes no {option}: {CURES[option]}")
    near = difflib.get_close_matches(name, [*known], 1)
    meant = f". Did you mean {near[0]!r}?" if near else ""
    return TypeError(f"Lock() got an unexpected keyword argument {name!r}{meant}")


def warn_of_field(name: str) -> None:
    """Warn if the name of a lock has a field, as in a string without its ``f``.

    Called by ``Lock.__init__``. Names that the package has made, for instance by a template, are
    no mistake: there, braces are values, or were doubled on purpose.
    """
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back
    module = caller.f_globals.get("__name__", "") if caller else ""
    package = __name__.partition(".")[0]
    # A frame that refers to itself would live until the next collection of garbage.
    del frame, caller
    if module.startswith(f"{package}.") or not _FIELD.search(name):
        return
    # Always the same text: Python remembers each that it has shown, and names may be endless.
    text = (
        "The name of this lock has a field in braces, such as {order_id}. If the f before the "
        'string is missing, all calls share one lock: write Lock(f"order:{order_id}"). If the '
        "braces are meant, ignore LockNameWarning here"
    )
    warnings.warn(text, LockNameWarning, stacklevel=3)


def warn_of_argument(key: str, function: Callable[..., object], what: str) -> None:
    """Warn if a callable has returned the name of an argument in place of its value."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        # Not every callable tells its signature.
        return
    found = next((name for name in names if f"{{{name}}}" in key), None)
    if found is not None:
        text = (
            f"{what}: the callable returned the text {{{found}}} in place of the value of "
            f"{found}. If the f before a string is missing, all calls share one lock"
        )
        warnings.warn(text, LockNameWarning, stacklevel=3)
