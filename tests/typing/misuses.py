"""User code that ``mypy --strict`` must refuse; an unused ignore is an error, too."""

from __future__ import annotations

from django_dlock import Lock, locked, locks

Lock(42)  # type: ignore[arg-type]
Lock("name", hold_until="later")  # type: ignore[arg-type]
Lock("name", patience=3)  # type: ignore[arg-type]
Lock("name", ttl="30")  # type: ignore[arg-type]


@locked("rebuild:{account_id}")
def rebuild(account_id: int) -> str:
    return str(account_id)


rebuild("seven")  # type: ignore[arg-type]
rebuild()  # type: ignore[call-arg]
number: int = rebuild(7)  # type: ignore[assignment]


async def waits() -> None:
    Lock("name").aacquire()  # type: ignore[unused-coroutine]
    with Lock("name") as lock:
        lock.token + 1  # type: ignore[operator]


locks["default"].break_("name")  # type: ignore[call-arg]
