"""``manage.py list_locks``: list the locks that are held now."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...backends.base import BaseLockBackend
from ...inspection import AliasQuery
from ...lease import LeaseInfo, Waiter
from ..base import LockCommand, as_errors
from ..wanted import Wanted

WAITERS = 100
"""Waiters of each lock that ``--waiters`` lists."""


class Command(LockCommand):
    help = "List the locks that are held now, by whom, and how long each lease has left."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than", type=float, metavar="SECONDS", help="Only locks held for this long."
        )
        parser.add_argument(
            "--waiters",
            action="store_true",
            help=f"Also list who waits for each lock, at most the first {WAITERS} of each.",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        alias_query = self.alias_query(options["using"])
        self.not_negative("--older-than", options["older_than"])
        wanted = Wanted(
            options["name"], options["host"], options["task"], options["older_than"] or 0.0
        )
        infos = self.find(alias_query, wanted)
        nothing = "No answer." if alias_query.problems else wanted.nothing()
        if options["waiters"]:
            self._print_with_waiters(alias_query, infos, options["format"], nothing)
        else:
            self.print_leases(infos, options["format"], nothing, as_errors(alias_query.problems))
        self.fail_on_problems(alias_query)

    def _print_with_waiters(
        self, alias_query: AliasQuery, infos: list[LeaseInfo], output_format: str, nothing: str
    ) -> None:
        found: dict[tuple[str, str], list[Waiter]] = {}

        def read(backend: BaseLockBackend) -> None:
            for info in infos:
                if info.alias == backend.alias and info.waiting:
                    found[info.alias, info.name] = backend.waiters(info.name, limit=WAITERS)

        alias_query.ask(read)
        untold = {info.alias: None for info in infos if "waiting" in info.unknown}
        for alias in untold:
            self.stderr.write(f"Alias {alias!r} does not know who waits for its locks.")
        if output_format == "json":
            waiters = (found.get((info.alias, info.name), []) for info in infos)
            listed = [
                {**info.as_dict(), "waiters": [waiter.as_dict() for waiter in those]}
                for info, those in zip(infos, waiters, strict=True)
            ]
            self.print_json([*listed, *as_errors(alias_query.problems)])
            return
        self.print_leases(infos, output_format, nothing)
        self.print_waiters([waiter for those in found.values() for waiter in those])
