"""Queues make their calls in order, survive them, and give up those that take too long."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from django_dlock.core import event_queue, supervisor
from django_dlock.core.event_queue import EventQueue
from django_dlock.core.supervisor import Supervisor


@pytest.fixture
def watcher() -> Supervisor:
    return Supervisor()


@pytest.fixture
def queue(watcher: Supervisor) -> EventQueue:
    return EventQueue(watcher, "dlock-test", calls_users=True)


class Hanging:
    """A function that hangs until it is freed."""

    def __init__(self) -> None:
        self.calls = threading.Semaphore(0)
        self.free = threading.Event()
        self.made = 0

    def __call__(self) -> None:
        self.made += 1
        self.calls.release()
        self.free.wait(30)

    def wait_for_call(self) -> None:
        assert self.calls.acquire(timeout=30)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.free.set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "HANGING_AFTER", 0.01)


def test_calls_are_made_in_order_on_one_thread(queue: EventQueue) -> None:
    told: list[tuple[int, str]] = []
    for i in range(100):
        queue.post(lambda i=i: told.append((i, threading.current_thread().name)))  # type: ignore[misc]
    assert queue.flush(30)
    assert told == [(i, "dlock-test") for i in range(100)]


def test_the_idle_thread_is_woken_for_what_was_put(queue: EventQueue) -> None:
    # Then it waits for as long as nobody wakes it.
    assert queue.flush(30)
    made = threading.Event()
    queue.put(made.set, "it")
    queue.nudge()
    assert made.wait(30)


def test_a_call_that_raises_does_not_stop_the_next(
    queue: EventQueue, watcher: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> None:
        raise SystemExit("receiver")

    queue.post(raises)
    assert queue.flush(30)
    assert watcher.flush(30)
    (line,) = caplog.messages
    assert line.startswith("A callback for a lock event raised: ")
    assert line.endswith(".raises")


def test_a_handler_of_the_log_that_raises_does_not_stop_the_next(
    watcher: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises() -> None:
        raise SystemExit("handler")

    watcher.logs.post(raises)
    assert watcher.logs.flush(30)
    assert "SystemExit: handler" in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_g2_what_takes_too_long_is_given_up_and_named(
    queue: EventQueue, watcher: Supervisor, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    queue.post(hanging, hanging, "it")
    hanging.wait_for_call()
    queue.post(lambda: told.append("later"), hanging, "it")
    queue.post(lambda: told.append("other"))
    assert queue.flush(30), "another thread goes on"
    assert told == ["other"]
    assert watcher.flush(30)
    (line,) = caplog.messages
    assert "tests.unit.test_dispatch.Hanging has taken" in line
    # What has waited for it is made when it returns.
    made = threading.Event()
    queue.post(made.set, hanging, "it")
    hanging.free.set()
    assert made.wait(30)
    assert told == ["other", "later"]


@pytest.mark.usefixtures("impatient")
def test_several_calls_of_one_function_may_be_given_up(watcher: Supervisor) -> None:
    queue = EventQueue(watcher, "dlock-test", calls_users=True, most_at_once=2)
    hanging = [Hanging() for _ in range(3)]
    for each in hanging:
        queue.post(each, "it", "it")
    assert queue.flush(30)
    try:
        assert [each.made for each in hanging] == [1, 1, 0]
    finally:
        for each in hanging:
            each.free.set()
    hanging[2].wait_for_call()


@pytest.mark.usefixtures("impatient")
def test_the_threads_are_bounded_and_a_queue_goes_on_when_one_returns(
    watcher: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_queue, "MOST_HANGING", 2)
    queue = EventQueue(watcher, "dlock-bounded", calls_users=True)
    hanging = [Hanging() for _ in range(3)]
    for number, each in enumerate(hanging):
        queue.post(each, each, number)
        each.wait_for_call()
    try:
        assert not queue.flush(0.1)
        assert sum(thread.name == "dlock-bounded" for thread in threading.enumerate()) == 3
        hanging[0].free.set()
        assert queue.flush(30)
    finally:
        for each in hanging:
            each.free.set()


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Let no thread of this name start while it is in the list, which is returned."""
    names, start = [name], threading.Thread.start

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    return names


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ["dlock-supervisor", "dlock-test"])
def test_a_system_with_too_many_threads_is_asked_again(
    queue: EventQueue, hanging: Hanging, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(event_queue, "RETRY_EVERY", 0.01)
    if name == "dlock-test":
        assert queue.flush(30)
    names = refuse_threads(monkeypatch, name)
    queue.post(hanging, hanging, "it")
    hanging.wait_for_call()
    assert not queue.flush(0.1)
    names.clear()
    if name == "dlock-supervisor":
        # Asked with the next call that begins.
        hanging.free.set()
        assert queue.flush(30)
        hanging.free.clear()
        queue.post(hanging, hanging, "it")
        hanging.wait_for_call()
    assert queue.flush(30), "another thread goes on"


def test_a_call_is_made_although_a_connection_cannot_be_closed(
    watcher: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError("gone away")

    monkeypatch.setattr(event_queue, "close_old_connections", fails)
    queue = EventQueue(watcher, "dlock-test", calls_users=True, uses_databases=True)
    told: list[int] = []
    queue.post(lambda: told.append(1))
    assert queue.flush(30)
    assert told == [1]
    assert watcher.flush(30)
    assert "Could not close a connection: gone away" in caplog.messages


@pytest.mark.usefixtures("impatient")
def test_a_thread_that_returns_late_closes_its_connections(
    watcher: Supervisor, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_by: list[threading.Thread] = []
    monkeypatch.setattr(
        event_queue,
        "close_all_connections",
        lambda: closed_by.append(threading.current_thread()),
    )
    queue = EventQueue(watcher, "dlock-test", calls_users=True, uses_databases=True)
    called_by: list[threading.Thread] = []

    def call() -> None:
        called_by.append(threading.current_thread())
        hanging()

    queue.post(call, hanging, "it")
    hanging.wait_for_call()
    assert queue.flush(30)
    hanging.free.set()
    called_by[0].join(30)
    assert called_by[0] in closed_by


def test_what_does_not_fit_into_a_queue_is_counted_and_told(
    queue: EventQueue,
    watcher: Supervisor,
    hanging: Hanging,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[int] = []
    queue.post(hanging)
    hanging.wait_for_call()
    with monkeypatch.context() as narrow:
        narrow.setattr(event_queue, "MAX_QUEUED", 3)
        for i in range(10):
            queue.post(lambda i=i: told.append(i), "shop.receive")  # type: ignore[misc]
    hanging.free.set()
    assert queue.flush(30)
    assert told == [0, 1, 2]
    watcher.end()
    counts = [int(line.split()[0]) for line in caplog.messages if "were not made" in line]
    rest = [line for line in caplog.messages if "before the process ended" in line]
    left = 7 - sum(counts)
    assert not left or f"shop.receive ({left} times) was not called" in rest[0]


def test_the_names_of_calls_that_are_not_made_fill_no_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each lock event has a name of its own."""
    told: list[tuple[Any, ...]] = []

    class Watcher(Supervisor):
        def expect(self, queue: EventQueue, at: float) -> None:
            pass

        def tell(self, level: int, message: str, *args: Any, **facts: Any) -> None:
            told.append(args)

    queue = EventQueue(Watcher(), "dlock-test")
    monkeypatch.setattr(event_queue, "MAX_QUEUED", 0)
    for i in range(100):
        queue.post(lambda: None, f"The lock event 'lost' of lock {i}")
    queue.look(0.0)
    assert sum(count for count, _ in told) == 100
    assert len(told) == event_queue.MOST_NAMED + 1
    assert told[-1] == (100 - event_queue.MOST_NAMED, "others")


@pytest.mark.usefixtures("impatient")
def test_what_waits_for_a_function_that_hangs_is_bounded(
    queue: EventQueue,
    watcher: Supervisor,
    hanging: Hanging,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(event_queue, "MOST_OF_ONE", 1)
    monkeypatch.setattr(event_queue, "TELL_EVERY", 0.0)
    queue.post(hanging, "it", "it")
    hanging.wait_for_call()
    assert queue.flush(30)
    for _ in range(3):
        queue.post(lambda: None, "it", "it")
        assert queue.flush(30)
    told = threading.Event()
    while not told.wait(0.01):
        assert watcher.flush(30)
        counts = [int(line.split()[0]) for line in caplog.messages if "were not made" in line]
        if sum(counts) == 2:
            told.set()


def test_what_interrupts_a_post_may_post_to_any_queue() -> None:
    """A signal handler or a finalizer may, in several threads at once."""
    both = threading.Barrier(2)

    class Interrupted(Supervisor):
        def prepare(self) -> None:
            # In the middle of a post.
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            posts = other.pop(threading.current_thread().name, None)
            if posts is not None:
                posts.post(lambda: None)
            super().prepare()

    watcher = Interrupted()
    one, two = (EventQueue(watcher, f"dlock-{name}") for name in ("one", "two"))
    other = {"posts-one": two, "posts-two": one}
    threads = [
        threading.Thread(target=queue.post, args=(lambda: None,), name=name, daemon=True)
        for name, queue in (("posts-one", one), ("posts-two", two))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert watcher.flush(30)


def fork(code: Callable[[], int] = lambda: 0) -> int:
    """Fork; return the child's exit code, which is its result."""
    pid = os.fork()
    if pid == 0:
        os._exit(code())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_waits_for_the_current_call(
    queue: EventQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the child would have half of it forever, for example a lock inside SQLite."""
    # A busy machine may take longer for a call than a fork waits.
    monkeypatch.setattr(supervisor, "FORK_PATIENCE", 30.0)
    began, inside = threading.Event(), [0]

    def deliver() -> None:
        inside[0] = 1
        began.set()
        time.sleep(0.1)
        inside[0] = 0

    for _ in range(3):
        queue.post(deliver)
    assert began.wait(30)
    assert fork(lambda: inside[0]) == 0
    assert queue.flush(30)


def test_a_fork_waits_only_briefly_for_a_call_that_hangs(
    queue: EventQueue, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FORK_PATIENCE", 0.05)
    queue.post(hanging)
    hanging.wait_for_call()
    # The child starts its own thread.
    assert fork(lambda: not queue.flush(30)) == 0
    hanging.free.set()
    assert queue.flush(30)


def test_a_fork_waits_for_a_call_that_posts_to_another_queue(
    queue: EventQueue, watcher: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FORK_PATIENCE", 30.0)
    other = EventQueue(watcher, "dlock-other")
    began, goes_on, inside = threading.Event(), threading.Event(), [1]

    def deliver() -> None:
        began.set()
        goes_on.wait(30)
        queue.post(lambda: None)
        other.post(lambda: None)
        inside[0] = 0

    queue.post(deliver)
    assert began.wait(30)
    threading.Timer(0.05, goes_on.set).start()
    assert fork(lambda: inside[0]) == 0
    assert watcher.flush(30)


def test_an_interrupt_anywhere_before_a_fork_leaves_nothing_locked(
    queue: EventQueue, watcher: Supervisor
) -> None:
    lines, raises_at = 0, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if "django_dlock/core" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == raises_at:
                raise KeyboardInterrupt
        return trace

    earlier = sys.gettrace()
    interrupted = True
    while interrupted:
        interrupted, lines = False, 0
        raises_at += 1
        sys.settrace(trace)
        try:
            watcher.before_fork()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(earlier)
        # Python forks nevertheless.
        watcher.after_fork_in_parent()
        posting = threading.Thread(target=queue.post, args=(lambda: None,), daemon=True)
        posting.start()
        posting.join(5)
        assert not posting.is_alive(), f"interrupted at line {raises_at}"
    assert raises_at > 5
    assert queue.flush(30)


def test_a_receiver_may_fork(queue: EventQueue) -> None:
    codes: list[int] = []
    queue.post(lambda: codes.append(fork()))
    assert queue.flush(30)
    assert codes == [0]


def test_a_child_makes_no_call_of_its_parent(queue: EventQueue, hanging: Hanging) -> None:
    told: list[int] = []
    queue.post(hanging)
    hanging.wait_for_call()
    queue.post(lambda: told.append(1))
    assert fork(lambda: len(told) if queue.flush(30) else 9) == 0
    hanging.free.set()
    assert queue.flush(30)
    assert told == [1]


# -- the end of the interpreter, in which no thread can start ---------------------------------


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("ending")
def test_at_the_end_the_last_thread_makes_the_calls_of_the_package(watcher: Supervisor) -> None:
    rows = EventQueue(watcher, "dlock-rows")
    told: list[str] = []
    rows.post(lambda: told.append(threading.current_thread().name))
    watcher.settle(30)
    assert told == [threading.current_thread().name]


@pytest.mark.usefixtures("ending")
def test_at_the_end_nobody_waits_for_a_function_of_the_project(
    queue: EventQueue, watcher: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    queue.post(lambda: None, "shop.receive")
    watcher.end()
    assert caplog.messages == [
        "shop.receive was not called, or did not return, before the process ended"
    ]


def test_at_the_end_a_thread_that_is_left_makes_all_calls(
    queue: EventQueue, watcher: Supervisor, request: pytest.FixtureRequest
) -> None:
    assert watcher.logs.flush(30)
    request.getfixturevalue("ending")
    told: list[str] = []
    queue.post(lambda: told.append(threading.current_thread().name))
    watcher.settle(30)
    assert told == ["dlock-log"]
