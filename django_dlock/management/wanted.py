"""Which locks a command is about: its patterns, and what it says if no lock matches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..lease import LeaseInfo, LeaseQuery
from ..operators.inspection import AliasQuery


@dataclass(frozen=True)
class Wanted:
    """Which locks a command is about.

    Attributes:
        name, host, task: Patterns, in which ``*`` matches anything; ``None`` for any. A lock that
            names no host or no task does not match a pattern for it, not even ``*``.
        older_than: Seconds.
    """

    name: str | None = None
    host: str | None = None
    task: str | None = None
    older_than: float = 0.0

    @property
    def has_patterns(self) -> bool:
        return (self.name, self.host, self.task) != (None, None, None)

    def nothing(self) -> str:
        """The text if no lock matches: what was looked for, and how patterns work."""
        if self == Wanted():
            return "No lock is held."
        if self == Wanted(self.name) and self.name is not None:
            if "*" in self.name:
                return f"No held lock has a name that matches {self.name!r}."
            return (
                f"No held lock has the name {self.name!r}. --name needs the whole name; * matches "
                f"anything, as in --name '{self.name}*'."
            )
        patterns = {"--name": self.name, "--host": self.host, "--task": self.task}
        given = {option: pattern for option, pattern in patterns.items() if pattern is not None}
        looked_for = [f"{option} {pattern!r}" for option, pattern in given.items()]
        if self.older_than:
            looked_for.append(f"--older-than {self.older_than:g}")
        text = f"No held lock matches {' and '.join(looked_for)}."
        if all("*" in pattern for pattern in given.values()):
            return text
        return f"{text} A pattern is for the whole name; * matches anything."

    def query(self) -> LeaseQuery:
        """Lets backends filter as far as they can, so that they send less."""
        parts = (self.name or "").split("*")
        return LeaseQuery(
            prefix=parts[0],
            contains=max(parts, key=len),
            host=(self.host or "").split("*")[0],
            task=(self.task or "").split("*")[0],
            older_than=self.older_than,
        )

    def matcher(self) -> Callable[[LeaseInfo], bool]:
        """Checks the rest, which ``query`` has left to this process."""
        name, host, task = map(_matching, (self.name, self.host, self.task))

        def matches(info: LeaseInfo) -> bool:
            on = info.process.host if info.process else ""
            of = info.metadata.get("task_name")
            return bool(name(info.name) and host(on) and task(of if isinstance(of, str) else ""))

        return matches


def _matching(pattern: str | None) -> Any:
    """A function that tests whether a name matches; only ``*`` is special."""
    if pattern is None:
        return lambda name: True
    parts = (re.escape(part) for part in pattern.split("*"))
    fullmatch = re.compile(".*".join(parts), re.DOTALL).fullmatch
    return lambda name: name and fullmatch(name)


def unless_unanswered(nothing: str, alias_query: AliasQuery) -> str:
    """The text that says that nothing was found, as far as the aliases have answered."""
    if not alias_query.problems:
        return nothing
    if len(alias_query.problems) == len(alias_query.aliases):
        return "No answer."
    return f"Of the aliases that answered: {nothing}"
