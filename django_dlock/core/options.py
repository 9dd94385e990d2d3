"""What a ``Lock`` was asked for, validated once."""

from __future__ import annotations

import datetime as dt
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

from .. import conf
from ..backends.base import BaseLockBackend
from ..lease import HOLDING, OWNER_PART


class Default:
    """Marks an option that follows the alias's setting."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default()

Seconds: TypeAlias = float | dt.timedelta
IfUnavailable: TypeAlias = Literal["raise", "local", "skip"]


class LockOptions:
    """What a ``Lock`` was asked for, checked against its alias.

    All durations are float seconds; ``wait`` of ``None`` waits for ever.

    Attributes:
        hold_until: ``"transaction"`` is ``"commit"`` for tasks and views: where a transaction that
            is managed by hand is their own matter, and not refused.
        template: From which the name was made, as it stands in the code; empty if it was made in
            another way.

    Raises:
        TypeError, ValueError: The message names the option, what was given and what is allowed.
    """

    __slots__ = (
        *("hold_until", "max_hold", "metadata", "metadata_json", "min_hold"),
        *("if_unavailable", "on_lost", "reentrant", "renew", "template", "ttl", "wait"),
    )

    def __init__(  # noqa: PLR0917 - keywords would cost a tenth of a lock's construction
        self,
        backend: BaseLockBackend,
        ttl: Seconds | None,
        wait: Seconds | Default | None,
        renew: bool,
        max_hold: Seconds | Default,
        min_hold: Seconds | None,
        reentrant: bool,
        metadata: Mapping[str, Any] | None,
        on_lost: Callable[[Any, str], object] | None,
        hold_until: Literal["release", "commit", "transaction"],
        if_unavailable: IfUnavailable | Default = DEFAULT,
    ) -> None:
        alias = backend.options
        if hold_until not in ("release", "commit", "transaction"):
            raise ValueError(f"hold_until is {hold_until!r}; it takes 'release' or 'commit'")
        unavailable = alias.if_unavailable
        if not isinstance(if_unavailable, Default):
            unavailable = if_unavailable
            if unavailable not in conf.IF_UNAVAILABLE:
                allowed = list(conf.IF_UNAVAILABLE)
                raise ValueError(f"if_unavailable is {unavailable!r}; it takes one of {allowed}")
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost is {on_lost!r}; it takes a callable (lock, reason)")
        if on_lost is not None and is_async(on_lost):
            raise TypeError(
                f"on_lost is {on_lost!r}, a coroutine function; it is called on a thread, where "
                "nobody awaits it. Use a function, and loop.call_soon_threadsafe() in it"
            )
        if min_hold:
            backend.require("min_hold", "min_hold")
        self.ttl = alias.ttl if ttl is None else lease_ttl(backend, ttl, renewed=renew)
        self.wait = alias.wait if isinstance(wait, Default) else _patience(wait)
        self.max_hold = alias.max_hold
        if not isinstance(max_hold, Default):
            self.max_hold = conf.seconds(max_hold, what="max_hold", minimum=0.1)
        self.min_hold = 0.0 if min_hold is None else conf.seconds(min_hold, what="min_hold")
        facts = _checked_metadata(metadata) if metadata else _NO_METADATA
        self.metadata, self.metadata_json = facts
        self.renew, self.reentrant = renew, reentrant
        self.on_lost, self.hold_until = on_lost, hold_until
        self.if_unavailable, self.template = unavailable, ""


def is_async(function: Callable[..., object]) -> bool:
    """Whether a call of it returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def lease_ttl(backend: BaseLockBackend, ttl: Seconds, *, renewed: bool) -> float:
    """A TTL in seconds, long enough for the alias.

    Raises:
        TypeError, ValueError: The message says what is allowed, and where it is set.
    """
    alias = backend.alias
    number = conf.seconds(ttl, what="ttl", minimum=0.1)
    if renewed and not conf.can_be_renewed(number, backend.command_timeout):
        raise ValueError(
            f"ttl is {number:g} s, but a renewed lease needs at least 3 times the "
            f"command_timeout of alias {alias!r}, {3 * backend.command_timeout:g} s: raise ttl, "
            f"lower DLOCKS[{alias!r}]['OPTIONS']['command_timeout'], or set renew=False"
        )
    if number > backend.max_ttl:
        raise ValueError(
            f"ttl is {number:g} s, but alias {alias!r} grants at most {backend.max_ttl:g} s: "
            f"lower ttl, or raise DLOCKS[{alias!r}]['OPTIONS']['max_ttl']"
        )
    return number


def _patience(wait: Seconds | None) -> float | None:
    return None if wait is None else conf.seconds(wait, what="wait")


MOST_METADATA = 4096
"""Characters of metadata as JSON. A database stores those of all waiters in one row, and each of
them reads it again and again."""
OURS, LONGEST_OF_OURS = ("path", "task_id", "task_name", "user"), 512
"""Facts that the package itself adds, which do not count up to this length: a visitor chooses the
path, and must not make a lock fail."""

_NO_METADATA: tuple[Mapping[str, Any], str] = ({}, "{}")


def _checked_metadata(metadata: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The facts, and their JSON form."""
    try:
        facts = dict(metadata)
        text = json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metadata is {metadata!r}; it takes a dict that can be written as JSON: {error}"
        ) from error
    if len(text) > MOST_METADATA:
        counts = {key: value for key, value in facts.items() if not _is_ours(key, value)}
        size = len(json.dumps(counts))
        if size > MOST_METADATA:
            raise ValueError(
                f"metadata has {size} characters as JSON; it takes at most {MOST_METADATA}, "
                "because it is stored with the lease and with every waiter: store more elsewhere, "
                "and put its key here"
            )
    return facts, text


def _is_ours(key: Any, value: object) -> bool:
    return key in OURS and isinstance(value, str) and len(value) <= LONGEST_OF_OURS


def with_holding(metadata_json: str, owners: Iterable[str]) -> str:
    """The metadata of a request whose caller holds the leases of these owners; see ``HOLDING``."""
    told = json.dumps(" ".join(owner[:OWNER_PART] for owner in owners))
    comma = "" if metadata_json == "{}" else ", "
    # Without reading the JSON again, because every nested acquire passes here.
    return f'{metadata_json[:-1]}{comma}"{HOLDING}": {told}}}'
