"""``manage.py list_locks``: list the locks that are held now."""

from __future__ import annotations

from typing import Any

from ..operator import LockCommand


class Command(LockCommand):
    help = "List the locks that are held now, by whom, and how long each lease has left."

    def handle(self, *args: Any, **options: Any) -> None:
        alias_query = self.alias_query(options["using"])
        infos = self.find(alias_query, options["name"])
        nothing = "No answer." if alias_query.problems else _nothing(options["name"])
        self.print_leases(infos, options["format"], nothing)
        self.fail_on_problems(alias_query)


def _nothing(pattern: str | None) -> str:
    if pattern is None:
        return "No lock is held."
    if "*" in pattern:
        return f"No held lock has a name that matches {pattern!r}."
    return (
        f"No held lock has the name {pattern!r}. --name needs the whole name; * matches "
        f"anything, as in --name '{pattern}*'."
    )
