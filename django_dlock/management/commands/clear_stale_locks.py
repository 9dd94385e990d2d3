"""``manage.py clear_stale_locks``: free what dead holders have left behind."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from django.db import DatabaseError

from ... import events, lock_events
from ...exceptions import BackendUnavailable
from ...lease import LeaseInfo
from ...models import LockEvent
from ...operations import Survey, break_lease
from ..operator import LockCommand


class Command(LockCommand):
    help = (
        "Clear locks whose holder is dead by proof, and entries without a TTL, which would never "
        "end. A live holder's lock is never cleared without --force, and a lock that has changed "
        "hands is never cleared at all."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--silent-for",
            type=float,
            metavar="SECONDS",
            help="Also locks whose holder has not been heard of for so long; it may wake up.",
        )
        parser.add_argument(
            "--older-than",
            type=float,
            metavar="SECONDS",
            help="Also locks of no known process that are older; with --force, any that are older.",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="Also locks of live holders; needs --name or --older-than to select them.",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Only show what would be cleared."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        for option in ("silent_for", "older_than"):
            if options[option] is not None and not options[option] >= 0:
                flag = option.replace("_", "-")
                self.wrong_usage(f"--{flag} is {options[option]}; it must be 0 or more seconds.")
        if options["force"] and options["name"] is None and options["older_than"] is None:
            self.wrong_usage("--force alone would clear everything: add --name or --older-than.")
        survey = self.survey(options["using"])
        stale = [info for info in self.find(survey, options["name"]) if _is_stale(info, options)]
        if options["dry_run"]:
            nothing = "Nothing would be cleared."
        else:
            nothing = "Nothing was cleared."
            stale = [info for info in stale if self._clear(info, survey)]
            # The process ends soon, and with it the thread that delivers ``broken``.
            events.flush()
        self.print_leases(stale, options["format"], nothing)
        if stale and options["format"] == "text":
            verb = "would be cleared" if options["dry_run"] else "cleared"
            self.stdout.write(f"{len(stale)} {verb}.")
        self.tell_problems(survey)

    def _clear(self, info: LeaseInfo, survey: Survey) -> bool:
        """Clear one lock; false where it was freed or changed hands, or nobody answers."""
        if info.alias in survey.problems:
            return False
        try:
            if not break_lease(info, reason="command"):
                return False
        except BackendUnavailable as error:
            survey.problems[info.alias] = f"{error}; it may have been cleared."
            return False
        try:
            lock_events.record(
                LockEvent.Event.BROKEN,
                name=info.name,
                alias=info.alias,
                owner=info.owner,
                token=info.token,
                reason="command",
                detail=lock_events.facts(info),
            )
        except DatabaseError as error:
            # The lock is free, which matters more than the row about it.
            self.stderr.write(f"The event of {info.name!r} was not written: {error}")
        return True


def _is_stale(info: LeaseInfo, options: dict[str, Any]) -> bool:
    if info.ttl is None or (info.kind == "held" and info.holder_state == "dead"):
        return True
    if _exceeds(info.age, options["older_than"]) and info.holder_state == "unknown":
        return True
    if _exceeds(info.unheard, options["silent_for"]) and info.holder_state == "silent":
        return True
    return options["force"] and _exceeds(info.age, options["older_than"] or 0.0)


def _exceeds(seconds: float | None, limit: float | None) -> bool:
    return seconds is not None and limit is not None and seconds >= limit
