"""``manage.py clear_stale_locks``: release the locks of dead holders."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...core import dispatch
from ...exceptions import BackendUnavailable
from ...lease import LeaseInfo
from ...operators import audit
from ...operators.inspection import AliasQuery, break_lease
from ..base import LockCommand, as_errors
from ..progress import Progress
from ..wanted import Wanted, unless_unanswered

NAMED = 20
"""How many locks are named whose lock event may be missing."""


class Command(LockCommand):
    help = (
        "Clear locks whose holder is proven dead, and damaged entries that would never end. The "
        "lock of a live holder is only cleared with --force. A lock that gets another owner while "
        "the command runs is never cleared."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--silent-for",
            type=float,
            metavar="SECONDS",
            help="Also locks whose holder has sent no heartbeat for this long; it may wake up.",
        )
        parser.add_argument(
            "--older-than",
            type=float,
            metavar="SECONDS",
            help="Also older locks without a known process; with --force, all older locks.",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="Also locks of live holders; needs --name, --host, --task or --older-than.",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Only show what would be cleared."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.choose_style(options)
        self.not_negative("--silent-for", options["silent_for"])
        self.not_negative("--older-than", options["older_than"])
        wanted = Wanted(options["name"], options["host"], options["task"])
        if options["force"] and not wanted.has_patterns and options["older_than"] is None:
            self.wrong_usage(
                "--force alone would clear everything: add --name, --host, --task or --older-than."
            )
        alias_query = self.alias_query(options["using"])
        found = self.find(alias_query, wanted)
        stale = [info for info in found if _is_stale(info, options)]
        why = _why_nothing(wanted, len(found), len(stale))
        problems: list[str] = []
        if not options["dry_run"]:
            quiet = options["verbosity"] == 0
            stale, problems = self._clear_all(stale, alias_query, quiet=quiet)
        nothing = f"Nothing {'would be' if options['dry_run'] else 'was'} cleared. {why}"
        if not options["dry_run"] and alias_query.problems:
            nothing = "Nothing was cleared."
        else:
            nothing = unless_unanswered(nothing, alias_query)
        errors = [*as_errors(alias_query.problems), *({"error": problem} for problem in problems)]
        self.print_leases(stale, options["format"], nothing, errors)
        if stale and options["format"] == "text":
            verb = "would be cleared" if options["dry_run"] else "cleared"
            self.stdout.write(f"{len(stale)} {verb}.")
        self.fail_on_problems(alias_query, problems)

    def _clear_all(
        self, stale: list[LeaseInfo], alias_query: AliasQuery, *, quiet: bool
    ) -> tuple[list[LeaseInfo], list[str]]:
        """Clear these locks; returns those that were cleared, and what is not recorded of them."""
        rows, cleared = audit.BreakRows("command"), list[LeaseInfo]()
        try:
            with Progress(self.stderr, quiet=quiet) as progress:
                for number, info in enumerate(stale, 1):
                    if _clear(info, alias_query):
                        cleared.append(info)
                        rows.add(info)
                    progress.show(f"{number} of {len(stale)} done, {len(cleared)} cleared")
        finally:
            # Also after Ctrl-C, because the process is about to end.
            unwritten = rows.unwritten()
            # Deliver ``broken``; if the rows were waited for, the receivers have had time.
            dispatch.flush(1.0 if unwritten else 5.0)
        return cleared, [_told(problem, infos) for problem, infos in unwritten.items()]


def _clear(info: LeaseInfo, alias_query: AliasQuery) -> bool:
    """Clear one lock; ``False`` if it is free or has another owner, or on no answer."""
    if info.alias in alias_query.problems:
        return False
    try:
        return break_lease(info, reason="command")
    except BackendUnavailable as error:
        alias_query.problems[info.alias] = f"{error}; it may have been cleared."
        return False


def _told(problem: str, infos: list[LeaseInfo]) -> str:
    names = ", ".join(repr(info.name) for info in infos[:NAMED])
    if len(infos) > NAMED:
        names += f" and {len(infos) - NAMED} more"
    return f"The locks are free, but lock events may not have been written: {names}: {problem}"


def _is_stale(info: LeaseInfo, options: dict[str, Any]) -> bool:
    if info.ttl is None or (info.kind == "held" and info.holder_state == "dead"):
        return True
    # A store may know the process, but not whether it lives.
    is_anonymous = info.kind != "held" or info.process is None
    is_of_nobody = info.holder_state == "unknown" and is_anonymous
    if is_of_nobody and _exceeds(info.age, options["older_than"]):
        return True
    if _exceeds(info.silent_for, options["silent_for"]) and info.holder_state == "silent":
        return True
    return options["force"] and _exceeds(info.age, options["older_than"] or 0.0)


def _why_nothing(wanted: Wanted, found: int, stale: int) -> str:
    if not found:
        return wanted.nothing()
    if stale:
        return "Since they were listed, the locks were released or got another owner."
    locks = "1 lock matches" if found == 1 else f"{found} locks match"
    return f"{locks}, but none is stale; list_locks shows the state of each holder."


def _exceeds(seconds: float | None, limit: float | None) -> bool:
    return seconds is not None and limit is not None and seconds >= limit
