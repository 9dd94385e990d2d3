"""Base classes of the commands: the options, output and exit codes that they share.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections, router
from django.db.models import Model

from .. import clock
from ..database_errors import explained
from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..inspection import AliasQuery
from ..lease import LeaseInfo, Waiter
from ..models import IdempotencyRecord
from ..printable import printable
from .locked import WRONG_USAGE
from .screen import Progress
from .table import lease_table, waiter_table
from .wanted import Wanted

__all__ = [
    "FAILED",
    "AliasCommand",
    "LockCommand",
    "OperatorCommand",
    "PurgeCommand",
    "RecordCommand",
]

FAILED = 1


class OperatorCommand(BaseCommand):
    """A command for operators and for scripts."""

    # A failing system check must not prevent an operator from using the command.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Output (default: text)."
        )

    def wrong_usage(self, message: str) -> NoReturn:
        raise CommandError(message, returncode=WRONG_USAGE)

    def print_json(self, value: Any, *, indent: int | None = 2) -> None:
        """Print a value; with an indent of ``None``, in one line."""
        text = json.dumps(value, indent=indent, ensure_ascii=False)
        # Data in a lease may contain terminal escape sequences or lone surrogates, which cannot be
        # printed. They are always inside strings, where JSON can escape them.
        self.stdout.write(
            "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
        )


class RecordCommand(OperatorCommand):
    """A command about the table of a model in one database."""

    model: ClassVar[type[Model]] = IdempotencyRecord

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--using",
            metavar="DATABASE",
            help="The database of the table (default: the one that the routers choose).",
        )
        super().add_arguments(parser)

    def database(self, named: str | None) -> str:
        """The database to use; ends the command if it is not defined."""
        using = named or router.db_for_write(self.model)
        if using not in connections:
            self.wrong_usage(
                f"There is no database {using!r}; DATABASES defines {sorted(connections)}."
            )
        return using


class PurgeCommand(RecordCommand):
    """A command that deletes rows of one table in batches."""

    rows: ClassVar[str]
    """What is deleted, in the plural."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--batch-size",
            type=int,
            default=1000,
            metavar="N",
            help="Rows per transaction (default: 1000).",
        )
        super().add_arguments(parser)

    def batches(self, *, batch_size: int, using: str, **options: Any) -> Iterator[int]:
        """Delete in batches; yields the number of rows of each batch."""
        raise NotImplementedError

    def handle(self, *args: Any, **options: Any) -> None:
        batch_size, deleted = options["batch_size"], 0
        if batch_size < 1:
            self.wrong_usage(f"--batch-size is {batch_size}; it must be at least 1.")
        options["using"] = self.database(options["using"])
        try:
            with Progress(self.stderr, quiet=options["verbosity"] == 0) as progress:
                for count in self.batches(**options):
                    deleted += count
                    progress.show(f"{deleted} {self.rows} deleted so far")
        except Error as error:
            told = printable(str(explained(error, options["using"])))
            raise CommandError(
                f"Stopped after {deleted} {self.rows}: {told}", returncode=FAILED
            ) from error
        if options["format"] == "json":
            self.print_json({"deleted": deleted})
        else:
            self.stdout.write(f"{deleted} {self.rows} were deleted.")


class AliasCommand(OperatorCommand):
    """A command about some aliases."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--using", metavar="ALIAS", help="Only this alias of DLOCKS (default: all of them)."
        )
        super().add_arguments(parser)

    def aliases(self, alias: str | None) -> list[str]:
        """This alias or all of them; ends the command if it is not defined."""
        try:
            known = list(locks)
        except InvalidLockBackend as error:
            raise CommandError(str(error), returncode=FAILED) from error
        if alias is not None and alias not in known:
            self.wrong_usage(f"There is no alias {alias!r} in DLOCKS; it defines {sorted(known)}.")
        return known if alias is None else [alias]


class LockCommand(AliasCommand):
    """A command about the locks of some aliases."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--name", metavar="PATTERN", help="Only locks with this name; * matches anything."
        )
        parser.add_argument(
            "--host",
            metavar="PATTERN",
            help="Only locks of processes on this host; * matches anything.",
        )
        parser.add_argument(
            "--task",
            metavar="PATTERN",
            help="Only locks of tasks with this name; * matches anything.",
        )
        super().add_arguments(parser)

    def not_negative(self, option: str, value: float | None) -> None:
        """End the command if an option that takes seconds has a value that is no duration."""
        if value is not None and not 0 <= value <= clock.LONGEST:
            self.wrong_usage(f"{option} is {value}; it must be 0 to {clock.LONGEST} seconds.")

    def alias_query(self, alias: str | None) -> AliasQuery:
        """A query for one alias or for all; ends the command if the alias is not defined."""
        return AliasQuery(self.aliases(alias))

    def find(self, alias_query: AliasQuery, wanted: Wanted) -> list[LeaseInfo]:
        """The leases that are wanted, sorted by alias and age."""
        query, matches = wanted.query(), wanted.matcher()
        answers = alias_query.ask(lambda backend: backend.page(query).infos)
        return [info for infos in answers.values() for info in infos if matches(info)]

    def find_first(
        self, alias_query: AliasQuery, wanted: Wanted, limit: int
    ) -> tuple[list[LeaseInfo], int]:
        """As ``find``, but no more than ``limit`` of each alias, and how many there are."""
        if wanted.has_patterns:
            infos = self.find(alias_query, wanted)
            return infos, len(infos)
        query = wanted.query()
        pages = alias_query.ask(lambda backend: backend.page(query, limit=limit)).values()
        return [info for page in pages for info in page.infos], sum(page.total for page in pages)

    def print_leases(self, infos: Sequence[LeaseInfo], output_format: str, nothing: str) -> None:
        """Print leases as JSON, or as a table; ``nothing`` is the text if there are none."""
        if output_format == "json":
            self.print_json([info.as_dict() for info in infos])
        elif infos:
            self._write_lines(lease_table(infos, self._width()))
        else:
            self.stdout.write(nothing)

    def print_waiters(self, waiters: Sequence[Waiter]) -> None:
        """Print a table of waiters below that of the locks, if there are any."""
        if waiters:
            self._write_lines(["", *waiter_table(waiters, self._width())])

    def _write_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.stdout.write(line)

    def _width(self) -> int | None:
        return shutil.get_terminal_size().columns if self.stdout.isatty() else None

    def fail_on_problems(self, alias_query: AliasQuery) -> None:
        """Call this at the end of the command.

        Raises:
            CommandError: An alias did not answer.
        """
        if alias_query.problems:
            problems = map(printable, alias_query.problems.values())
            raise CommandError("\n".join(problems), returncode=FAILED)
