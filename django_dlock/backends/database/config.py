"""The settings of the database backend, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..base import AliasOptions, BackendOptions, Problem
from ..shared.databases import vendor_or_problem
from ..shared.options import duration, option, or_none, switch, text, whole


@dataclass(frozen=True, kw_only=True)
class DatabaseOptions(BackendOptions):
    """The options of the backend."""

    connects_by = ()
    connection = "OPTIONS['database'] names an alias of DATABASES."

    database: str | None = option(
        or_none(text()), "the alias in DATABASES that has the leases", None, check_id="E006"
    )
    # One is for renewals, and one for calls that end a lease.
    connections: int = option(whole(at_least=3), "the most connections of a process", 4)
    poll_interval: float = option(
        duration(0.01, 10.0), "the longest pause between two polls of a waiter", 0.5
    )
    proof: bool = option(switch(), "whether the end of a holder's session proves its death", False)

    def check(self, alias: AliasOptions) -> Iterator[Problem]:
        place = f"DLOCKS[{alias.alias!r}]['OPTIONS']"
        found = vendor_or_problem(place, self.database)
        if isinstance(found, Problem):
            yield found
        elif self.proof and found not in ("", "postgresql"):
            named = self.database or "default"
            message = f"{place}['proof'] is True, but DATABASES[{named!r}] is {found!r}."
            yield Problem(self.check_id, message, "Only PostgreSQL supports it; remove it.")
