"""How an acquire proceeds, shown by the calls it makes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from django_dlock import BackendRefused, BackendUnavailable, Lock, clock, locks
from django_dlock.core import granting
from django_dlock.core.flow import Call, Flow
from django_dlock.lease import Contention, Lease, LeaseRequest
from django_dlock.process import current
from django_dlock.testing import FakeClock

TAKEN = Contention("owner", "held", 30.0, 0.0)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    locks.reset()


@pytest.fixture
def held() -> Iterator[Lock]:
    """``it``, held until the test releases it."""
    lock = Lock("it", using="local", bound=False)
    lock.acquire()
    yield lock
    if lock.held:
        lock.release()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


async def until_waiting(count: int) -> None:
    end = time.monotonic() + 20
    while waiters() != count:
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def waiters() -> int:
    info = locks["local"].get("it")
    return 0 if info is None else info.waiting


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
    monkeypatch.setattr(
        backend, "break_silently", lambda *a, **k: broken.append((*a, k["owner"])) or True
    )
    assert Lock("it", using="local").acquire(blocking=False)
    assert broken == [("it", "owner")]


@pytest.mark.parametrize("kind", ["cooling", "parked", "reserved"])
def test_a_lease_of_another_kind_is_never_judged_by_a_process(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = locks["local"]
    contention = dead()._replace(kind=kind)
    monkeypatch.setattr(backend, "acquire", lambda *a, **k: contention)
    monkeypatch.setattr(backend, "break_silently", lambda *a, **k: pytest.fail("broken"))
    assert not Lock("it", using="local").acquire(blocking=False)


def test_a_break_that_came_too_late_is_not_repeated_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = locks["local"]
    contention = dead()
    breaks: list[str] = []
    monkeypatch.setattr(backend, "acquire", lambda *a, **k: contention)
    monkeypatch.setattr(backend, "break_silently", lambda name, **k: breaks.append(name))
    assert not Lock("it", using="local").acquire(blocking=False)
    assert breaks == ["it"]


def test_the_last_try_no_longer_counts_as_a_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = locks["local"]
    waits: list[bool] = []

    def acquire(request: Any, **_: Any) -> Contention:
        waits.append(request.waits)
        return TAKEN

    monkeypatch.setattr(backend, "acquire", acquire)
    monkeypatch.setattr(backend, "wait", lambda *a, until, **k: _sleep_until(until))
    assert not Lock("it", using="local").acquire(timeout=0.01)
    assert waits == [True, False]


def _sleep_until(until: float) -> None:
    while clock.now() < until:
        pass


def test_g10_a_break_gets_only_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    began, timeout = clock.now(), locks["local"].command_timeout
    flow = flow_for(patience=0)
    next(flow)
    # The answer took nearly all of the time.
    monkeypatch.setattr(clock, "now", lambda: began + 0.9 * timeout)
    method, _, _, kwargs = flow.send(dead())
    assert method == locks["local"].break_silently
    assert began + timeout <= kwargs["deadline"] < began + 1.5 * timeout


# -- the end of a wait ----------------------------------------------------------------------


def flow_for(patience: float | None = 20) -> Flow[Lease | None]:
    """An acquire whose calls are made by the test."""
    request = LeaseRequest("it", "me", 30.0, waits=patience != 0)
    return granting.grant_flow(
        locks["local"], request, patience=patience, met=len, broke=lambda *_: None
    )


def test_g4_a_waiter_breaks_the_lease_when_the_holders_death_is_proven() -> None:
    backend, flow = locks["local"], flow_for()
    assert next(flow)[0] == backend.acquire
    method, _, _, kwargs = flow.send(TAKEN)
    assert method == backend.wait
    assert not kwargs["interrupted"]()
    assert flow.send(None)[0] == backend.acquire
    # The holder is proven dead during the wait, so it asks again and breaks the lease.
    flow = flow_for()
    next(flow)
    method, _, _, kwargs = flow.send(dead())
    assert method == backend.wait
    assert kwargs["interrupted"]()
    assert flow.send(None)[0] == backend.acquire
    method, _, _, kwargs = flow.send(dead())
    assert (method, kwargs["owner"]) == (backend.break_silently, "owner")
    # It breaks once; if the name is still taken, it waits as usual.
    assert flow.send(True)[0] == backend.acquire
    method, _, _, kwargs = flow.send(dead())
    assert method == backend.wait
    assert not kwargs["interrupted"]()


async def test_g7_cancelled_coroutines_leave_the_queue(held: Lock) -> None:
    tasks = [asyncio.create_task(Lock("it", using="local").aacquire()) for _ in range(6)]
    await until_waiting(6)
    for task in tasks[:3]:
        task.cancel()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(Lock("it", using="local").aacquire(timeout=20), 0.05)
    await until_waiting(3)
    held.release()
    done, waiting = await asyncio.wait(tasks[3:], return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [True]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- while the backend gives no answer -----------------------------------------------------

NO_ANSWER = BackendUnavailable("no answer", "it", "local")


@pytest.fixture
def time_() -> Iterator[FakeClock]:
    with FakeClock() as fake:
        yield fake


def sleeps(flow: Flow[Any], call: Call) -> float:
    """The seconds of a pause, after which the flow continues."""
    function, _, (seconds,), _ = call
    assert function == time.sleep
    assert 0 < seconds <= granting.LONGEST_PAUSE
    return seconds


def outage(flow: Flow[Any], fake: FakeClock, call: Call) -> float:
    """Answer nothing until the flow gives up; return the seconds that it kept trying."""
    began, backend = fake(), locks["local"]
    asked = backend.acquire, backend.wait, backend.break_silently
    with pytest.raises(BackendUnavailable):
        while True:
            assert call[0] in asked
            call = flow.throw(NO_ANSWER)
            fake.advance(sleeps(flow, call))
            call = next(flow)
    return fake() - began


def test_g10_an_acquire_with_patience_survives_an_outage() -> None:
    flow = flow_for()
    backend, (_, _, request, _) = locks["local"], next(flow)
    for _ in range(3):
        sleeps(flow, flow.throw(NO_ANSWER))
        # As the same owner, which may have been granted the name without knowing it.
        method, _, args, _ = next(flow)
        assert (method, args) == (backend.acquire, request)
    lease = Lease("it", "me", 1, 30.0, clock.now())
    with pytest.raises(StopIteration) as ended:
        flow.send(lease)
    assert ended.value.value is lease


@pytest.mark.parametrize(
    ("patience", "outage_patience", "tried"),
    [(20, 5, 5), (2, 5, 2), (None, 5, 5), (20, 0, 0), (0, 5, 0)],
)
def test_g10_an_outage_is_endured_for_the_shorter_of_both_patiences(
    patience: float | None,
    outage_patience: float,
    tried: float,
    time_: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = replace(locks["local"].options, outage_patience=outage_patience)
    monkeypatch.setattr(locks["local"], "options", options)
    flow = flow_for(patience)
    assert outage(flow, time_, next(flow)) == pytest.approx(tried)


def test_g10_an_outage_counts_from_the_call_that_was_not_answered(time_: FakeClock) -> None:
    flow = flow_for()
    next(flow)
    time_.advance(3)
    call = flow.throw(NO_ANSWER)
    time_.advance(sleeps(flow, call))
    assert outage(flow, time_, next(flow)) < 2.1


@pytest.mark.parametrize("where", ["acquire", "wait", "break_silently"])
def test_g10_an_outage_may_begin_at_any_call_and_each_has_its_own_patience(
    where: str, time_: FakeClock
) -> None:
    flow = flow_for(patience=60)
    next(flow)
    sleeps(flow, flow.throw(NO_ANSWER))
    # Nearly all of it is used up before an answer arrives.
    time_.advance(4.9)
    next(flow)
    call = flow.send(dead())
    if where != "wait":
        call = flow.send(None)
    if where == "break_silently":
        call = flow.send(dead())
    assert call[0] == getattr(locks["local"], where)
    time_.advance(1)
    assert outage(flow, time_, call) == pytest.approx(5)


def test_g10_a_backend_that_refuses_is_not_asked_again() -> None:
    flow = flow_for()
    next(flow)
    with pytest.raises(BackendRefused):
        flow.throw(BackendRefused("wrong password", "it", "local"))


def test_g10_a_grant_that_ended_during_an_outage_is_no_contention(time_: FakeClock) -> None:
    flow = flow_for(patience=4)
    next(flow)
    sleeps(flow, flow.throw(NO_ANSWER))
    time_.advance(3.99)
    next(flow)
    time_.advance(1)
    # This is the answer to an owner whose lease has ended.
    with pytest.raises(BackendUnavailable):
        flow.send(TAKEN._replace(owner=""))


def test_a_grant_that_ended_during_an_outage_is_asked_for_again_while_there_is_time() -> None:
    flow = flow_for()
    next(flow)
    sleeps(flow, flow.throw(NO_ANSWER))
    next(flow)
    # Now the store answers, so the caller goes on with a new request.
    with pytest.raises(StopIteration) as ended:
        flow.send(TAKEN._replace(owner=""))
    assert ended.value.value is None


def broken_on_its_way(held: Lock, monkeypatch: pytest.MonkeyPatch, *, taken: bool) -> list[str]:
    """End the first wait with a lease that was handed over and then broken; return its owner."""
    backend, owners = locks["local"], list[str]()

    def hand_over(request: LeaseRequest) -> None:
        monkeypatch.undo()
        held.release()
        assert isinstance(backend.acquire(request, deadline=clock.now() + 1), Lease)
        assert backend.break_silently("it", owner=request.owner)
        owners.append(request.owner)
        if taken:
            held.acquire()

    def wait(request: LeaseRequest, *args: Any, **kwargs: Any) -> None:
        hand_over(request)

    async def async_wait(request: LeaseRequest, *args: Any, **kwargs: Any) -> None:
        hand_over(request)

    monkeypatch.setattr(backend, "wait", wait)
    monkeypatch.setattr(backend, "async_wait", async_wait)
    return owners


@pytest.mark.parametrize("how", ["thread", "coroutine"])
@pytest.mark.parametrize("patience", [None, 20.0])
def test_a_waiter_whose_lease_was_broken_after_the_hand_over_asks_again(
    patience: float | None, how: str, held: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = broken_on_its_way(held, monkeypatch, taken=False)
    lock = Lock("it", using="local", wait=patience)
    assert lock.acquire() if how == "thread" else asyncio.run(lock.aacquire())
    assert owners
    assert lock.owner not in owners
    info = locks["local"].get("it")
    assert info is not None
    assert info.owner == lock.owner
    lock.release()


def test_a_waiter_whose_lease_was_broken_after_the_hand_over_waits_until_its_patience_ends(
    held: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = broken_on_its_way(held, monkeypatch, taken=True)
    began = clock.now()
    assert not Lock("it", using="local").acquire(timeout=0.2)
    assert clock.now() - began >= 0.2
    assert owners
    assert waiters() == 0


def test_an_interrupt_cancels_the_current_attempt(
    held: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = broken_on_its_way(held, monkeypatch, taken=False)
    acquire, backend = locks["local"].acquire, locks["local"]

    def interrupted(request: LeaseRequest, **kwargs: Any) -> Any:
        answer = acquire(request, **kwargs)
        if owners and request.owner not in owners:
            raise KeyboardInterrupt
        return answer

    backend.acquire = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            Lock("it", using="local", wait=None).acquire()
    finally:
        del backend.acquire
    until(lambda: not backend.locked("it", deadline=clock.now() + 1))


@pytest.mark.parametrize("how", ["thread", "coroutine"])
def test_both_drivers_pause_and_continue(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, answers = locks["local"], [NO_ANSWER, NO_ANSWER]
    acquire = backend.acquire

    def fails_twice(*args: Any, **kwargs: Any) -> Any:
        if answers:
            raise answers.pop()
        return acquire(*args, **kwargs)

    monkeypatch.setattr(backend, "acquire", fails_twice)
    lock = Lock("it", using="local")
    assert lock.acquire() if how == "thread" else asyncio.run(lock.aacquire())
    assert answers == []


# -- waiters -----------------------------------------------------------------------------


def test_a_signal_handler_may_wait_while_the_call_that_it_interrupts_does(held: Lock) -> None:
    answers: list[bool] = []

    def handler(*_: Any) -> None:
        answers.append(Lock("it", using="local").acquire(timeout=0.01))
        held.release()
        with Lock("it", using="local", wait=20):
            answers.append(True)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.main_thread().ident
        assert main is not None

        def send_signal() -> None:
            until(waiters)
            signal.pthread_kill(main, signal.SIGUSR1)

        thread = threading.Thread(target=send_signal)
        thread.start()
        with Lock("it", using="local", wait=20):
            answers.append(True)
        thread.join(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert answers == [False, True, True]


def test_many_threads_at_once_all_get_the_lock() -> None:
    counts = [0] * 8

    def work(number: int) -> None:
        for turn in range(50):
            lock = Lock("it", using="local")
            # Some give up at once.
            if lock.acquire(timeout=0.0001 if turn % 3 else 20):
                counts[number] += 1
                lock.release()

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert min(counts) >= 17
    assert waiters() == 0


GEVENT = """
from gevent import monkey; monkey.patch_all()
import threading, django; django.setup()
from django_dlock import Lock, locks
held = Lock("it", using="local", bound=False); held.acquire()
done = []
def work(number):
    with Lock("it", using="local", wait=20):
        done.append(number)
threads = [threading.Thread(target=work, args=[n]) for n in range(50)]
for thread in threads:
    thread.start()
while locks["local"].get("it").waiting < 50:
    threading.Event().wait(0.001)
held.release()
for thread in threads:
    thread.join(20)
print(sorted(done) == list(range(50)))
"""


def test_greenlets_wait_like_threads() -> None:
    pytest.importorskip("gevent", reason="gevent is not installed: it has no wheel")
    done = subprocess.run(
        [sys.executable, "-c", GEVENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["True"], done.stdout
