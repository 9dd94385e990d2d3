"""A worker that serves its metrics with what the guide on metrics prints.

Run by ``celery -A tests.support.tasks_metrics worker``.
"""

from __future__ import annotations

import re
from pathlib import Path

from celery import shared_task

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, body

__all__ = ["app"]

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "metrics.md"


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}")
def locked(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """The lock alone."""
    return body(self, order, place, gate=gate)


RECIPE = re.compile(r"```python\n(# celery\.py, beside the app\n.*?)```", re.DOTALL)
(recipe,) = RECIPE.findall(GUIDE.read_text())
exec(recipe)
