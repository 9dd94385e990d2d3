"""``manage.py list_locks``: list the locks that are held now."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...backends.base import BaseLockBackend
from ...lease import LeaseInfo, Waiter
from ...operators.blocking import LockId
from ...operators.inspection import AliasQuery
from ..base import LockCommand, as_errors
from ..deadlocks import Deadlocks
from ..output import encodable, encoding_of
from ..wanted import Wanted, unless_unanswered
from ..wrapping import width_of, wrapped

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
        self.choose_style(options)
        alias_query = self.alias_query(options["using"])
        self.not_negative("--older-than", options["older_than"])
        wanted = Wanted(
            options["name"], options["host"], options["task"], options["older_than"] or 0.0
        )
        infos = self.find(alias_query, wanted)
        waiters = self._waiters(alias_query, infos) if options["waiters"] else None
        if options["format"] == "json":
            self._print_json(alias_query, infos, waiters)
        else:
            nothing = unless_unanswered(wanted.nothing(), alias_query)
            self._print_text(alias_query, infos, waiters or {}, nothing)
        self.fail_on_problems(alias_query)

    def _waiters(
        self, alias_query: AliasQuery, infos: list[LeaseInfo]
    ) -> dict[LockId, list[Waiter]]:
        found: dict[LockId, list[Waiter]] = {}

        def read(backend: BaseLockBackend) -> None:
            for info in infos:
                if info.alias == backend.alias and info.waiting:
                    found[info.alias, info.name] = backend.waiters(info.name, limit=WAITERS)

        alias_query.ask(read)
        untold = {info.alias: None for info in infos if "waiting" in info.unknown}
        for alias in untold:
            self.stderr.write(f"Alias {alias!r} does not know who waits for its locks.")
        return found

    def _print_json(
        self,
        alias_query: AliasQuery,
        infos: list[LeaseInfo],
        waiters: dict[LockId, list[Waiter]] | None,
    ) -> None:
        listed = [info.as_dict() for info in infos]
        if waiters is not None:
            deadlocks = _deadlocks(alias_query, infos)
            for facts, info in zip(listed, infos, strict=True):
                lock = info.alias, info.name
                facts["waiters"] = [waiter.as_dict() for waiter in waiters.get(lock, ())]
                facts["deadlock"] = deadlocks.of(lock) if deadlocks else None
        self.print_json([*listed, *as_errors(alias_query.problems)])

    def _print_text(
        self,
        alias_query: AliasQuery,
        infos: list[LeaseInfo],
        waiters: dict[LockId, list[Waiter]],
        nothing: str,
    ) -> None:
        deadlocks = _deadlocks(alias_query, infos)
        if deadlocks:
            width, encoding = width_of(self.stdout), encoding_of(self.stdout)
            for text in deadlocks.texts():
                for line in wrapped(encodable(text, encoding), width, indent="  "):
                    self.stdout.write(self.style.ERROR(line))
        in_deadlock = deadlocks.locks if deadlocks else ()
        self.print_leases(infos, "text", nothing, in_deadlock=in_deadlock)
        self.print_waiters([waiter for those in waiters.values() for waiter in those])


def _deadlocks(alias_query: AliasQuery, infos: list[LeaseInfo]) -> Deadlocks | None:
    """``None`` if nobody waits for a lock, which needs no further question."""
    if not any(info.waiting for info in infos):
        return None
    return Deadlocks(alias_query, {(info.alias, info.name) for info in infos})
