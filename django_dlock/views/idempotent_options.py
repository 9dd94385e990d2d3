"""What ``idempotent_view`` refuses at decoration: options that are wrong by themselves."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Literal

from django.db import connections

from .. import conf
from ..core.options import Default, Seconds

LONGEST_SCOPE = 255


def check_lock_options(if_unavailable: object, options: Mapping[str, Any]) -> None:
    """Refuse options of the lock that a request with a key cannot have."""
    if if_unavailable not in ("raise", 503):
        raise ValueError(
            f"if_unavailable is {if_unavailable!r}; @idempotent_view takes 'raise' or 503"
        )
    if "hold_until" in options or options.get("reentrant"):
        raise ValueError(
            "@idempotent_view always releases after its transaction, and its lock is that of one "
            "request: it takes neither hold_until nor reentrant"
        )


def check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it takes True or False")


def check_record_options(
    scope: object, ttl: dt.timedelta | float, using: str | None, replay_if: object
) -> dt.timedelta:
    """How long answers are kept, if the options of the record are right."""
    if replay_if is not None and not callable(replay_if):
        raise TypeError(
            f"replay_if is {replay_if!r}; it takes a callable with the view's arguments"
        )
    if not isinstance(scope, str) or len(scope) > LONGEST_SCOPE:
        raise TypeError(
            f"idempotency_scope is {scope!r}; it takes a string of at most "
            f"{LONGEST_SCOPE} characters"
        )
    seconds = conf.seconds(ttl, what="idempotency_ttl", above=True)
    if using is not None and using not in connections:
        known = ", ".join(map(repr, connections))
        raise ValueError(
            f"idempotency_using is {using!r}, which DATABASES does not define: {known}"
        )
    return dt.timedelta(seconds=seconds)


def patience_of(
    if_contended: Literal["reject", "wait"], wait: Seconds | Default | None
) -> Seconds | Default | None:
    """How long the lock waits for a request in progress, by ``if_contended`` and ``wait``."""
    if if_contended not in ("reject", "wait"):
        raise ValueError(f"if_contended is {if_contended!r}; it takes 'reject' or 'wait'")
    if if_contended == "wait":
        if wait == 0:
            raise ValueError(
                "if_contended='wait' needs a wait: seconds, or DEFAULT for the alias's WAIT"
            )
        return wait
    if not isinstance(wait, Default) and wait != 0:
        raise ValueError(
            f"wait is {wait!r}, but if_contended='reject' never waits; set if_contended='wait'"
        )
    return 0
