"""How an acquire proceeds, told by the calls it makes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from django_dlock import Lock, locks
from django_dlock.lease import Contention
from django_dlock.process import current


@pytest.fixture(autouse=True)
def _fresh() -> None:
    locks.reset()


def dead() -> Contention:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    process = current()._replace(id="dead", pid=child.pid)
    return Contention("owner", "held", 30.0, 0.0, process)


def test_g4_a_dead_holder_is_broken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = locks["local"]
    met, broken = [dead()], []
    acquire = backend.acquire
    monkeypatch.setattr(backend, "acquire", lambda *a, **k: met.pop() if met else acquire(*a, **k))
    monkeypatch.setattr(backend, "break_", lambda name, **k: broken.append((name, k)) or True)
    assert Lock("it", using="local").acquire(blocking=False)
    assert broken == [("it", {"owner": "owner", "reason": "holder_dead"})]


@pytest.mark.parametrize("kind", ["cooling", "parked", "reserved"])
def test_a_lease_of_another_kind_is_never_judged_by_a_process(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = locks["local"]
    contention = dead()._replace(kind=kind)
    monkeypatch.setattr(backend, "acquire", lambda *a, **k: contention)
    monkeypatch.setattr(backend, "break_", lambda *a, **k: pytest.fail("broken"))
    assert not Lock("it", using="local").acquire(blocking=False)


def test_a_break_that_came_too_late_is_not_repeated_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = locks["local"]
    contention = dead()
    breaks: list[str] = []
    monkeypatch.setattr(backend, "acquire", lambda *a, **k: contention)
    monkeypatch.setattr(backend, "break_", lambda name, **k: breaks.append(name))
    assert not Lock("it", using="local").acquire(blocking=False)
    assert breaks == ["it"]


def test_the_last_try_no_longer_counts_as_a_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = locks["local"]
    waits: list[bool] = []
    contention = Contention("owner", "held", 30.0, 0.0)

    def acquire(request: Any, **_: Any) -> Contention:
        waits.append(request.waits)
        return contention

    monkeypatch.setattr(backend, "acquire", acquire)
    monkeypatch.setattr(backend, "wait", lambda *a, until, **k: _sleep_until(until))
    assert not Lock("it", using="local").acquire(timeout=0.01)
    assert waits == [True, False]


def _sleep_until(until: float) -> None:
    from django_dlock import clock

    while clock.now() < until:
        pass
