"""``manage.py publish_pending_followups``: publish follow-ups that no broker has confirmed."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from ... import clock
from ...databases.errors import explained
from ...models import FollowUp
from ...text.printable import printable
from ..base import FAILED, RecordCommand


class Command(RecordCommand):
    help = "Publish the messages of committed runs that the broker has not confirmed."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than",
            type=float,
            default=30.0,
            metavar="SECONDS",
            help="Only messages that are older; workers publish newer ones (default: 30).",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            # Imported here, because it imports Celery.
            from ...celery.publishing import follow_ups
        except ModuleNotFoundError as error:
            if error.name != "celery":
                raise
            raise CommandError(
                "Celery is not installed. Only Celery tasks send outbox messages, so without it "
                "there is nothing to publish; to publish those of workers elsewhere, install "
                "django-dlock[celery] here, too.",
                returncode=FAILED,
            ) from error
        using = self.database(options["using"])
        if not 0 <= options["older_than"] <= clock.LONGEST:
            given = options["older_than"]
            self.wrong_usage(f"--older-than is {given:g}; it must be from 0 seconds to 100 years.")
        age = dt.timedelta(seconds=options["older_than"])
        try:
            published = follow_ups.publish_all(using, older_than=age)
            left = FollowUp.objects.using(using).filter(published_at__isnull=True).count()
        except (Error, follow_ups.Unpublished) as error:
            told = explained(error, using) if isinstance(error, Error) else error
            raise CommandError(printable(str(told)), returncode=FAILED) from error
        if options["format"] == "json":
            self.print_json({"published": published, "pending": left})
        else:
            self.stdout.write(
                f"{published} outbox messages were published; {left} are still pending."
            )
