"""What the ZooKeeper backend does when the server, the network or a process misbehaves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from django_dlock import BackendUnavailable, Lock, clock, locks, signals
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.zookeeper import ZooKeeperBackend
from django_dlock.backends.zookeeper.nodes import content
from django_dlock.core import granting
from django_dlock.lease import Contention, Lease, LeaseRequest
from django_dlock.testing.tools import ContractTools
from tests.conftest import started
from tests.support.aliases import configured
from tests.support.holder import Holder
from tests.support.proxy import Proxy
from tests.support.zookeeper import ZooKeeperServer

BACKEND = "django_dlock.backends.zookeeper.ZooKeeperBackend"
TIMEOUT = 1.5
SESSION = 9.0
"""Seconds of the session; half of it is the longest lease."""
LONG = 60.0
"""Seconds of a session so long that no test takes half of it."""
SLACK = 2.0
"""Seconds that a busy machine may add to a call."""


def alias(location: str, *, session: float = SESSION, **options: Any) -> dict[str, Any]:
    return {
        "BACKEND": BACKEND,
        "LOCATION": location,
        "TTL": LONG,
        "WAIT": 30.0,
        "OPTIONS": {
            "command_timeout": TIMEOUT,
            "session_timeout": session,
            "outage_patience": 20.0,
            **options,
        },
    }


def patient_alias(location: str) -> dict[str, Any]:
    """With enough time for each call on a busy machine, where that time is not the subject."""
    return alias(location, session=LONG, command_timeout=5.0)


def eventually(condition: Callable[[], Any], patience: float = 20.0) -> None:
    give_up_at = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def backend_at(location: str, **kwargs: Any) -> ZooKeeperBackend:
    options = {"session_timeout": SESSION, **kwargs.pop("options", {})}
    return ZooKeeperBackend(
        AliasOptions("other", BACKEND, location=location, options=options, **kwargs)
    )


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """One that these tests restart, pause and kill; it runs again after each."""
    yield from started(ZooKeeperServer())


@pytest.fixture
def proxy(server: ZooKeeperServer) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", server.port, speaks="zookeeper") as proxy:
        yield proxy


@pytest.fixture
def other(server: ZooKeeperServer) -> Iterator[ZooKeeperBackend]:
    """Another process, as far as the server knows, with a connection of its own."""
    backend = backend_at(server.location)
    yield backend
    backend.deregister("", deadline=clock.now() + 5)


def is_free(backend: ZooKeeperBackend, name: str = "it") -> bool:
    return not backend.locked(name, deadline=clock.now() + 10)


def take(backend: ZooKeeperBackend, name: str = "it", patience: float = 40.0) -> Lease:
    """Acquire with a session of its own, however long it takes."""
    request = LeaseRequest(name, ContractTools.request(name).owner, 30.0, waits=True)
    give_up_at = clock.now() + patience
    while clock.now() < give_up_at:
        answer = backend.acquire(request, deadline=clock.now() + 10)
        if isinstance(answer, Lease):
            return answer
        backend.wait(request, answer, until=give_up_at, interrupted=lambda: False)
    raise AssertionError("it was not granted")


class Reports:
    """Records the losses and doubts that are reported."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.lost, self.doubtful = threading.Event(), threading.Event()

    def on_lost(self, lock: Lock, reason: str) -> None:
        self.told.append(reason)
        self.lost.set()

    def note(self, **facts: Any) -> None:
        self.doubtful.set()


@pytest.fixture
def reports() -> Iterator[Reports]:
    reports = Reports()
    signals.in_doubt.connect(reports.note)
    yield reports
    signals.in_doubt.disconnect(reports.note)


# -- lost replies --------------------------------------------------------------------------


def test_g5_a_create_whose_reply_is_lost_leaves_no_orphan(
    proxy: Proxy, other: ZooKeeperBackend
) -> None:
    with configured({"default": patient_alias(f"127.0.0.1:{proxy.port}")}):
        # Its directory is made.
        with Lock("it"):
            pass
        proxy.drop_replies(of=("CREATE",))
        with Lock("it") as lock:
            assert proxy.replies_dropped == 1
            info = other.get("it")
            assert info is not None
            assert (info.owner, info.token, info.waiting) == (lock.owner, lock.token, 0)
        assert is_free(other)


def test_g5_a_release_whose_reply_is_lost_is_a_success(
    proxy: Proxy, other: ZooKeeperBackend
) -> None:
    with configured({"default": patient_alias(f"127.0.0.1:{proxy.port}")}):
        lock = Lock("it")
        assert lock.acquire()
        proxy.drop_replies(of=("DELETE",))
        lock.release()
        assert proxy.replies_dropped == 1
        assert lock.state == "free"
        assert is_free(other)


def test_g10_a_break_ends_with_its_deadline(other: ZooKeeperBackend) -> None:
    lease = take(other)
    with pytest.raises(BackendUnavailable):
        other.break_silently("it", owner=lease.owner, deadline=clock.now() - 1.0)
    assert other.break_silently("it", owner=lease.owner)


def test_g5_a_break_whose_reply_is_lost_is_said_to_be_made(
    proxy: Proxy, other: ZooKeeperBackend
) -> None:
    lease = take(other)
    with configured({"default": patient_alias(f"127.0.0.1:{proxy.port}")}):
        proxy.drop_replies(of=("DELETE",))
        assert locks["default"].break_("it", owner=lease.owner)
        assert proxy.replies_dropped == 1
        assert not locks["default"].break_("it", owner=lease.owner)
        assert is_free(other)


def test_g5_an_acquire_that_is_not_answered_is_cancelled(
    proxy: Proxy, other: ZooKeeperBackend
) -> None:
    with configured({"default": alias(f"127.0.0.1:{proxy.port}", session=LONG)}):
        # Its directory is made.
        with Lock("it"):
            pass
        proxy.always("close", of="CREATE")
        with pytest.raises(BackendUnavailable):
            Lock("it").acquire(blocking=False)
        proxy._always.clear()
        eventually(lambda: is_free(other))


def test_g4_an_acquire_whose_place_is_not_taken_back_is_cancelled(
    proxy: Proxy, other: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not want to wait, but somebody else came between its look and its own node."""
    rival = ContractTools.request("it")

    def overtaken(request: LeaseRequest, *args: float) -> bytes:
        if request.owner != rival.owner:
            other.acquire(rival, deadline=clock.now() + 5)
        return content(request, *args)

    with configured({"default": alias(f"127.0.0.1:{proxy.port}", session=LONG)}):
        # Its directory is made.
        with Lock("it"):
            pass
        monkeypatch.setattr(f"{ZooKeeperBackend.__module__}.content", overtaken)
        proxy.keep(of=("DELETE",))
        with pytest.raises(BackendUnavailable):
            Lock("it").acquire(blocking=False)
        other.release("it", rival.owner, min_hold=0, deadline=clock.now() + 5)
        eventually(lambda: is_free(other))


# -- the session -----------------------------------------------------------------------------


def end_session(backend: Any, server: ZooKeeperServer) -> None:
    """End the session at the server, as an operator or the loss of its data would."""
    client = KazooClient(server.location, client_id=backend._sessions.session.client.client_id)
    client.start()
    client.stop()
    client.close()


def test_g2_the_end_of_the_session_is_reported_at_once(
    server: ZooKeeperServer, reports: Reports
) -> None:
    with configured({"default": alias(server.location, session=LONG)}):
        # A fixed lease: no renewal finds it out.
        lock = Lock("it", renew=False, on_lost=reports.on_lost)
        assert lock.acquire()
        assert lock.remaining > LONG / 4
        end_session(locks["default"], server)
        assert reports.lost.wait(LONG / 4), "it was not told"
        assert (lock.state, lock.lost_reason, reports.told) == ("lost", "expired", ["expired"])
        # The next session serves at once.
        with Lock("it"):
            pass


def test_g2_a_server_that_has_lost_its_data_is_reported(
    server: ZooKeeperServer, reports: Reports
) -> None:
    with configured({"default": alias(server.location, session=LONG)}):
        lock = Lock("it", on_lost=reports.on_lost)
        assert lock.acquire()
        server.kill()
        server.lose_data()
        server.restart()
        assert reports.lost.wait(LONG / 4), "it was not told"
        assert lock.lost_reason == "expired"
        with Lock("it"):
            pass


def test_g2_a_suspended_connection_is_in_doubt_and_back_again(
    proxy: Proxy, other: ZooKeeperBackend, reports: Reports
) -> None:
    with configured({"default": alias(f"127.0.0.1:{proxy.port}", session=LONG)}):
        with Lock("it", on_lost=reports.on_lost) as lock:
            token = lock.token
            proxy.refuse()
            assert reports.doubtful.wait(LONG / 8), "the doubt was not told"
            assert lock.state == "in_doubt"
            assert not is_free(other)
            proxy.accept()
            eventually(lambda: lock.state == "held")
            assert (lock.token, reports.told) == (token, [])
        assert is_free(other)


def test_g1_nobody_acquires_before_the_holder_knows_its_loss(
    proxy: Proxy, other: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with configured({"default": alias(f"127.0.0.1:{proxy.port}")}):
        lock = Lock("it")
        assert lock.acquire()
        assert lock.remaining <= SESSION / 2
        proxy.black_hole()
        lease = take(other)
        # The holder has not asked anybody: its own clock has told it.
        assert lock.state == "lost"
        assert lock.lost_reason == "unreachable"
        assert lease.token > (lock.token or 0)
        proxy.heal()


def test_g1_a_holder_outlives_its_ttl_and_a_restart(
    server: ZooKeeperServer, other: ZooKeeperBackend, reports: Reports
) -> None:
    with (
        configured({"default": patient_alias(server.location)}),
        Lock("it", on_lost=reports.on_lost) as lock,
    ):
        token = lock.token
        server.restart()

        def is_renewed() -> bool:
            # A server that has just started may take long to answer.
            with contextlib.suppress(BackendUnavailable):
                lock.renew()
                return True
            return False

        eventually(is_renewed)
        assert (lock.token, reports.told) == (token, [])
        assert not is_free(other)


def test_g4_the_lock_of_a_killed_process_is_free_when_its_session_ends(
    server: ZooKeeperServer, other: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if it had run on another machine.
    monkeypatch.setattr(granting, "death_proof", lambda process: None)
    with Holder({"default": alias(server.location)}) as holder:
        holder.do("lock = Lock('it'); lock.acquire()")
        token = holder.do("lock.token")
        holder.kill()
        assert take(other).token > token


def test_g4_the_lock_of_a_process_that_is_proven_dead_is_broken(server: ZooKeeperServer) -> None:
    with Holder({"default": alias(server.location, session=LONG)}) as holder:
        holder.do("lock = Lock('it'); lock.acquire()")
        holder.kill()
        with configured({"default": alias(server.location, session=LONG)}):
            assert Lock("it").acquire(timeout=LONG / 4)


def test_g4_a_process_that_ends_normally_leaves_nothing(
    server: ZooKeeperServer, other: ZooKeeperBackend
) -> None:
    with Holder({"default": alias(server.location, session=LONG)}) as holder:
        holder.do("lock = Lock('it'); lock.acquire()")
        assert holder.end() == 0
    # Long before its session would end by itself.
    eventually(lambda: is_free(other))


def test_g6_a_lease_that_is_not_renewed_ends_although_its_session_lives(
    server: ZooKeeperServer, other: ZooKeeperBackend
) -> None:
    with configured({"default": alias(server.location, session=LONG)}):
        lock = Lock("it", ttl=1.0, renew=False)
        assert lock.acquire()
        eventually(lambda: is_free(other))
        assert lock.lost_reason == "expired"


def test_g6_an_expired_lease_is_deleted_after_an_outage(
    proxy: Proxy, other: ZooKeeperBackend
) -> None:
    with configured({"default": alias(f"127.0.0.1:{proxy.port}", session=LONG)}):
        # It must not end before the outage begins.
        lock = Lock("it", ttl=3.0, renew=False)
        assert lock.acquire()
        proxy.refuse()
        eventually(lambda: lock.lost)
        assert not is_free(other)
        proxy.accept()
        eventually(lambda: is_free(other))


# -- forks -----------------------------------------------------------------------------------


def test_g8_a_child_has_a_session_of_its_own(
    server: ZooKeeperServer, other: ZooKeeperBackend
) -> None:
    with Holder({"default": patient_alias(server.location)}) as holder:
        holder.do("lock = Lock('it'); lock.acquire()")
        assert holder.do("in_fork('[lock.state, lock.lost_reason]')") == ["lost", "fork"]
        assert holder.do("in_fork(\"Lock('other').acquire(blocking=False)\")") is True
        # A child that ends as processes do runs what is registered for that.
        holder.do("child = multiprocessing.get_context('fork').Process(target=os.getpid)")
        holder.do("child.start(), child.join(20)")
        assert holder.do("child.exitcode") == 0
        holder.do("lock.renew()")
        assert holder.do("lock.state") == "held"
        assert not is_free(other)


# -- bounded calls -----------------------------------------------------------------------------


def test_g10_calls_return_in_time_while_the_server_is_paused(server: ZooKeeperServer) -> None:
    with configured({"default": alias(server.location, session=LONG, outage_patience=0)}):
        lock = Lock("it")
        assert lock.acquire()
        server.pause()
        try:
            for call in (
                lambda: Lock("new").acquire(blocking=False),
                lambda: Lock("new").acquire(timeout=0.3),
                lock.renew,
                lock.locked,
                lock.release,
            ):
                started = clock.now()
                with pytest.raises(BackendUnavailable):
                    call()
                assert clock.now() - started < TIMEOUT + 0.3 + SLACK
        finally:
            server.resume()
        assert lock.state == "free"
        # Its release and the acquires that were not answered are carried out in the background.
        for name in ("it", "new"):
            with Lock(name):
                pass


def test_g10_an_unreachable_server_is_named(server: ZooKeeperServer) -> None:
    location = "127.0.0.1:1"
    with (
        configured({"default": alias(location, outage_patience=0)}),
        pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:1: .*refused"),
    ):
        Lock("it").acquire(blocking=False)


def test_g10_an_outage_is_waited_through(server: ZooKeeperServer, proxy: Proxy) -> None:
    with configured({"default": alias(f"127.0.0.1:{proxy.port}", outage_patience=20)}):
        proxy.refuse()
        timer = threading.Timer(0.5, proxy.accept)
        timer.start()
        with Lock("it"):
            pass
        timer.join()


def test_a_waiter_survives_a_cut_and_keeps_its_place(proxy: Proxy, other: ZooKeeperBackend) -> None:
    with configured({"default": alias(f"127.0.0.1:{proxy.port}", session=LONG)}):
        held = take(other)
        granted: list[int | None] = []

        def wait() -> None:
            with Lock("it") as lock:
                granted.append(lock.token)

        waiter = threading.Thread(target=wait)
        waiter.start()
        eventually(lambda: (info := other.get("it")) is not None and info.waiting == 1)
        proxy.cut()
        late = ContractTools.request("it", waits=True)
        assert isinstance(other.acquire(late, deadline=clock.now() + 10), Contention)
        other.release("it", held.owner, min_hold=0.0, deadline=clock.now() + 10)
        waiter.join(20)
        assert len(granted) == 1
        assert granted[0] > held.token
        # The waiter came before this one, which gets it now.
        lease = other.acquire(late, deadline=clock.now() + 10)
        assert isinstance(lease, Lease)
        assert lease.token > granted[0]


def test_a_waiter_that_has_lost_its_session_is_last_and_blocks_nobody(
    server: ZooKeeperServer, other: ZooKeeperBackend
) -> None:
    first, second = backend_at(server.location), backend_at(server.location)
    held = take(other)
    one, two = (ContractTools.request("it", waits=True) for _ in range(2))

    def ask(backend: ZooKeeperBackend, request: LeaseRequest) -> Lease | Contention:
        return backend.acquire(request, deadline=clock.now() + 10)

    assert isinstance(ask(first, one), Contention)
    behind_first = ask(second, two)
    assert isinstance(behind_first, Contention)
    lost = first._attempts.find(one.owner)
    end_session(first, server)
    eventually(lambda: not getattr(lost, "session", 0))
    assert isinstance(ask(first, one), Contention)
    # The node ahead of its own is gone, although a new one has the same path.
    until = clock.now() + 20
    second.wait(two, behind_first, until=until, interrupted=lambda: False)
    assert clock.now() < until
    behind_holder = ask(second, two)
    assert isinstance(behind_holder, Contention)
    other.release("it", held.owner, min_hold=0.0, deadline=clock.now() + 10)
    second.wait(two, behind_holder, until=until, interrupted=lambda: False)
    assert isinstance(ask(second, two), Lease)
    assert isinstance(ask(first, one), Contention)
    second.release("it", two.owner, min_hold=0.0, deadline=clock.now() + 10)
    assert isinstance(ask(first, one), Lease)
    for backend in (first, second):
        backend.deregister("", deadline=clock.now() + 5)
