"""``manage.py purge_idempotency_records``: delete records whose retention has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import retention
from ..base import PurgeCommand


class Command(PurgeCommand):
    help = "Delete idempotency records whose retention has ended, in batches."
    rows = "expired records"

    def batches(self, *, batch_size: int, using: str, **options: Any) -> Iterator[int]:
        return retention.purge(batch_size=batch_size, using=using)
