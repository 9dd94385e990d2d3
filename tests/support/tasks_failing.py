"""Tasks that fail for good; ``celery -A tests.support.tasks_failing worker``."""

from __future__ import annotations

from typing import Any

from celery import shared_task

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, body, note

__all__ = ["app"]

recorded: dict[str, Any] = {
    "bind": True,
    "lock_key": "order:{order}",
    "idempotency_key": "{order}",
    "atomic": True,
}


class TriesAgain(LockedTask):
    """Calls the task three times if it raises, as a base class for flaky services does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            try:
                return super().__call__(*args, **kwargs)
            except Exception:  # noqa: PERF203 - this is what such classes do
                continue
        return super().__call__(*args, **kwargs)


@shared_task(base=LockedTask, **recorded)
def declines(self: LockedTask, order: int, place: str, gate: str = "") -> None:
    """Its first run waits for ``gate`` and fails; no other run is to be."""
    if body(self, order, place, gate=gate) == 1:
        raise ValueError("declined")


@shared_task(base=TriesAgain, **recorded)
def flaky(self: TriesAgain, order: int, place: str, gate: str = "") -> None:
    """As ``declines``, and its class tries again."""
    if body(self, order, place, gate=gate) == 1:
        raise ValueError("declined")


@shared_task(base=LockedTask, **recorded)
def ends(self: LockedTask, order: int, place: str) -> int:
    """Returns."""
    return note(place, f"ended-{order}", order)
