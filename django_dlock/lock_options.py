"""What a ``Lock`` was asked for, validated once."""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from . import conf
from .backends.base import BaseLockBackend

__all__ = ["DEFAULT", "Default", "LockOptions", "Seconds", "default_options", "lease_ttl"]


class Default:
    """Marks an option that follows the alias's setting."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default()

Seconds: TypeAlias = float | dt.timedelta


# Not frozen, which makes its construction three times as dear; nobody changes one.
@dataclass(slots=True, eq=False)
class LockOptions:
    """All durations are float seconds; ``wait`` of ``None`` waits for ever."""

    ttl: float
    wait: float | None
    renew: bool
    max_hold: float
    min_hold: float
    reentrant: bool
    metadata: Mapping[str, Any]
    metadata_json: str
    on_lost: Callable[[Any, str], object] | None
    hold_until: Literal["release", "commit"]

    @classmethod
    def read(  # noqa: PLR0917 - keywords would cost a tenth of a lock's construction
        cls,
        backend: BaseLockBackend,
        ttl: Seconds | None,
        wait: Seconds | Default | None,
        renew: bool,
        max_hold: Seconds | Default,
        min_hold: Seconds | None,
        reentrant: bool,
        metadata: Mapping[str, Any] | None,
        on_lost: Callable[[Any, str], object] | None,
        hold_until: Literal["release", "commit"],
    ) -> LockOptions:
        """Check what was given against the alias.

        Raises:
            TypeError, ValueError: Naming the option, what was given and what is allowed.
        """
        alias = backend.options
        if hold_until not in ("release", "commit"):
            raise ValueError(f"hold_until is {hold_until!r}; it takes 'release' or 'commit'")
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost is {on_lost!r}; it takes a callable (lock, reason)")
        facts, encoded = _checked_metadata(metadata) if metadata else _NO_METADATA
        return cls(
            alias.ttl if ttl is None else lease_ttl(backend, ttl, renewed=renew),
            alias.wait if isinstance(wait, Default) else _patience(wait),
            renew,
            alias.max_hold
            if isinstance(max_hold, Default)
            else conf.seconds(max_hold, what="max_hold", minimum=0.1),
            0.0 if min_hold is None else conf.seconds(min_hold, what="min_hold"),
            reentrant,
            facts,
            encoded,
            on_lost,
            hold_until,
        )


@functools.lru_cache(maxsize=16)
def default_options(backend: BaseLockBackend) -> LockOptions:
    """Those of all locks on a backend that ask for nothing."""
    return LockOptions.read(
        backend, None, DEFAULT, True, DEFAULT, None, False, None, None, "release"
    )


def lease_ttl(backend: BaseLockBackend, ttl: Seconds, *, renewed: bool) -> float:
    """A TTL in seconds, long enough for the alias.

    Raises:
        TypeError, ValueError: Saying what is allowed, and where it is set.
    """
    alias = backend.alias
    number = conf.seconds(ttl, what="ttl", minimum=0.1)
    shortest = 3 * backend.command_timeout
    if renewed and number < shortest:
        raise ValueError(
            f"ttl is {number:g} s, but a renewed lease needs at least 3 times the "
            f"command_timeout of alias {alias!r}, {shortest:g} s: raise ttl, lower "
            f"DLOCKS[{alias!r}]['OPTIONS']['command_timeout'], or say renew=False"
        )
    return number


def _patience(wait: Seconds | None) -> float | None:
    return None if wait is None else conf.seconds(wait, what="wait")


_NO_METADATA: tuple[Mapping[str, Any], str] = ({}, "{}")


def _checked_metadata(metadata: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The facts, and their JSON form."""
    try:
        facts = dict(metadata)
        return facts, json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metadata is {metadata!r}; it takes a dict that JSON can hold: {error}"
        ) from error
