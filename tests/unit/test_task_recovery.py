"""What a worker's parent does about a dead child, with ``local`` and without a worker."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, Task
from celery.app.trace import trace_task
from celery.worker import state
from kombu.asynchronous import Hub, get_event_loop, set_event_loop

from django_dlock import Lock, clock, process, signals
from django_dlock.backends.base import BaseLockBackend
from django_dlock.celery import owners
from django_dlock.celery.parent import LockedRequest
from django_dlock.celery.publishing import destination
from django_dlock.celery.worker import lock_recovery, lost_children
from django_dlock.celery.worker.lock_recovery import Recovery, Suspect
from django_dlock.core import dispatch
from django_dlock.exceptions import BackendUnavailable
from django_dlock.handler import locks
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from tests.support.deliveries import in_memory, task, waiting
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

OURS = "of the delivery"


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@pytest.fixture
def hub() -> Iterator[Hub]:
    before = get_event_loop()
    hub = set_event_loop(Hub())
    yield hub
    hub.close()
    set_event_loop(before)


@pytest.fixture
def broken() -> Iterator[list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []

    def receive(**facts: Any) -> None:
        told.append(facts)

    signals.broken.connect(receive)
    yield told
    signals.broken.disconnect(receive)


class Child:
    """A process that lives until it is killed."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        self.identity = process.identity_of(self.popen.pid)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.kill()


@pytest.fixture
def dead(child: Child) -> Child:
    child.kill()
    return child


def acquire(name: str, owner: str, **options: Any) -> Lease | Contention:
    backend = locks["default"]
    return backend.acquire(
        LeaseRequest(name, owner, 30, **options), deadline=backend.call_deadline()
    )


def owner_of(name: str) -> str | None:
    lease = locks["default"].get(name)
    return None if lease is None else lease.owner


def suspect(made: Any, child: Child, order: int = 1) -> Suspect:
    key = made.dlock_options.lock_key
    return Suspect(made, "an id", key, (order,), {}, OURS, child.identity)


def recovered(made: Any, child: Child) -> Recovery:
    """A finished recovery."""
    found = Recovery(suspect(made, child))
    found.start()
    found.go()
    eventually(found.wait)
    return found


# -- broken leases ----------------------------------------------------------------


def test_g4_a_lease_that_the_dead_delivery_had_acquired_again_is_also_broken(app, dead):
    acquire("order:1", owners.again(OURS, 2))
    recovered(task(app), dead)
    assert owner_of("order:1") is None


def test_g4_a_dead_deliverys_lease_is_broken_and_reported(app, dead, broken):
    acquire("order:1", OURS)
    recovered(task(app), dead)
    assert owner_of("order:1") is None
    renewal = Renewal("order:1", OURS, 30.0)
    deadline = clock.now() + 1
    (told,) = locks["default"].renew([renewal], process="p", deadline=deadline)
    assert told.outcome == "broken"
    assert dispatch.flush(30)
    assert [(each["name"], each["owner"], each["reason"]) for each in broken] == [
        ("order:1", OURS, "holder_dead")
    ]


def test_g4_nothing_is_broken_before_the_process_is_known_dead(app, child, monkeypatch):
    looks = threading.Semaphore(0)
    real = process.death_proof

    def look(other: process.ProcessIdentity) -> str | None:
        looks.release()
        return real(other)

    monkeypatch.setattr(process, "death_proof", look)
    acquire("order:1", OURS)
    found = Recovery(suspect(task(app), child))
    found.start()
    found.go()
    for _ in range(3):
        assert looks.acquire(timeout=30)
    assert owner_of("order:1") == OURS
    assert not found.wait(0)
    child.kill()
    eventually(lambda: owner_of("order:1") is None)


def test_a_process_that_does_not_die_keeps_its_lease(app, child, monkeypatch, caplog):
    monkeypatch.setattr(lock_recovery, "DYING", 0.1)
    acquire("order:1", OURS)
    recovered(task(app), child)
    assert owner_of("order:1") == OURS
    assert "is still alive" in caplog.text


def test_g4_only_the_deliverys_own_lease_is_broken(app, dead, broken):
    acquire("order:1", "of another")
    recovered(task(app), dead)
    assert owner_of("order:1") == "of another"
    assert dispatch.flush(30)
    assert broken == []


def test_a_parked_lease_is_kept_for_its_retry(app, dead):
    acquire("order:1", "of the chain", kind="parked")
    recovered(task(app), dead)
    assert owner_of("order:1") == "of the chain"


def test_a_late_acquire_of_a_dead_child_is_not_granted(app, dead):
    recovered(task(app), dead)
    assert isinstance(acquire("order:1", OURS), Contention)
    assert owner_of("order:1") is None


# -- errors -------------------------------------------------------------------


def test_a_key_that_raises_ends_the_recovery(app, dead, caplog):
    def key(order: int) -> str:
        raise KeyError("no such order")

    recovered(task(app, lock_key=key), dead)
    assert "its lock could not be recovered" in caplog.text
    assert "no such order" in caplog.text


def test_a_key_that_raises_is_not_quoted_if_arguments_are_private(app, dead, caplog):
    def key(order: int) -> str:
        raise KeyError("no such order")

    recovered(task(app, lock_key=key, store_arguments=False), dead)
    assert "its lock could not be recovered: KeyError(…) at " in caplog.text
    assert " in key" in caplog.text
    assert "no such order" not in caplog.text


def test_a_break_prevented_by_an_outage_is_repeated_later(app, dead, monkeypatch):
    acquire("order:1", OURS)

    def away(self: BaseLockBackend, name: str) -> None:
        raise BackendUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(type(locks["default"]), "get", away)
        recovered(task(app), dead)
    eventually(lambda: owner_of("order:1") is None)


def test_if_no_thread_can_start_nothing_waits(app, dead, monkeypatch):
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    found = Recovery(suspect(task(app), dead))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        found.start()
    assert found.over


# -- the request -----------------------------------------------------------------------


class Worker:
    """The request of one message in a worker's parent, and what happened to the message."""

    def __init__(self, app: Celery, made: Any, pid: int | None) -> None:
        made.apply_async((1,))
        self.outcomes: list[str] = []
        self.request = LockedRequest(
            waiting(app),
            app=app,
            task=made,
            on_ack=lambda *_: self.outcomes.append("acknowledged"),
            on_reject=lambda *args: self.outcomes.append("requeued" if args[-1] else "rejected"),
        )
        self.request.worker_pid = pid

    @property
    def owner(self) -> str:
        """The owner under which the child acquires."""
        pid = self.request.worker_pid or self.request._sent_to()
        return owners.in_child(self.request.request_dict[owners.KEY], pid)

    def lose(self, error: Exception | None = None, **options: Any) -> None:
        self.request.on_failure(info(error or WorkerLostError("lost")), **options)


def info(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except type(error):
        return ExceptionInfo()


def run(hub: Hub, until: Callable[[], object]) -> None:
    def turn() -> bool:
        next(hub.loop)
        return bool(until())

    eventually(turn)


class Consumer:
    """Celery's, without an event loop."""

    def __init__(self, driver: str) -> None:
        self.connection = SimpleNamespace(transport=SimpleNamespace(driver_type=driver))
        self.later: list[Callable[[], object]] = []

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        self.later.append(functools.partial(function, *args))


@pytest.mark.parametrize(("driver", "at_once"), [("sql", []), ("filesystem", ["requeued"])])
def test_g13_the_thread_that_reads_a_table_returns_a_message_to_it(
    app, monkeypatch, driver, at_once
):
    """Another thread would find it in SQLAlchemy's session; the worker would keep the message."""
    consumer = Consumer(driver)
    monkeypatch.setattr(destination, "_consumer", lambda: consumer)
    worker = Worker(app, task(app), None)
    worker.lose()
    assert worker.outcomes == at_once
    for later in consumer.later:
        later()
    assert worker.outcomes == ["requeued"]


@pytest.mark.parametrize("option", ["acks_late", "reject_on_worker_lost"])
def test_g13_the_reservation_of_a_dead_child_is_released_if_its_message_is_gone(app, option):
    worker = Worker(app, task(app, unique_until="done", **{option: False}), None)
    worker.lose()
    assert "requeued" not in worker.outcomes
    eventually(lambda: locks["default"].list(prefix="unique:") == [])


@pytest.mark.skipif(
    not hasattr(Task, "retry_on_worker_lost"), reason="this Celery has no retry_on_worker_lost"
)
@pytest.mark.parametrize("left", [0, 1])
def test_g13_the_reservation_of_a_dead_child_is_released_after_its_last_retry(app, left):
    options = {"retry_on_worker_lost": True, "max_retries": left, "default_retry_delay": 0}
    worker = Worker(app, task(app, unique_until="done", **options), None)
    worker.lose()
    assert "requeued" not in worker.outcomes
    if left:
        assert waiting(app).headers["retries"] == 1
        assert len(locks["default"].list(prefix="unique:")) == 1
    else:
        eventually(lambda: locks["default"].list(prefix="unique:") == [])


@pytest.fixture(params=["the loop waits", "the loop goes on"])
def patience(request, monkeypatch) -> None:
    """Whether a recovery ends within the short time that the worker's loop waits itself."""
    monkeypatch.setattr(lost_children, "AT_ONCE", 30 if request.param == "the loop waits" else 0)


def test_g4_a_lock_is_free_before_the_pool_forks_another_child(app, hub, dead, monkeypatch):
    """A fork can take a second on a busy machine; one check handles all dead children."""
    monkeypatch.setattr(lost_children, "AT_ONCE", 30)
    worker = Worker(app, task(app), dead.popen.pid)
    acquire("order:1", worker.owner)
    worker.lose()
    assert (owner_of("order:1"), worker.outcomes) == (None, ["requeued"])


def fork() -> None:
    """As a pool does to replace a dead child."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.fixture
def reserved() -> Iterator[set[Any]]:
    """The requests that the worker knows, begun or not."""
    yield state.reserved_requests
    state.reserved_requests.clear()


@pytest.mark.usefixtures("hub")
def test_g4_a_pool_that_forks_many_children_frees_the_locks_of_children_that_die_meanwhile(
    app, child, reserved, broken, monkeypatch
):
    monkeypatch.setattr(lost_children, "AT_ONCE", 30)
    worker = Worker(app, task(app), child.popen.pid)
    reserved.add(worker.request)
    acquire("order:1", worker.owner)
    # Its own fork hooks would stop the events thread during each fork.
    dispatch.metrics.post(lambda: None)
    fork()
    assert owner_of("order:1") == worker.owner
    child.kill()
    began = clock.now()
    fork()
    assert (owner_of("order:1"), worker.outcomes) == (None, [])
    assert clock.now() - began < lost_children.AT_ONCE
    # When Celery reports it later, nothing is left to do.
    worker.lose()
    assert worker.outcomes == ["requeued"]
    assert dispatch.flush(30)
    assert [each["reason"] for each in broken] == ["holder_dead"]


class Job:
    """What Celery's pool knows of a message that no child has reported as begun."""

    def __init__(self, child: Child) -> None:
        self._write_to = child.popen


def test_g4_the_check_before_a_fork_includes_children_not_reported_as_begun(
    app, child, reserved, broken, monkeypatch
):
    monkeypatch.setattr(lost_children, "AT_ONCE", 30)
    worker, job = Worker(app, task(app), None), Job(child)
    worker.request._apply_result = weakref.ref(job)
    reserved.add(worker.request)
    acquire("order:1", worker.owner)
    fork()
    assert owner_of("order:1") == worker.owner
    child.kill()
    fork()
    assert (owner_of("order:1"), worker.outcomes) == (None, [])
    assert dispatch.flush(30)
    assert [each["reason"] for each in broken] == ["holder_dead"]


@pytest.mark.parametrize("way", ["terminate", "cancel"])
@pytest.mark.usefixtures("hub", "reserved")
def test_g4_the_check_before_a_fork_includes_terminated_children(app, child, monkeypatch, way):
    # Celery discards their requests when it sends the signal, and the child takes its time to end.
    monkeypatch.setattr(lost_children, "AT_ONCE", 30)
    worker = Worker(app, task(app), child.popen.pid)
    acquire("order:1", worker.owner)
    pool = SimpleNamespace(terminate_job=lambda pid, signal: None)
    state.task_reserved(worker.request)
    worker.request.time_start = 1.0
    getattr(worker.request, way)(pool, "KILL")
    assert worker.request not in state.reserved_requests
    fork()
    assert owner_of("order:1") == worker.owner
    child.kill()
    fork()
    assert owner_of("order:1") is None


def test_g4_the_check_before_a_fork_includes_requests_that_are_only_active(app, child, monkeypatch):
    # As Celery does after the connection to the broker was lost.
    monkeypatch.setattr(lost_children, "AT_ONCE", 30)
    worker = Worker(app, task(app), child.popen.pid)
    acquire("order:1", worker.owner)
    state.task_accepted(worker.request)
    try:
        child.kill()
        fork()
        assert owner_of("order:1") is None
    finally:
        state.active_requests.clear()


def test_g8_the_pool_does_not_fork_before_the_thread_of_a_recovery_has_ended(
    app, dead, reserved, monkeypatch
):
    monkeypatch.setattr(lost_children, "AT_ONCE", 30)
    names = []
    monkeypatch.setattr(
        process, "thread_ends", lambda: names.append(threading.current_thread().name)
    )
    reserved.add(Worker(app, task(app), dead.popen.pid).request)
    fork()
    assert names == ["dlock-recovery"]


def test_g1_another_child_that_got_the_message_meanwhile_keeps_its_lease(app, dead, reserved):
    # If a child dies before its parent has read that it began, Celery returns the message.
    other = Child()
    try:
        worker, job = Worker(app, task(app), None), Job(dead)
        worker.request._apply_result = weakref.ref(job)
        reserved.add(worker.request)
        first = worker.request.found_dead()
        assert first is not None
        acquire("order:1", owners.in_child(worker.request._owner, other.popen.pid))
        late = Recovery(first)
        late.start()
        late.go()
        eventually(late.wait)
        assert owner_of("order:1") == owners.in_child(worker.request._owner, other.popen.pid)
    finally:
        other.kill()


def test_a_set_that_changes_while_it_is_read_is_read_again(app, dead, reserved, monkeypatch):
    monkeypatch.setattr(lost_children, "AT_ONCE", 30)
    worker = Worker(app, task(app), dead.popen.pid)
    acquire("order:1", worker.owner)

    class Changing(set[Any]):
        reads = 0

        def __iter__(self) -> Iterator[Any]:
            self.reads += 1
            if self.reads == 1:
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    monkeypatch.setattr(state, "reserved_requests", Changing([worker.request]))
    fork()
    assert owner_of("order:1") is None


def test_the_events_thread_stops_before_a_fork_after_the_check_for_dead_children():
    """Hooks registered first run last, so events of locks broken before the fork are delivered."""
    asked = (
        "import django; django.setup()\n"
        "import django_dlock.celery.worker.lost_children\n"
        "from django_dlock import process\n"
        "from django_dlock.operators import audit\n"
        "from django_dlock.core import dispatch\n"
        "hooks = [each.get('before') for each in process.forks._at_fork]\n"
        "print(dispatch._supervisor.before_fork in hooks, audit._wait in hooks)"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    answer = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["True", "True"]


def test_a_fork_waits_once_for_a_backend_that_does_not_answer(app, dead, reserved, monkeypatch):
    never, waits = threading.Event(), []
    worker = Worker(
        app, task(app, lock_key=lambda order: never.wait(30) and "order:1"), dead.popen.pid
    )
    reserved.add(worker.request)
    with monkeypatch.context() as patch:
        patch.setattr(Recovery, "wait", lambda *args: waits.append(args))
        fork()
        fork()
    never.set()
    [(recovery, seconds)] = waits
    assert seconds <= lost_children.AT_ONCE
    eventually(recovery.wait)


def test_a_fork_continues_whatever_the_check_for_dead_children_raises(
    app, dead, reserved, monkeypatch, caplog
):
    worker = Worker(app, task(app), dead.popen.pid)
    reserved.add(worker.request)
    monkeypatch.setattr(process, "identity_of", None)
    fork()
    assert "its lock could not be recovered" in caplog.text


def test_a_fork_in_a_child_does_not_touch_its_parents_requests(app, dead, reserved):
    worker = Worker(app, task(app), dead.popen.pid)
    reserved.add(worker.request)
    acquire("order:1", worker.owner)
    worker.request._received_by = -1
    fork()
    assert owner_of("order:1") == worker.owner


def test_a_backend_that_does_not_answer_delays_the_loop_once(app, hub, dead, monkeypatch):
    never, waits = threading.Event(), []
    real = Recovery.wait
    monkeypatch.setattr(Recovery, "wait", lambda self, *args: waits.append(args) or real(self, 0))
    made = task(app, lock_key=lambda order: never.wait(30) and f"order:{order}")
    workers = [Worker(app, made, dead.popen.pid) for _ in range(3)]
    for worker in workers:
        worker.lose()
    assert waits == [(lost_children.AT_ONCE,)]
    never.set()
    run(hub, lambda: all(worker.outcomes for worker in workers))


@pytest.mark.usefixtures("patience")
def test_g4_the_message_is_requeued_after_the_break(app, hub, dead):
    def key(order: int) -> str:
        outcomes.extend(worker.outcomes)
        return f"order:{order}"

    outcomes: list[str] = []
    worker = Worker(app, task(app, lock_key=key), dead.popen.pid)
    acquire("order:1", worker.owner)
    worker.lose()
    run(hub, lambda: worker.outcomes)
    assert (outcomes, worker.outcomes) == ([], ["requeued"])
    assert owner_of("order:1") is None


def test_g13_the_message_does_not_wait_forever(app, hub, dead, monkeypatch):
    monkeypatch.setattr(lock_recovery, "CALLS", 0.2)
    never, ended = threading.Event(), threading.Event()

    def key(order: int) -> str:
        never.wait(30)
        ended.set()
        return f"order:{order}"

    worker = Worker(app, task(app, lock_key=key), dead.popen.pid)
    worker.lose()
    run(hub, lambda: worker.outcomes)
    assert worker.outcomes == ["requeued"]
    never.set()
    assert ended.wait(30)


def test_g13_a_worker_that_ends_waits_for_running_recoveries(app, hub, dead, monkeypatch):
    monkeypatch.setattr(lost_children, "AT_ONCE", 0)
    worker = Worker(app, task(app), dead.popen.pid)
    acquire("order:1", worker.owner)
    worker.lose()
    hub.close()
    assert worker.outcomes == ["requeued"]
    assert owner_of("order:1") is None


def test_without_a_loop_the_pools_own_thread_waits(app, dead):
    worker = Worker(app, task(app), dead.popen.pid)
    acquire("order:1", worker.owner)
    worker.lose()
    assert worker.outcomes == ["requeued"]
    assert owner_of("order:1") is None


def test_a_child_that_reports_a_lost_worker_is_alive_itself(app, hub, child):
    """Its body waited for another task whose worker was lost."""
    worker = Worker(app, task(app), child.popen.pid)
    acquire("order:1", worker.owner)
    worker.lose(return_ok=True)
    assert worker.outcomes == ["requeued"]
    assert owner_of("order:1") == worker.owner


@pytest.mark.parametrize("by", ["nobody", "its parent"])
def test_a_delivery_that_no_child_began_holds_nothing(app, hub, by):
    worker = Worker(app, task(app), None if by == "nobody" else process.current().pid)
    worker.lose()
    assert worker.outcomes == ["requeued"]


def test_a_task_without_exclusion_has_no_lease_to_break(app, hub, dead):
    worker = Worker(app, task(app, lock_key=None), dead.popen.pid)
    worker.lose()
    assert worker.outcomes == ["requeued"]


def test_the_hard_limit_delays_nothing(app, hub, child, monkeypatch):
    waits = []
    monkeypatch.setattr(Recovery, "wait", lambda *args: waits.append(args))
    worker = Worker(app, task(app), child.popen.pid)
    acquire("order:1", worker.owner)
    worker.lose(TimeLimitExceeded(1))
    worker.request.on_timeout(soft=False, timeout=1)
    assert (worker.outcomes, waits) == (["acknowledged"], [])
    assert owner_of("order:1") == worker.owner
    child.kill()
    run(hub, lambda: owner_of("order:1") is None)


@pytest.mark.usefixtures("patience")
def test_an_exception_in_the_request_of_a_dead_child_does_not_stop_the_loop(
    app, hub, dead, monkeypatch, caplog
):
    worker = Worker(app, task(app), dead.popen.pid)
    monkeypatch.setattr(worker.request, "_on_reject", "not to be called")
    worker.lose()
    run(hub, lambda: "death of a child process could not be handled" in caplog.text)


# -- the owner -------------------------------------------------------------------------


def test_each_delivery_has_an_owner_that_only_the_child_receives(app):
    made = task(app)
    one, two = Worker(app, made, None), Worker(app, made, None)
    assert one.owner == one.owner != two.owner
    assert owners.KEY not in vars(one.request._context)


def test_the_child_holds_under_the_owner_and_publishes_it_nowhere(app):
    held: list[str | None] = []

    def body(self: Any, order: int, note: str = "") -> None:
        held.append(self.current_run.lock.owner)
        raise self.retry(countdown=0)

    made = task(app, body)
    worker = Worker(app, made, os.getpid())
    trace_task(made, str(uuid.uuid4()), (1,), {}, request=worker.request.request_dict, app=app)
    assert held == [worker.owner]
    headers = waiting(app).headers
    assert owners.KEY not in headers
    assert owners.KEY not in (headers.get("headers") or {})


def test_a_requeue_publishes_no_owner(app):
    made = task(app)
    worker = Worker(app, made, None)
    other = Lock("order:1", bound=False)
    assert other.acquire()
    trace_task(made, str(uuid.uuid4()), (1,), {}, request=worker.request.request_dict, app=app)
    assert owners.KEY not in waiting(app).headers
    other.release()


def test_an_owner_that_came_with_the_message_is_not_used(app):
    made = task(app)
    made.apply_async((1,), headers={owners.KEY: "of another delivery"})
    request = LockedRequest(waiting(app), app=app, task=made)
    assert request.request_dict[owners.KEY] != "of another delivery"
    assert owners.KEY not in vars(request._context)
