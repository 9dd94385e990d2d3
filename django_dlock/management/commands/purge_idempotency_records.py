"""``manage.py purge_idempotency_records``: delete what is past its retention."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, connections

from ... import idempotency
from ..operator import FAILED, OperatorCommand


class Command(OperatorCommand):
    help = "Delete idempotency records whose retention has ended, in batches."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--using",
            metavar="DATABASE",
            help="The database of the records (default: the one that routers give them).",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=1000,
            metavar="N",
            help="Records per transaction (default: 1000).",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        using, batch_size = options["using"], options["batch_size"]
        if using is not None and using not in connections:
            self.wrong_usage(
                f"There is no database {using!r}; DATABASES defines {sorted(connections)}."
            )
        if batch_size < 1:
            self.wrong_usage(f"--batch-size is {batch_size}; it must be at least 1.")
        deleted = 0
        try:
            for count in idempotency.purge(batch_size=batch_size, using=using):
                deleted += count
                if options["verbosity"] > 0:
                    self.stderr.write(f"{deleted} deleted so far", style_func=str)
        except DatabaseError as error:
            raise CommandError(
                f"Stopped after {deleted} records: {error}", returncode=FAILED
            ) from error
        if options["format"] == "json":
            self.print_json({"deleted": deleted})
        else:
            self.stdout.write(f"{deleted} expired records were deleted.")
