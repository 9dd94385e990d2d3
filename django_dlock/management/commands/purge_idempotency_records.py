"""``manage.py purge_idempotency_records``: delete expired records, or all traces of a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...records import retention
from ..erasing import ErasingCommand


class Command(ErasingCommand):
    help = (
        "Delete idempotency records whose retention has ended, in batches; or erase what is kept "
        "of one key or person."
    )
    rows = "expired records"

    def batches(self, *, batch_size: int, using: str, **options: Any) -> Iterator[int]:
        return retention.purge(batch_size=batch_size, using=using)
