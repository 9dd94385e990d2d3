"""What the commands share: their options, their output and their exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..lease import LeaseInfo
from ..operations import Survey, duration

__all__ = ["LockCommand", "OperatorCommand", "matching"]

FAILED, WRONG_USAGE = 1, 2
NARROWEST = 12
"""Characters that a column keeps however narrow the terminal is."""


class OperatorCommand(BaseCommand):
    """A command for a shell at night as well as for a script."""

    # A finding of some check must not keep an operator from the locks.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Output (default: text)."
        )

    def wrong_usage(self, message: str) -> NoReturn:
        raise CommandError(message, returncode=WRONG_USAGE)

    def print_json(self, value: Any) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        # What a stranger put into a lease may be an order to the terminal, or half a character,
        # which no output takes. All of that stands inside strings, where JSON has escapes for it.
        self.stdout.write(
            "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
        )


class LockCommand(OperatorCommand):
    """A command about the locks of some aliases."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--using", metavar="ALIAS", help="Only this alias of DLOCKS (default: all of them)."
        )
        parser.add_argument(
            "--name", metavar="PATTERN", help="Only locks of this name; * stands for anything."
        )
        super().add_arguments(parser)

    def survey(self, alias: str | None) -> Survey:
        """The aliases that the operator asked for."""
        try:
            known = list(locks)
        except InvalidLockBackend as error:
            raise CommandError(str(error), returncode=FAILED) from error
        if alias is not None and alias not in known:
            self.wrong_usage(f"There is no alias {alias!r} in DLOCKS; it defines {sorted(known)}.")
        return Survey(known if alias is None else [alias])

    def find(self, survey: Survey, pattern: str | None) -> list[LeaseInfo]:
        """What the aliases hold under names that match, in order of alias and of age."""
        matches = matching(pattern)
        # What backends can look for themselves, so that they send little else.
        parts = [""] if pattern is None else pattern.split("*")
        prefix, contains = parts[0], max(parts, key=len)
        answers = survey.ask(lambda backend: backend.list(prefix=prefix, contains=contains))
        return [info for infos in answers.values() for info in infos if matches(info.name)]

    def print_leases(self, infos: Sequence[LeaseInfo], output_format: str, nothing: str) -> None:
        """Print leases, as text in a table or ``nothing``."""
        if output_format == "json":
            self.print_json([info.as_dict() for info in infos])
        elif infos:
            heads = ("NAME", "STATE", "HOLDER", "AGE", "TTL", "WAITING", "KIND", "ALIAS")
            width = shutil.get_terminal_size().columns if self.stdout.isatty() else None
            for line in _table(heads, map(_cells, infos), stretching=(0, 2), width=width):
                self.stdout.write(line)
        else:
            self.stdout.write(nothing)

    def tell_problems(self, survey: Survey) -> None:
        """Fail, after what could be done is done, if an alias gave no answer.

        Raises:
            CommandError: Some alias did not answer.
        """
        if survey.problems:
            raise CommandError("\n".join(survey.problems.values()), returncode=FAILED)


def matching(pattern: str | None) -> Any:
    """A test whether a name matches; ``*`` alone is special."""
    if pattern is None:
        return lambda name: True
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.compile(".*".join(parts), re.DOTALL).fullmatch


def _cells(info: LeaseInfo) -> tuple[str, ...]:
    facts = info.as_dict()["holder"]
    where = f"{facts['host']}:{facts['pid']}" if facts["host"] else ""
    what = facts["task_name"] or facts["path"] or ""
    cells = (
        info.name,
        info.holder_state,
        " ".join(part for part in (where, what) if part) or "-",
        duration(info.age),
        "never ends" if info.ttl is None else duration(info.ttl),
        str(info.waiting),
        info.kind,
        info.alias,
    )
    # A path or a damaged entry may hold escape sequences, which a terminal would obey.
    return tuple("".join(c if c.isprintable() else "?" for c in cell) for cell in cells)


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    stretching: Sequence[int],
    width: int | None,
) -> Iterable[str]:
    """Lines of aligned columns; those in ``stretching`` give way to fit into ``width``."""
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
