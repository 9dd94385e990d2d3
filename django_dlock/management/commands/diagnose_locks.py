"""``manage.py diagnose_locks``: find out what is wrong with the locks, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...exceptions import InvalidLockBackend
from ...handler import locks
from ...text.printable import printable
from ..base import FAILED, AliasCommand
from ..diagnosis import Finding, diagnose_alias, diagnose_project
from ..output import encodable, encoding_of
from ..wrapping import width_of, wrapped

INDENT = 24
"""Where the texts begin, unless the terminal is narrow."""
LEVELS = {"ERROR": ("error",), "WARNING": ("error", "warning")}
"""``--fail-level`` → the severities that make the command fail."""


class Command(AliasCommand):
    help = (
        "Find out whether each backend answers, whether locks can be taken, and which settings of "
        "the server and of the project may lose locks; says what to do. The exit code is 1 if "
        "there is an error."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--read-only",
            action="store_true",
            help="Take no lock; without this, one lock is acquired, renewed and released.",
        )
        parser.add_argument(
            "--fail-level",
            choices=tuple(LEVELS),
            default="ERROR",
            help="What makes the exit code 1 (default: ERROR).",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        as_text = options["format"] == "text"
        self.choose_style(options)
        found: list[Finding] = []
        for alias in self.aliases(options["using"]):
            findings = diagnose_alias(alias, read_only=options["read_only"])
            found += findings
            if as_text:
                # At once, because the next alias may take its time.
                self._print(_heading(alias), findings)
        if options["using"] is None:
            findings = list(diagnose_project())
            found += findings
            if as_text and findings:
                self._print("project", findings)
        counts = Counter[str](finding.severity for finding in found)
        if not as_text:
            worst = next((it for it in ("error", "warning") if counts[it]), "ok")
            self.print_json({"worst": worst, "findings": [it.as_dict() for it in found]})
        result = f"{_count(counts['error'], 'error')}, {_count(counts['warning'], 'warning')}."
        if any(counts[severity] for severity in LEVELS[options["fail_level"]]):
            raise CommandError(result, returncode=FAILED)
        if as_text:
            self.stdout.write(result)

    def _print(self, heading: str, findings: Iterable[Finding]) -> None:
        self.stdout.write(heading)
        width, encoding = width_of(self.stdout), encoding_of(self.stdout)
        styles = {
            "ok": self.style.SUCCESS,
            "warning": self.style.WARNING,
            "error": self.style.ERROR,
        }
        for finding in findings:
            # Texts of servers may contain terminal escape sequences.
            severity = styles[finding.severity](f"{finding.severity:<7}")
            topic = finding.topic.removeprefix("django_dlock.")
            head, indent = f"  {severity}  {topic:<11}  ", " " * INDENT
            if width is not None and width < 2 * INDENT:
                self.stdout.write(head.rstrip())
                head = indent = "    "
            # What the terminal cannot encode is longer when it is escaped.
            message, hint = (
                encodable(printable(text), encoding) for text in (finding.message, finding.hint)
            )
            self.write_lines(wrapped(message, width, first=head, indent=indent))
            if hint:
                self.write_lines(wrapped(hint, width, first=indent, indent=indent))


def _heading(alias: str) -> str:
    try:
        return f"{alias} ({type(locks[alias]).__name__})"
    except InvalidLockBackend:
        return alias


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
