"""Base classes of the commands: the options, output and exit codes that they share.

Exit codes: 0 done, 1 failed, 2 wrong usage. With ``--format json``, an error is an object with
``error``: the only one, or in a command that prints a list, one of them.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.management.color import no_style
from django.db import Error, connections, router
from django.db.models import Model

from .. import clock
from ..databases.errors import explained
from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..lease import LeaseInfo, Waiter
from ..models import IdempotencyRecord
from ..operators.blocking import LockId
from ..operators.inspection import AliasQuery
from ..text.printable import printable
from .locked import WRONG_USAGE
from .output import encoding_of, error_of, open_output
from .progress import Progress
from .table import by_trouble, lease_table, waiter_table
from .wanted import Wanted
from .wrapping import width_of

FAILED = 1


def as_errors(problems: Mapping[str, str]) -> list[dict[str, str]]:
    """The problems of aliases as objects for JSON."""
    return [{"alias": alias, "error": problem} for alias, problem in problems.items()]


class OperatorCommand(BaseCommand):
    """A command for operators and for scripts."""

    # A failing system check must not prevent an operator from using the command.
    requires_system_checks = []
    json_is_list: ClassVar[bool] = False
    """Whether the command prints a list of objects as JSON; else it prints one object."""

    def __init__(self, stdout: Any = None, stderr: Any = None, **options: Any) -> None:
        super().__init__(
            open_output(stdout or sys.stdout), open_output(stderr or sys.stderr), **options
        )
        self._has_json = False

    def run_from_argv(self, argv: list[str]) -> None:
        if ("--format", "json") in itertools.pairwise(argv) or "--format=json" in argv:
            try:
                # Unlike below, this raises what is wrong with the arguments.
                self.create_parser(argv[0], argv[1]).parse_args(argv[2:])
            except CommandError as error:
                self._print_error(str(error).removeprefix("Error: "))
        super().run_from_argv(argv)

    def execute(self, *args: Any, **options: Any) -> str | None:
        self._has_json = False
        for stream in ("stdout", "stderr"):
            if options.get(stream):
                options[stream] = open_output(options[stream])
        try:
            told = super().execute(*args, **options)
        except CommandError as error:
            if options.get("format") == "json" and not self._has_json:
                self._print_error(str(error))
            raise
        finally:
            # Now, where an error can still be told.
            self.stdout.flush()
        unwritten = error_of(self.stdout)
        if unwritten is not None and not isinstance(unwritten, BrokenPipeError):
            raise CommandError(f"The output is not complete: {unwritten}", returncode=FAILED)
        return told

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Output (default: text)."
        )

    def wrong_usage(self, message: str) -> NoReturn:
        raise CommandError(message, returncode=WRONG_USAGE)

    def print_json(self, value: Any) -> None:
        self._has_json = True
        text = json.dumps(value, indent=2, ensure_ascii=False)
        # Data in a lease may contain terminal escape sequences or lone surrogates, which cannot be
        # printed. They are always inside strings, where JSON can escape them.
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
        try:
            text.encode(encoding_of(self.stdout))
        except UnicodeEncodeError:
            text = json.dumps(value, indent=2)
        self.stdout.write(text)

    def choose_style(self, options: Mapping[str, Any]) -> None:
        """Use no colours if the output is no terminal; called at the beginning of ``handle``."""
        if not (self.stdout.isatty() or options["force_color"]):
            # Django looks at the process's own output, which need not be this one.
            self.style = no_style()

    def write_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.stdout.write(line)

    def _print_error(self, text: str) -> None:
        told = {"error": text}
        self.print_json([told] if self.json_is_list else told)


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
            told = str(explained(error, options["using"]))
            if options["format"] == "json":
                self.print_json({"deleted": deleted, "error": told})
            raise CommandError(
                f"Stopped after {deleted} {self.rows}: {printable(told)}", returncode=FAILED
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

    json_is_list = True

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

    def print_leases(
        self,
        infos: Sequence[LeaseInfo],
        output_format: str,
        nothing: str,
        errors: Iterable[Mapping[str, str]] = (),
        in_deadlock: Collection[LockId] = (),
    ) -> None:
        """Print leases as JSON, with these errors, or as a table, in which troubles come first.

        Args:
            nothing: The text if there are none.
            in_deadlock: Marked in the table.
        """
        if output_format == "json":
            self.print_json([*(info.as_dict() for info in infos), *errors])
        elif infos:
            width, encoding = width_of(self.stdout), encoding_of(self.stdout)
            ordered = by_trouble(infos, in_deadlock)
            self.write_lines(
                lease_table(ordered, width, encoding, in_deadlock=in_deadlock, style=self.style)
            )
        else:
            self.stdout.write(nothing)

    def print_waiters(self, waiters: Sequence[Waiter]) -> None:
        """Print a table of waiters below that of the locks, if there are any."""
        if waiters:
            width, encoding = width_of(self.stdout), encoding_of(self.stdout)
            table = waiter_table(waiters, width, encoding, style=self.style)
            self.write_lines(["", *table])

    def fail_on_problems(self, alias_query: AliasQuery, others: Iterable[str] = ()) -> None:
        """Call this at the end of the command.

        Raises:
            CommandError: An alias did not answer, or there are other problems.
        """
        problems = [*alias_query.problems.values(), *others]
        if problems:
            raise CommandError("\n".join(map(printable, problems)), returncode=FAILED)
