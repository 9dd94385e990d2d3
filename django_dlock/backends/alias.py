"""What a backend gets from its alias in ``DLOCKS``, and how it reports what is wrong there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ..redaction import redacted

__all__ = ["AliasOptions", "Fact", "Problem", "StoreSwitch"]


class Problem(NamedTuple):
    """An error in the settings, reported by a system check and raised at first use.

    Attributes:
        id: The id of the check. Those of this package are short (``E006``); a backend of another
            package gives its own in full (``shop.E001``).
    """

    id: str
    message: str
    hint: str


class Fact(NamedTuple):
    """What a store reports about itself, such as its version; ``diagnose_locks`` shows it.

    Attributes:
        topic: What it is about, in one word: ``server``, ``persistence``.
        text: One line for an operator.
        hint: What to do, if the fact puts locks at risk; else empty.
    """

    topic: str
    text: str
    hint: str = ""


class StoreSwitch(NamedTuple):
    """An alias keeps its locks in another store from now on.

    Attributes:
        active, previous: Aliases of the stores.
        epoch: The number of the switch; the highest part of each fencing token.
        switched_by: Who made it; empty if a process did.
    """

    alias: str
    active: str
    previous: str
    epoch: int
    reason: str
    switched_by: str


@dataclass(frozen=True, repr=False)
class AliasOptions:
    """One validated entry of ``DLOCKS``; a backend is built from nothing else.

    Its ``repr`` hides passwords.

    Attributes:
        cache: Alias in ``CACHES`` whose parameters are used to connect, or ``None``.
        location: Where to connect, such as a URL, or several of them.
        ttl, wait, max_hold: Seconds; a ``wait`` of ``None`` waits for ever.
        stream_max_hold: Seconds for which a view's lock is held while its answer is streamed.
        command_timeout: Seconds that one command may take.
        outage_patience: Seconds for which an acquire that may wait keeps trying while the
            backend does not answer.
        if_unavailable: What a ``Lock`` does after that: ``raise``, ``local`` or ``skip``.
        options: ``OPTIONS`` without ``command_timeout`` and ``outage_patience``.
    """

    alias: str
    backend: str
    cache: str | None = None
    location: str | tuple[str, ...] | None = None
    key_prefix: str = "dlock"
    ttl: float = 30.0
    wait: float | None = 10.0
    max_hold: float = 86400.0
    stream_max_hold: float = 300.0
    command_timeout: float = 1.0
    outage_patience: float = 5.0
    if_unavailable: str = "raise"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = (f"{each.name}={redacted(getattr(self, each.name))}" for each in fields(self))
        return f"{type(self).__qualname__}({', '.join(values)})"
