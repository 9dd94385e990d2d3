"""The settings of fail-over, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...text.redaction import redacted
from ..base import AliasOptions, BackendOptions, Problem
from ..shared.databases import vendor_or_problem
from ..shared.options import Kind, duration, longest_ttl, option, or_none, text


def _view_ttl(alias: Any) -> Kind[float]:
    # A view is read again after a third of its time, and each read may take one command.
    least = max(1.0, round(3 * alias.command_timeout, 9))
    return duration(least, why="1, and 3 times the command_timeout")


@dataclass(frozen=True, kw_only=True)
class FailoverOptions(BackendOptions):
    """The options of the backend."""

    connects_by = ()
    connection = "Set it in the aliases that OPTIONS names."

    primary: str = option(text(), "the alias of DLOCKS that is active at first")
    standby: str = option(text(), "the alias of DLOCKS that replaces it")
    database: str | None = option(
        or_none(text()),
        "the alias in DATABASES that says which store is active",
        None,
        check_id="E006",
    )
    view_ttl: float = option(
        _view_ttl, "how long a process may rely on what it has read in that database", 5.0
    )
    max_ttl: float = longest_ttl()
    failover_after: float | None = option(
        or_none(duration(1)),
        "after the active store has answered nobody for this long, any process switches",
        15.0,
    )
    failback_after: float | None = option(
        or_none(duration(1)),
        "after the primary has answered for this long, any process switches back to it",
        None,
    )

    def check(self, alias: AliasOptions) -> Iterator[Problem]:
        place = f"DLOCKS[{alias.alias!r}]['OPTIONS']"
        if self.primary == self.standby:
            message = f"{place} names {redacted(self.primary)} as primary and as standby."
            yield Problem(self.check_id, message, "Name two aliases with different servers.")
        found = vendor_or_problem(place, self.database)
        if isinstance(found, Problem):
            yield found

    def other_than(self, alias: str) -> str:
        """The alias that is not active."""
        return self.standby if alias == self.primary else self.primary
