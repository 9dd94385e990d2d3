"""Names on a ``LockedTask`` that are no options of it: misspelt, of ``Lock``, or of other packages.

They would have no effect, so they are refused. A name that may be the user's own is accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

PREFIXES = ("lock_", "idempotency_", "if_", "unique_")

ONLY_OF_LOCK: Mapping[str, str] = {
    **{option: f"use lock_{option}" for option in ("ttl", "wait", "max_hold", "min_hold")},
    "on_lost": "use if_lost",
    "renew": "the lock of a task is always renewed",
    "reentrant": "a task takes no such option",
    "hold_until": "the lock of a task is held until its transaction has ended",
}
"""Arguments of ``Lock`` that have no effect on a task, and what to do instead."""

OF_OTHERS: Mapping[str, str] = {
    # celery-once
    "once": "use unique_until='done' (or 'start' for unlock_before_run), lock_key for its keys, "
    "and unique_ttl for its timeout",
    "unlock_before_run": "use unique_until='start'",
    # celery-singleton
    "unique_on": "use unique_until='done' and lock_key",
    "lock_expiry": "use unique_ttl",
    "raise_on_duplicate": "delay() returns the result of the pending task; compare its id",
    # celery-unique, jobtastic
    "unique_key": "use unique_until='done' and lock_key",
    "significant_kwargs": "use lock_key",
    "herd_avoidance_timeout": "use unique_ttl",
}
"""Options that hardly anybody has as an attribute of a task for another purpose."""

COMMON: Mapping[str, str] = {
    "unique": "use unique_until='done', or 'start'",
    "singleton": "use unique_until='done', or lock_key",
    "key": "use lock_key, or idempotency_key for work that may be done once only",
    "keys": "use lock_key",
    "lock": "use lock_key",
    "idempotency": "use idempotency_key",
    "idempotent": "use idempotency_key",
    "timeout": "use lock_wait to wait for the lock, unique_ttl for the time in which duplicates "
    "are dropped, or time_limit for the body",
    "blocking": "use if_contended='wait'",
    "blocking_timeout": "use if_contended='wait' and lock_wait",
    "lock_name": "use lock_key",
    "lock_id": "use lock_key",
    "lock_timeout": "use lock_ttl for the time of the lease, or lock_wait to wait for the lock",
    "lock_expire": "use lock_ttl",
}
"""Options whose names a task may also have for its own attributes."""


def _replacement_of(option: str, value: Any, *, decorated: bool) -> str | None:
    """What to use instead of an option that has no effect; ``None`` if it may be the user's own.

    Args:
        decorated: Whether it was given to the decorator; in the body of a class, a common name
            may be an attribute of the user's own. There, a check warns of some (``W121``).
    """
    if option == "once" and not isinstance(value, Mapping):
        return None
    if option == "key" and not _may_be_key(value):
        return None
    if option == "idempotent" and not (value is True or _may_be_key(value)):
        return None
    if option in OF_OTHERS:
        return OF_OTHERS[option]
    return COMMON.get(option) if decorated or option.startswith("lock_") else None


def _may_be_key(value: object) -> bool:
    return isinstance(value, str | list | tuple) or callable(value)


def refuse_unknown(task: type[Any], base: type[Any], what: Callable[[str], str]) -> None:
    """Refuse options such as ``lock_tll``, ``atomik`` or ``unique_on``, which have no effect.

    Args:
        base: The class whose annotations are the options.
        what: Names an option of the task in messages.

    Raises:
        ValueError: The message says which option to use instead.
    """
    # Not with hasattr(): reading Task.app would bind the base class to an app.
    known, options = dir(base), list(base.__annotations__)
    for kind in task.__mro__[: task.__mro__.index(base)]:
        # A callable in a class body is a method; one that the decorator was given is not.
        decorated = "_decorated" in vars(kind)
        for option, value in vars(kind).items():
            if option.startswith(("_", "is_")) or option in known:
                continue
            # Asks the type, because a lazy object would be evaluated now.
            is_method = callable(value) or hasattr(type(value), "__get__")
            if is_method and not decorated:
                continue
            if hint := _hint_for(option, value, options, decorated=decorated):
                raise ValueError(
                    f"{what(option)} is not an option of LockedTask; {hint} (see 'LockedTask' in "
                    "the documentation; if the attribute is your own, rename it)"
                )


def _hint_for(option: str, value: Any, known: list[str], *, decorated: bool) -> str:
    """What to do about an option that has no effect; empty if it may be the user's own."""
    if other := _replacement_of(option, value, decorated=decorated):
        return other
    ours = option.startswith(PREFIXES)
    of_lock = ONLY_OF_LOCK.get(option.removeprefix("lock_"))
    # In a class body, ``ttl`` may be an attribute of the user's own; there W121 warns.
    if of_lock and (ours or decorated):
        return f"it is one of Lock: {of_lock}"
    # Other names may be the user's: only a letter or two may differ, and not the first.
    # For instance, connection_timeout and block_key are accepted.
    cutoff = 0.6 if ours else 1 - 1.5 / max(len(option), 8)
    near = difflib.get_close_matches(option, known, 1, cutoff)
    if near and (ours or near[0][0] == option[0]):
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}" if ours else ""
