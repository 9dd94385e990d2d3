"""``manage.py purge_fences``: delete rows of the fence table that nobody has touched for long."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

from django.core.management import CommandError
from django.core.management.base import CommandParser

from ... import clock, conf
from ...exceptions import InvalidLockBackend
from ...models import Fence
from ...records import retention
from ..base import FAILED, PurgeCommand

DAYS = 90.0
DAY = 86_400
LONGEST = clock.LONGEST / DAY


class Command(PurgeCommand):
    help = "Delete rows of the fence table that no holder has written for long, in batches."
    rows = "fences"
    model = Fence

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than",
            type=float,
            default=DAYS,
            metavar="DAYS",
            help="Only rows that nobody has written for this long; at least the largest MAX_HOLD "
            f"(default: {DAYS:g} days).",
        )
        super().add_arguments(parser)

    def batches(self, *, batch_size: int, using: str, **options: Any) -> Iterator[int]:
        days = options["older_than"]
        if not 0 <= days <= LONGEST:
            self.wrong_usage(f"--older-than is {days:g}; it must be 0 to {LONGEST:g} days.")
        try:
            longest, alias = max(
                (conf.alias_options(alias).max_hold, alias) for alias in conf.aliases()
            )
        except InvalidLockBackend as error:
            raise CommandError(str(error), returncode=FAILED) from error
        if days * DAY < longest:
            # A holder of that age may still be alive, and would not be refused any more.
            self.wrong_usage(
                f"--older-than is {days:g} days, but DLOCKS[{alias!r}]['MAX_HOLD'] is "
                f"{longest / DAY:g} days; it must be at least that."
            )
        return retention.purge_fences(
            untouched_for=dt.timedelta(days=days), batch_size=batch_size, using=using
        )
