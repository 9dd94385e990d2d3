"""``manage.py purge_lock_events``: delete old lock events, or all traces of a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandParser

from ... import clock
from ...models import LockEvent
from ...records import retention
from ..erasing import ErasingCommand

DAYS = 90.0
LONGEST = clock.LONGEST / 86_400


class Command(ErasingCommand):
    help = "Delete old lock events, in batches; or erase what is kept of one key or person."
    only_of_the_purge = ("older_than",)
    rows = "lock events"
    model = LockEvent

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than",
            type=float,
            metavar="DAYS",
            help=f"Only events older than this (default: {DAYS:g} days).",
        )
        super().add_arguments(parser)

    def batches(self, *, batch_size: int, using: str, **options: Any) -> Iterator[int]:
        days = DAYS if options["older_than"] is None else options["older_than"]
        if not 0 <= days <= LONGEST:
            self.wrong_usage(f"--older-than is {days:g}; it must be 0 to {LONGEST:g} days.")
        return retention.purge_events(days=days, batch_size=batch_size, using=using)
