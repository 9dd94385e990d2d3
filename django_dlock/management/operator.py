"""Options, output and exit codes that the commands share.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections, router
from django.db.models import Model

from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..inspection import AliasQuery, duration
from ..lease import LeaseInfo, LeaseQuery, Waiter
from ..models import IdempotencyRecord
from .locked import WRONG_USAGE
from .screen import Progress

__all__ = [
    "FAILED",
    "AliasCommand",
    "LockCommand",
    "OperatorCommand",
    "PurgeCommand",
    "RecordCommand",
    "Wanted",
    "matching",
    "printable",
    "table",
]

FAILED = 1
NARROWEST = 12
"""The minimum width of a column in characters."""


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
            raise CommandError(
                f"Stopped after {deleted} {self.rows}: {error}", returncode=FAILED
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


@dataclass(frozen=True)
class Wanted:
    """Which locks a command is about.

    Attributes:
        name, host, task: Patterns, in which ``*`` matches anything; ``None`` for any.
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
        name, host, task = map(matching, (self.name, self.host, self.task))

        def matches(info: LeaseInfo) -> bool:
            on = info.process.host if info.process else ""
            of = info.metadata.get("task_name")
            return bool(name(info.name) and host(on) and task(of if isinstance(of, str) else ""))

        return matches


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
        if value is not None and not 0 <= value < float("inf"):
            self.wrong_usage(f"{option} is {value}; it must be 0 or more seconds.")

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
            self._write_lines(table(infos, self._width()))
        else:
            self.stdout.write(nothing)

    def print_waiters(self, waiters: Sequence[Waiter]) -> None:
        """Print a table of waiters below that of the locks, if there are any."""
        if waiters:
            heads = ("WAITS FOR", "STATE", "WAITER", "SINCE", "ALIAS")
            rows = map(_waiter_cells, waiters)
            self._write_lines(["", *_aligned(heads, rows, stretching=(0, 2), width=self._width())])

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
            raise CommandError("\n".join(alias_query.problems.values()), returncode=FAILED)


def matching(pattern: str | None) -> Any:
    """A function that tests whether a name matches; only ``*`` is special."""
    if pattern is None:
        return lambda name: True
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.compile(".*".join(parts), re.DOTALL).fullmatch


def table(infos: Iterable[LeaseInfo], width: int | None) -> Iterable[str]:
    """Lines of a table of leases; no longer than ``width``, if that is possible."""
    heads = ("NAME", "STATE", "HOLDER", "AGE", "TTL", "WAITING", "KIND", "ALIAS")
    return _aligned(heads, map(_cells, infos), stretching=(0, 2), width=width)


def _who(facts: Mapping[str, Any]) -> str:
    where = f"{facts['host']}:{facts['pid']}" if facts["host"] else ""
    what = facts["task_name"] or facts["path"] or ""
    if facts["task_id"]:
        what = f"{what}[{facts['task_id']}]"
    return " ".join(part for part in (where, what) if part) or "-"


def _waiter_cells(waiter: Waiter) -> tuple[str, ...]:
    who, since = _who(waiter.as_dict()["waiter"]), duration(waiter.waited)
    return tuple(map(printable, (waiter.name, waiter.state, who, since, waiter.alias)))


def _cells(info: LeaseInfo) -> tuple[str, ...]:
    cells = (
        info.name,
        info.holder_state,
        _who(info.as_dict()["holder"]),
        duration(info.age),
        "never ends" if info.ttl is None else duration(info.ttl),
        str(info.waiting),
        info.kind,
        info.alias,
    )
    # A path or a damaged entry may contain terminal escape sequences.
    return tuple(map(printable, cells))


def printable(text: str) -> str:
    """The text, with a ``?`` for each character that a terminal would not print."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _aligned(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    stretching: Sequence[int],
    width: int | None,
) -> Iterable[str]:
    """Lines of aligned columns; the ``stretching`` columns are cut to fit into ``width``."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is not None:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        while excess > 0:
            widest = max(stretching, key=lambda column: widths[column])
            if widths[widest] <= NARROWEST:
                break
            widths[widest] -= 1
            excess -= 1
    for line in lines:
        cells = zip(line, widths, strict=True)
        yield "  ".join(_fit(cell, size) for cell, size in cells).rstrip()


def _fit(cell: str, size: int) -> str:
    return cell.ljust(size) if len(cell) <= size else cell[: size - 1] + "…"
