"""The schedule of renewals on a manual clock, and the thread that follows it."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from django_dlock import Lock, clock, locks, signals
from django_dlock.backends.base import RenewalResults
from django_dlock.core import dispatch, watchdog
from django_dlock.core.schedule import Schedule
from django_dlock.core.watchdog import Watchdog
from django_dlock.exceptions import BackendUnavailable, LeaseLost
from django_dlock.lease import Outcome, ReleaseRequest, Renewal, RenewalResult
from tests.support.leases import lease_of

pytestmark = pytest.mark.usefixtures("time")


class Time:
    """A clock that the tests move by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    moved = Time()
    monkeypatch.setattr(clock, "now", moved)
    return moved


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch, time: Time) -> Watchdog:
    """A watchdog whose thread never starts: the tests call ``tick``."""
    locks.reset()
    own = Watchdog()
    monkeypatch.setattr(own, "wake", lambda: None)
    monkeypatch.setattr(watchdog, "watch", own.watch)
    monkeypatch.setattr(watchdog, "unwatch", own.unwatch)
    return own


class Spy:
    """Replaces the local backend's renewals, counts them, and lets them fail on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dog: Watchdog) -> None:
        self.backend, self.dog = locks["local"], dog
        self.calls: list[list[str]] = []
        self.error: Exception | None = None
        self.hangs = self.slow = False
        self.abandoned = 0
        self.renew = self.backend.renew
        monkeypatch.setattr(self.backend, "start_renew", self.start_renew)

    def start_renew(self, renewals: Sequence[Renewal], *, process: str, deadline: float) -> Any:
        self.calls.append([renewal.name for renewal in renewals])
        if self.hangs:
            return SimpleNamespace(wait=lambda _: False, abandon=self._abandon)
        # A slow backend does not answer during the call, but before the next step.
        answered = iter([False] if self.slow else [])
        return SimpleNamespace(
            wait=lambda _: next(answered, True),
            result=lambda: self.answer(renewals, process=process, deadline=deadline),
        )

    def answer(self, renewals: Sequence[Renewal], **kwargs: Any) -> RenewalResults:
        if self.error is not None:
            raise self.error
        return self.renew(renewals, **kwargs)

    def _abandon(self) -> None:
        self.abandoned += 1

    @property
    def renewed(self) -> list[str]:
        return [name for call in self.calls for name in call]


@pytest.fixture
def spy(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch, dog)


def held(name: str = "it", **options: Any) -> Lock:
    lock = Lock(name, using="local", **options)
    assert lock.acquire(blocking=False)
    return lock


def test_a_lease_is_renewed_after_a_third_of_its_ttl(dog: Watchdog, spy: Spy, time: Time) -> None:
    lock = held()
    time.seconds += 9.9
    dog.tick()
    assert spy.renewed == []
    time.seconds += 0.2
    dog.tick()
    assert spy.renewed == ["it"]
    assert lock.remaining == pytest.approx(29.7)


def test_a_fixed_lease_is_never_renewed_and_its_end_is_reported(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    calls: list[str] = []
    lock = held(renew=False, on_lost=lambda lock, reason: calls.append(reason))
    for _ in range(40):
        time.seconds += 1
        dog.tick()
    assert spy.renewed == []
    assert dispatch.flush(30)
    assert calls == ["expired"]
    assert lock.lost_reason == "expired"


def test_g2_the_end_that_a_backend_reports_reaches_the_holder_at_once(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    calls: list[str] = []
    fixed = held(renew=False, on_lost=lambda lock, reason: calls.append(reason))
    other = held("other")
    assert fixed.owner
    spy.backend.report_end(fixed.owner, "expired")
    assert fixed.lost_reason == "expired"
    assert other.held
    assert dispatch.flush(30)
    assert calls == ["expired"]
    # Nobody holds it any more, so there is nothing to tell.
    spy.backend.report_end("nobody", "broken")
    dog.tick()
    assert spy.renewed == []


def test_g2_a_doubt_that_a_backend_reports_lasts_until_the_next_renewal(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock, fixed = held(), held("fixed", renew=False)
    dog.tick()
    spy.error = BackendUnavailable("down")
    spy.backend.report_doubt()
    dog.tick()
    assert (lock.state, fixed.state) == ("in_doubt", "held")
    assert spy.renewed == ["it"]
    # It is tried again soon, and not only after a third of the TTL.
    time.seconds += 2.0
    dog.tick()
    assert (lock.state, spy.renewed) == ("in_doubt", ["it"] * 2)
    spy.error = None
    time.seconds += 2.0
    dog.tick()
    assert (lock.state, spy.renewed) == ("held", ["it"] * 3)


def test_a_reported_doubt_revives_no_lease_that_was_released(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()
    dog.tick()
    lock.release()
    spy.backend.report_doubt()
    dog.tick()
    assert lock.state == "free"
    assert spy.renewed == []


def test_five_hundred_leases_need_one_call(dog: Watchdog, spy: Spy, time: Time) -> None:
    kept = [held(f"n{i}") for i in range(500)]
    time.seconds += 10
    dog.tick()
    assert [len(call) for call in spy.calls] == [500]
    time.seconds += 10
    dog.tick()
    assert [len(call) for call in spy.calls] == [500, 500]
    assert all(lock.held for lock in kept)


def test_leases_acquired_at_different_times_are_soon_renewed_together(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    kept = []
    for i in range(10):
        kept.append(held(f"n{i}"))
        time.seconds += 1
        dog.tick()
    # After two intervals they all coincide; from then on there is one call per interval.
    for _ in range(30):
        time.seconds += 1
        dog.tick()
    spy.calls.clear()
    for _ in range(20):
        time.seconds += 1
        dog.tick()
    assert [len(call) for call in spy.calls if call] == [10, 10]
    assert all(lock.held for lock in kept)


def test_g1_a_lease_is_planned_whichever_alias_wakes_the_thread(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    kept = held("old")
    dog.tick()
    # Due later than the next step, which may belong to another alias, and before the heartbeat.
    new = held("new", ttl=3)
    time.seconds += 0.5
    assert dog.tick() <= lease_of(new).due
    time.seconds += 0.6
    dog.tick()
    assert spy.renewed == ["new"]
    assert kept.held


def test_g1_a_shorter_ttl_of_a_manual_renewal_is_kept(dog: Watchdog, spy: Spy, time: Time) -> None:
    lock = held(ttl=300)
    dog.tick()
    lock.renew(ttl=3)
    assert dog.tick() <= time.seconds + 1
    time.seconds += 1.1
    dog.tick()
    assert spy.renewed == ["it"]
    assert lock.remaining == pytest.approx(2.97)


def test_g1_a_manual_renewal_is_not_undone_by_an_earlier_one(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held(ttl=30)
    answer = spy.answer

    def by_hand_meanwhile(*args: Any, **kwargs: Any) -> RenewalResults:
        time.seconds += 0.1
        lock.renew(ttl=300)
        return answer(*args, **kwargs)

    spy.answer = by_hand_meanwhile  # type: ignore[method-assign]
    time.seconds += 10
    dog.tick()
    assert lock.remaining == pytest.approx(297)


def test_g1_many_leases_of_a_slow_backend_are_renewed_batch_after_batch(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spy.backend, "renewals_per_call", 2)
    kept = [held(f"n{i}") for i in range(10)]
    spy.slow = True
    time.seconds += 10
    for _ in range(10):
        time.seconds += 0.1
        dog.tick()
    assert sorted(spy.renewed) == sorted(lock.name for lock in kept)


def test_a_heartbeat_is_sent_every_five_seconds(dog: Watchdog, spy: Spy, time: Time) -> None:
    kept = held(ttl=300)
    for _ in range(20):
        time.seconds += 1
        dog.tick()
    assert kept.held
    assert len(spy.calls) == 4
    assert spy.renewed == []


@pytest.mark.parametrize(
    ("ttls", "told"),
    [
        ([300], "Alias 'local': a heartbeat failed: down"),
        ([12], "Alias 'local': 1 renewal failed: down"),
        ([12, 12], "Alias 'local': 2 renewals failed: down"),
    ],
)
def test_the_log_says_what_was_not_answered(
    ttls: list[float], told: str, spy: Spy, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [held(str(number), ttl=ttl) for number, ttl in enumerate(ttls)]
    spy.error = BackendUnavailable("down")
    time.seconds += 5.1
    with caplog.at_level(logging.WARNING, "django_dlock"):
        spy.dog.tick()
        assert dispatch.flush(30)
    # Others may come from locks that other tests have left.
    assert [text for text in caplog.messages if text.startswith("Alias")] == [told]
    assert all(lock.held for lock in kept)


def test_a_store_whose_sessions_prove_life_gets_no_heartbeats(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spy.backend, "heartbeat", None)
    kept = held(ttl=300)
    for _ in range(20):
        time.seconds += 1
        dog.tick()
    assert kept.held
    assert spy.calls == []


def test_at_exit_many_leases_are_released_in_one_call(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spy.backend, "renewals_per_call", 3)
    calls: list[tuple[int, float]] = []
    release_many = spy.backend.release_many

    def count(releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        calls.append((len(releases), deadline))
        time.seconds += 0.5
        return release_many(releases, deadline=deadline)

    monkeypatch.setattr(spy.backend, "release_many", count)
    kept = [held(f"n{i}", min_hold=60 if i == 6 else None) for i in range(7)]
    dog.shutdown()
    # Each call has its own deadline, with the full time.
    assert calls == [(3, 1001.0), (3, 1001.5), (1, 1002.0)]
    assert {lock.lost_reason for lock in kept} == {"exit"}
    assert [info.name for info in spy.backend.list()] == ["n6"]


def test_g2_a_refusal_is_reported_within_one_interval(dog: Watchdog, spy: Spy, time: Time) -> None:
    told: list[str] = []
    lock = held(on_lost=lambda lock, reason: told.append(reason))
    spy.backend.break_silently("it", owner=lock.owner or "")
    time.seconds += 10
    dog.tick()
    assert lock.lost_reason == "broken"
    assert dispatch.flush(30)
    assert told == ["broken"]


def test_g2_a_renewal_with_an_unknown_outcome_is_a_loss(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = held()
    monkeypatch.setattr(spy, "renew", lambda *_, **__: [RenewalResult("unknown")])
    time.seconds += 10
    dog.tick()
    assert lock.lost_reason == "refused"


def test_g2_a_renewal_counts_for_the_ttl_that_was_granted(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = held()
    monkeypatch.setattr(spy, "renew", lambda *_, **__: [RenewalResult("renewed", 6.0)])
    time.seconds += 10
    dog.tick()
    assert lock.remaining == pytest.approx(5.94)


def test_g6_a_failed_renewal_is_tried_again_well_before_the_deadline(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()
    spy.error = BackendUnavailable("down")
    time.seconds += 10
    dog.tick()
    for _ in range(15):
        time.seconds += 1
        dog.tick()
    assert len(spy.renewed) >= 8
    assert lock.state == "in_doubt"
    spy.error = None
    time.seconds += 1.5
    dog.tick()
    assert lock.state == "held"
    assert lock.remaining == pytest.approx(29.7)


def test_g6_the_watchdog_survives_any_other_exception(
    dog: Watchdog, spy: Spy, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    lock = held()
    spy.error = ZeroDivisionError("a bug")
    time.seconds += 10
    dog.tick()
    spy.error = None
    time.seconds += 1.5
    dog.tick()
    assert lock.remaining == pytest.approx(29.7)


def test_g2_in_doubt_is_reported_once_and_then_unreachable(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    told: list[str] = []

    def receive(signal: Any, **facts: Any) -> None:
        # Leases of other tests may end meanwhile.
        if facts["owner"] == owner:
            told.append(facts.get("reason", "in_doubt"))

    lock = held()
    owner = lock.owner
    spy.error = BackendUnavailable("down")
    signals.in_doubt.connect(receive)
    signals.lost.connect(receive)
    try:
        while time.seconds < 1040:
            time.seconds += 0.5
            dog.tick()
        assert dispatch.flush(30)
    finally:
        signals.in_doubt.disconnect(receive)
        signals.lost.disconnect(receive)
    assert told == ["in_doubt", "unreachable"]
    assert lock.lost_reason == "unreachable"


def test_g2_lost_is_true_at_the_deadline_without_help_of_a_thread(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()
    time.seconds += 29.69
    assert lock.held
    time.seconds += 0.02
    assert lock.lost
    with pytest.raises(LeaseLost):
        lock.check()


def test_a_late_confirmation_does_not_revive_a_lost_lease(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()
    hold = lease_of(lock)
    time.seconds += 30
    hold.confirm(time.seconds - 1, 30, time.seconds)
    assert lock.lost


def test_g6_renewal_ends_with_the_owning_thread(dog: Watchdog, spy: Spy, time: Time) -> None:
    lock = Lock("it", using="local")
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    time.seconds += 10
    dog.tick()
    assert spy.renewed == []
    assert lock.held
    time.seconds += 20
    dog.tick()
    assert lock.lost_reason == "holder_ended"


def test_g6_renewal_ends_with_the_loop_of_the_task(dog: Watchdog, spy: Spy, time: Time) -> None:
    lock = Lock("it", using="local")

    async def hold(entered: asyncio.Event) -> None:
        async with lock:
            entered.set()
            await asyncio.Event().wait()

    async def begin() -> asyncio.Task[None]:
        entered = asyncio.Event()
        task = asyncio.create_task(hold(entered))
        await entered.wait()
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(begin())
    loop.close()
    time.seconds += 10
    dog.tick()
    assert spy.renewed == []
    assert not task.done()
    # Otherwise asyncio logs an error when it is collected.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    time.seconds += 20
    dog.tick()
    assert lock.lost_reason == "holder_ended"
    # Nothing is left for the block, which ends when the task is collected.
    with pytest.raises(LeaseLost):
        lock.release()


GEVENT = """
from gevent import monkey; monkey.patch_all()
import gevent, threading, django; django.setup()
from django_dlock import Lock, signals
lock, lost = Lock("it", using="local", ttl=3), threading.Event()
living, ends = Lock("living", using="local", ttl=3), threading.Event()
signals.lost.connect(lambda name, reason, **_: (print(name, reason), lost.set()), weak=False)
gevent.spawn(lock.acquire).join()
other = gevent.spawn(lambda: living.acquire() and ends.wait(20))
print(lost.wait(20), living.held)
ends.set(); other.join(); living.release()
"""


def test_g6_renewal_ends_with_the_greenlet() -> None:
    pytest.importorskip("gevent", reason="gevent is not installed: it has no wheel")
    done = subprocess.run(
        [sys.executable, "-c", GEVENT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["it holder_ended", "True True"], done.stderr


def test_g6_renewal_ends_with_the_handle(dog: Watchdog, spy: Spy, time: Time) -> None:
    held()
    gc.collect()
    time.seconds += 10
    dog.tick()
    assert spy.renewed == []


def test_g6_max_hold_cuts_the_last_renewal(dog: Watchdog, spy: Spy, time: Time) -> None:
    lock = held(max_hold=50)
    while time.seconds < 1045:
        time.seconds += 1
        dog.tick()
        assert lock.held
    assert lock.remaining <= 5
    assert (spy.backend.get("it") or pytest.fail("free")).ttl == pytest.approx(5, abs=0.1)
    time.seconds += 5.1
    dog.tick()
    assert lock.lost_reason == "max_hold"
    renewals = len(spy.renewed)
    time.seconds += 60
    dog.tick()
    assert len(spy.renewed) == renewals


def test_short_locks_do_not_each_wake_the_thread(
    dog: Watchdog, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    wakes: list[float] = []
    monkeypatch.setattr(dog, "wake", lambda: wakes.append(time.seconds))
    monkeypatch.setattr(dog, "thread", threading.current_thread())
    held().release()
    # Asleep, as the thread would be if it was woken too late to see the lock.
    dog.wakes_at = dog.tick()
    wakes.clear()
    for _ in range(20):
        time.seconds += 0.1
        held().release()
    assert wakes == []
    time.seconds = dog.wakes_at
    dog.tick()
    time.seconds += 60
    assert dog.tick() == math.inf


def test_the_end_of_a_long_lock_does_not_count_as_late(dog: Watchdog, time: Time) -> None:
    lock = held()
    for _ in range(20):
        time.seconds += 5
        dog.tick()
    lock.release()
    assert dog.tick() == math.inf


def test_a_released_lease_is_not_renewed(dog: Watchdog, spy: Spy, time: Time) -> None:
    held().release()
    time.seconds += 10
    dog.tick()
    assert spy.renewed == []


def test_an_answer_after_the_release_is_ignored(dog: Watchdog, spy: Spy, time: Time) -> None:
    told: list[str] = []
    lock = held(on_lost=lambda lock, reason: told.append(reason))
    answer = spy.answer

    def release_first(*args: Any, **kwargs: Any) -> RenewalResults:
        lock.release()
        return answer(*args, **kwargs)

    spy.answer = release_first  # type: ignore[method-assign]
    time.seconds += 10
    dog.tick()
    assert dispatch.flush(30)
    assert lock.state == "free"
    assert told == []


def test_a_hanging_backend_is_abandoned_at_the_command_timeout_and_tried_again(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()
    spy.hangs = True
    time.seconds += 10
    wakes_at = dog.tick()
    assert wakes_at <= time.seconds + 0.1
    time.seconds += 1.1
    dog.tick()
    assert spy.abandoned == 1
    spy.hangs = False
    time.seconds += 1.5
    dog.tick()
    assert lock.remaining == pytest.approx(29.7)


def test_a_loss_at_the_deadline_is_reported_while_the_backend_hangs(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    told: list[str] = []
    lock = held(on_lost=lambda lock, reason: told.append(reason))
    time.seconds += 29
    spy.hangs = True
    dog.tick()
    time.seconds += 0.9
    dog.tick()
    assert dispatch.flush(30)
    assert lock.lost
    assert len(told) == 1


def test_g2_a_deadline_before_the_end_of_a_call_is_reported_in_time(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()
    hold = lease_of(lock)
    spy.hangs = True
    time.seconds += 29.5
    # A renewal may take a second; the lease has a fifth of a second left.
    dog.tick()
    time.seconds += 0.05
    dog.tick()
    # The step that was due at the deadline, not at the end of the renewal.
    time.seconds += 0.2
    dog.tick()
    assert hold.ended


def test_g6_a_log_handler_that_hangs_delays_no_renewal(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            threads.append(threading.current_thread())

    handler = Handler()
    logger = logging.getLogger("django_dlock")
    logger.addHandler(handler)
    try:
        lock = held()
        for error in (BackendUnavailable("down"), ZeroDivisionError("a bug")):
            spy.error = error
            time.seconds += 10
            dog.tick()
        # A failed renewal, a doubt, a late thread and the loss.
        monkeypatch.setattr(spy.backend, "start_renew", None)
        time.seconds += 10
        dog.tick()
        monkeypatch.setattr(Schedule, "collect_due", None)
        dog.tick()
        dog.note_lateness(time.seconds - 7)
        assert lock.lost
        assert dispatch.flush(30)
    finally:
        logger.removeHandler(handler)
    assert len(threads) >= 5
    assert threading.current_thread() not in threads


def test_a_step_without_anything_due_sends_nothing(dog: Watchdog, spy: Spy, time: Time) -> None:
    lock = held()
    for _ in range(4):
        time.seconds += 1
        dog.tick()
    assert spy.calls == []
    assert lock.held


def test_a_late_thread_is_logged(
    dog: Watchdog, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []

    def hear(late: float, **_: Any) -> None:
        heard.append(late)

    signals.renewal_due.connect(hear)
    with caplog.at_level(logging.WARNING, "django_dlock"):
        dog.note_lateness(time.seconds - 7)
        # Woken before that, for something else.
        dog.note_lateness(time.seconds + 7)
        assert dispatch.flush(30)
    signals.renewal_due.disconnect(hear)
    assert heard == [pytest.approx(7)]
    assert "7.0 s late" in caplog.text


def test_g1_a_thread_that_sleeps_too_long_is_woken(dog, time, monkeypatch):
    """A thread's sleep does not include the time of a suspension, but our clock does."""
    wakes: list[float] = []
    monkeypatch.setattr(dog, "wake", lambda: wakes.append(time.seconds))
    monkeypatch.setattr(dog, "thread", threading.current_thread())
    dog.wakes_at = time.seconds + 5
    time.seconds += 100
    with Lock("it", using="local"):
        assert wakes == [time.seconds]


def test_at_exit_nobody_waits_for_a_thread_that_has_ended(
    dog: Watchdog, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "is_stranded", lambda: True)
    waits: list[float | None] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(event, timeout)

    assert dog.thread is None
    monkeypatch.setattr(dispatch, "settle", lambda timeout: None)
    monkeypatch.setattr(threading.Event, "wait", noted)
    dog.shutdown()
    assert dispatch.PATIENCE_AT_EXIT not in waits
