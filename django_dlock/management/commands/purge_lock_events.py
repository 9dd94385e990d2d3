"""``manage.py purge_lock_events``: delete old lock events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandParser

from ... import retention
from ...models import LockEvent
from ..base import PurgeCommand

DAYS = 90.0
LONGEST = 36_500.0


class Command(PurgeCommand):
    help = "Delete old lock events, in batches."
    rows = "lock events"
    model = LockEvent

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--older-than",
            type=float,
            default=DAYS,
            metavar="DAYS",
            help=f"Only events older than this (default: {DAYS:g} days).",
        )
        super().add_arguments(parser)

    def batches(self, *, batch_size: int, using: str, **options: Any) -> Iterator[int]:
        days = options["older_than"]
        if not 0 <= days <= LONGEST:
            self.wrong_usage(f"--older-than is {days:g}; it must be 0 to {LONGEST:g} days.")
        return retention.purge_events(days=days, batch_size=batch_size, using=using)
