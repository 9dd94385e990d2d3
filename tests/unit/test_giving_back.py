"""A release that is struck: whatever was carried out, nobody believes any more that he holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_dlock import BackendUnavailable, Lock, locks, undo
from django_dlock.giving_back import GivingBack
from django_dlock.hold import Hold
from django_dlock.holdings import Holdings


@pytest.fixture(autouse=True)
def _fresh() -> None:
    locks.reset()


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Owners whose release is to be repeated in the background."""
    owners: list[str] = []
    monkeypatch.setattr(undo, "schedule", lambda backend, it, **k: owners.append(it.owner))
    return owners


def striking(
    method: Callable[..., Any], *, before: bool, error: BaseException | None = None
) -> Callable[..., Any]:
    """The method, struck once as it begins or ends."""
    strikes = [error or KeyboardInterrupt()]

    def struck(*args: Any, **kwargs: Any) -> Any:
        if before and strikes:
            raise strikes.pop()
        answer = method(*args, **kwargs)
        if strikes:
            raise strikes.pop()
        return answer

    return struck


def acquired(**options: Any) -> tuple[Lock, Hold]:
    lock = Lock("it", using="local", **options)
    assert lock.acquire()
    hold = lock._holdings.current()
    assert hold is not None
    return lock, hold


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("where", ["release", "__enter__", "__exit__", "end_released"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_g7_a_release_that_is_struck_leaves_no_hold(
    where: str, before: bool, reentrant: bool, undone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, hold = acquired(reentrant=reentrant)
    backend = locks["local"]
    of: Any = {"release": backend, "end_released": Hold}.get(where, GivingBack)
    monkeypatch.setattr(of, where, striking(getattr(of, where), before=before))
    with pytest.raises(KeyboardInterrupt):
        lock.release()
    assert (lock.state, lock._holdings.current()) == ("free", None)
    # Nor does the thread take it for its own.
    carried_out = not backend.locked("it", deadline=backend.call_deadline())
    assert carried_out or undone == [hold.owner]
    assert Lock("it", using="local", reentrant=reentrant).acquire(blocking=False) is carried_out


def test_g7_a_release_without_an_answer_that_is_struck_is_repeated(
    undone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, hold = acquired()
    silent = striking(locks["local"].release, before=True, error=BackendUnavailable("", "", ""))
    monkeypatch.setattr(locks["local"], "release", silent)
    monkeypatch.setattr(GivingBack, "__exit__", striking(GivingBack.__exit__, before=True))
    with pytest.raises(KeyboardInterrupt):
        lock.release()
    assert (lock.state, undone) == ("free", [hold.owner])


async def test_g7_a_coroutines_release_that_is_struck_leaves_no_hold(
    undone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock("it", using="local")
    assert await lock.aacquire()
    monkeypatch.setattr(GivingBack, "__exit__", striking(GivingBack.__exit__, before=True))
    with pytest.raises(KeyboardInterrupt):
        await lock.arelease()
    assert (lock.state, len(undone)) == ("free", 1)


def test_g7_a_release_after_a_transaction_that_is_struck_renews_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, hold = acquired()
    monkeypatch.setattr(Holdings, "leave", striking(Holdings.leave, before=True))
    with pytest.raises(KeyboardInterrupt):
        lock._release_late(hold)
    assert not hold.renews
