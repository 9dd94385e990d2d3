"""What the commands that purge do if they are asked to erase one key or one person.

Both of them do the same then, in all tables, so that nothing is left because the other one was not
called. Exit codes: 0 all that was found is erased, 1 something is left, 2 wrong usage.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import Error

from ..records.erasure import Criterion, Erasure, Subject, erase
from ..text.printable import printable
from .base import FAILED, PurgeCommand
from .progress import Progress

UNSTORABLE = re.compile("[\0\ud800-\udfff]")
ARGUMENT = re.compile(r"[^\W\d]\w*([.\[].*)?")
CRITERIA = ("name", "key", "user", "argument")

KINDS = {
    "records": "idempotency records",
    "follow_ups": "outbox messages",
    "lock_events": "lock events",
    "lock_statistics": "rows of lock statistics",
    "admin_log": "entries of the admin's log, which stay without the name",
}
ANONYMISED = {"lock_events": "lock events", "failover_records": "records of fail-over"}
KEPT = {
    "records_in_progress": (
        "idempotency records: their runs may be in progress; repeat the command when they have "
        "ended, or add --force"
    ),
    "records_with_pending_follow_ups": (
        "idempotency records: messages of their runs are not published yet; run "
        "publish_pending_followups, or add --force, which drops the messages"
    ),
    "records_that_have_changed": "idempotency records: they changed meanwhile; repeat the command",
    "fences": "fences: they refuse the writes of late holders; purge_fences deletes old ones",
    "leases": "leases in the database: they end with their TTL, and the rows go soon after",
    "pending_follow_ups_without_record": (
        "pending outbox messages whose record is gone, so nobody knows whose they are: run "
        "publish_pending_followups"
    ),
}
INCOMPLETE = (
    *("records_in_progress", "records_with_pending_follow_ups", "records_that_have_changed"),
)
"""What is left of these is not erased; the others go by themselves, or keep locks safe."""

NOT_SEARCHED = (
    "leases and waiters in stores (they end with their TTL)",
    "logs, traces and metrics",
    "the broker and the result backend of Celery",
    "digests that a callable of yours has made without keyed_digest()",
)


class ErasingCommand(PurgeCommand):
    """A command that purges old rows, or else erases what is kept of one key or person."""

    only_of_the_purge: ClassVar[tuple[str, ...]] = ()
    """Options that mean nothing if something is erased; ``None`` if they are not given."""

    def add_arguments(self, parser: CommandParser) -> None:
        group = parser.add_argument_group(
            "erase", "Instead of old rows, erase what is kept of one key or person in all tables."
        )
        group.add_argument(
            "--name",
            action="append",
            metavar="PATTERN",
            help="What belongs to locks with this name; * matches anything. Repeatable.",
        )
        group.add_argument(
            "--key",
            action="append",
            metavar="KEY",
            help=(
                "What has this key: that of a record, the value of an Idempotency-Key header, or "
                "a value of which keyed_digest() or the digest of a single argument was made. "
                "Repeatable."
            ),
        )
        group.add_argument(
            "--user",
            action="append",
            metavar="USERNAME",
            help=(
                "The answers that idempotent views have stored for this user, and the user's name "
                "in lock events and in the row of fail-over. Repeatable."
            ),
        )
        group.add_argument(
            "--argument",
            action="append",
            metavar="NAME=VALUE",
            help="What has a key that is the digest of this argument, or of all that are given.",
        )
        group.add_argument(
            "--force",
            action="store_true",
            help="Also records of runs in progress, or with messages that are not published yet.",
        )
        group.add_argument("--dry-run", action="store_true", help="Only show what would be erased.")
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        if any(options[criterion] for criterion in CRITERIA):
            for option in self.only_of_the_purge:
                if options[option] is not None:
                    self.wrong_usage(
                        f"--{option.replace('_', '-')} is not for --name, --key, --user and "
                        "--argument, which erase rows of any age."
                    )
            self._erase(options)
            return
        for option in ("force", "dry_run"):
            if options[option]:
                self.wrong_usage(
                    f"--{option.replace('_', '-')} needs --name, --key, --user or --argument."
                )
        super().handle(*args, **options)

    def _erase(self, options: dict[str, Any]) -> None:
        if options["batch_size"] < 1:
            self.wrong_usage(f"--batch-size is {options['batch_size']}; it must be at least 1.")
        subject, done, using = self._subject(options), Erasure(), options["using"]
        found = erase(
            subject,
            databases=None if using is None else [self.database(using)],
            batch_size=options["batch_size"],
            force=options["force"],
            dry_run=options["dry_run"],
        )
        error = None
        try:
            with Progress(self.stderr, quiet=options["verbosity"] == 0) as progress:
                for done in found:
                    progress.show(f"{done.erased.total()} rows found so far")
        except Error as raised:
            error = raised
        missing = sorted(subject.criteria - done.found)
        problem = "" if error is None else f"Stopped: {error}"
        if not problem and not options["dry_run"] and any(done.kept[kind] for kind in INCOMPLETE):
            problem = "Not everything was erased."
        if options["format"] == "json":
            report = _as_json(done, missing, dry_run=options["dry_run"])
            self.print_json({**report, "error": problem} if problem else report)
        else:
            self._print(done, missing, dry_run=options["dry_run"])
        if problem:
            raise CommandError(printable(problem), returncode=FAILED) from error

    def _subject(self, options: dict[str, Any]) -> Subject:
        arguments = {}
        for text in options["argument"] or ():
            name, equals, value = text.partition("=")
            if not equals or not ARGUMENT.fullmatch(name):
                self.wrong_usage(
                    f"--argument is {text!r}; it takes NAME=VALUE, where NAME is an argument or, "
                    "of a view, a field such as request.user.pk."
                )
            arguments[name] = value
        for criterion in CRITERIA:
            for text in options[criterion] or ():
                if not text or UNSTORABLE.search(text):
                    self.wrong_usage(
                        f"--{criterion} is {text!r}; it takes at least one character, and neither "
                        "NUL nor lone surrogates, which no database stores."
                    )
        try:
            return Subject(
                names=options["name"] or (),
                keys=options["key"] or (),
                users=options["user"] or (),
                arguments=arguments,
                argument_names=_argument_names() if options["key"] else (),
            )
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=FAILED) from error

    def _print(self, done: Erasure, missing: list[Criterion], *, dry_run: bool) -> None:
        self.stdout.write("Would be erased:" if dry_run else "Erased:")
        for kind, text in KINDS.items():
            self.stdout.write(f"  {done.erased[kind]:>6}  {text}")
        if done.anonymised.total():
            self.stdout.write("Would lose their user:" if dry_run else "Kept without their user:")
        for kind, text in ANONYMISED.items():
            if done.anonymised[kind]:
                self.stdout.write(f"  {done.anonymised[kind]:>6}  {text}")
        if done.kept.total():
            self.stdout.write("Not erased:")
        for kind, text in KEPT.items():
            if done.kept[kind]:
                self.stdout.write(f"  {done.kept[kind]:>6}  {text}")
        if missing:
            self.stdout.write("Nothing was found for:")
        for criterion in missing:
            self.stdout.write(f"  {printable(str(criterion))}")
        self.stdout.write(f"Not searched: {'; '.join(NOT_SEARCHED)}.")


def _as_json(done: Erasure, missing: list[Criterion], *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "erased": {kind: done.erased[kind] for kind in KINDS},
        "anonymised": {kind: done.anonymised[kind] for kind in ANONYMISED},
        "kept": {kind: done.kept[kind] for kind in KEPT},
        "not_found": [{"option": f"--{option}", "value": value} for option, value in missing],
        "not_searched": list(NOT_SEARCHED),
    }


def _argument_names() -> set[str]:
    """What the arguments of this project's tasks are called; none without Celery."""
    try:
        # Imported here, because it imports Celery.
        from ..celery.arguments import names_of_arguments
    except ModuleNotFoundError as error:
        if error.name != "celery":
            raise
        return set()
    return names_of_arguments()
