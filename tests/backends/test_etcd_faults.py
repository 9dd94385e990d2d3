"""What the etcd backend does when etcd, the network or the caller misbehaves."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from django_dlock import BackendUnavailable, Lock, clock, locks
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.core import watchdog
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from tests.support.aliases import configured
from tests.support.etcd import EtcdServer
from tests.support.points import heard
from tests.support.proxy import Proxy

PATIENCE = 20.0
CYCLE = ["lease/grant", "put", "delete_range", "lease/revoke"]
"""The calls of an acquire that meets nobody, and of its release."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


Make = Callable[..., EtcdBackend]


@pytest.fixture
def make(stack: ExitStack) -> Make:
    """Makes backends with the same name space, and closes them."""
    prefix = f"test-{secrets.token_hex(4)}"

    def make(location: str | tuple[str, ...], **options: Any) -> EtcdBackend:
        timeout = options.pop("command_timeout", 5.0)
        backend = EtcdBackend(
            AliasOptions(
                *("etcd", "etcd"),
                location=location,
                key_prefix=prefix,
                command_timeout=timeout,
                options=options,
            )
        )
        stack.callback(backend.close)
        return backend

    return make


@pytest.fixture
def etcd_proxy(own_etcd: EtcdServer) -> Iterator[Proxy]:
    """A proxy in front of ``own_etcd``."""
    with Proxy("127.0.0.1", own_etcd.port, speaks="etcd") as proxy:
        yield proxy


def behind(proxy: Proxy) -> str:
    return f"http://127.0.0.1:{proxy.port}"


@pytest.fixture
def alias(etcd_proxy: Proxy) -> Iterator[EtcdBackend]:
    """The backend of the default alias, behind the proxy; its calls have time."""
    options = {"command_timeout": 5.0, "outage_patience": PATIENCE}
    yield from configured_alias(behind(etcd_proxy), TTL=15.0, OPTIONS=options)


@pytest.fixture
def direct(own_etcd: EtcdServer) -> Iterator[EtcdBackend]:
    """The backend of the default alias, without a proxy; its leases end soon."""
    yield from configured_alias(own_etcd.url)


def configured_alias(location: str | list[str], **entry: Any) -> Iterator[EtcdBackend]:
    default = {
        "BACKEND": "django_dlock.backends.etcd.EtcdBackend",
        "LOCATION": location,
        "TTL": 4.5,
        "WAIT": PATIENCE,
        "OPTIONS": {"command_timeout": 1.5, "outage_patience": PATIENCE},
        **entry,
    }
    with configured({"default": default}):
        backend = locks["default"]
        assert isinstance(backend, EtcdBackend)
        yield backend


def request(name: str = "name", ttl: float = 30.0, **kwargs: Any) -> LeaseRequest:
    return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=ttl, **kwargs)


def ask(
    backend: EtcdBackend, attempt: LeaseRequest, *, patience: float = 0.0
) -> Lease | Contention:
    return backend.acquire(attempt, deadline=backend.call_deadline() + patience)


def grant(backend: EtcdBackend, attempt: LeaseRequest, *, patience: float = 0.0) -> Lease:
    answer = ask(backend, attempt, patience=patience)
    assert isinstance(answer, Lease), answer
    return answer


def release(backend: EtcdBackend, lease: Lease) -> str:
    return backend.release(lease.name, lease.owner, min_hold=0.0, deadline=backend.call_deadline())


def renew(backend: EtcdBackend, *leases: Lease) -> list[str]:
    renewals = [Renewal(lease.name, lease.owner, lease.ttl) for lease in leases]
    results = backend.renew(renewals, process="", deadline=backend.call_deadline())
    return [result.outcome for result in results]


def locked(backend: EtcdBackend, name: str = "name") -> bool:
    return backend.locked(name, deadline=backend.call_deadline())


def renewals_of(backend: EtcdBackend, name: str = "name") -> int:
    try:
        info = backend.get(name)
    except BackendUnavailable:
        return 0
    return 0 if info is None else info.renewals


def eventually(condition: Callable[[], Any]) -> None:
    give_up_at = clock.now() + PATIENCE
    while not condition():
        assert clock.now() < give_up_at
        threading.Event().wait(0.01)


class Waiting:
    """A thread that waits for a lock, and holds it until it is told to release it."""

    def __init__(self, name: str = "name") -> None:
        self.lock = Lock(name, bound=False)
        self.acquired = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @classmethod
    def until_watching(cls, name: str = "name") -> Waiting:
        """The first one that waits; the watch has begun."""
        with heard("listener.listening", store="etcd") as listening:
            it = cls(name)
            listening.wait()
        return it

    @classmethod
    def until_asleep(cls, name: str = "name") -> Waiting:
        """One that waits already."""
        with heard("wait.asleep") as asleep:
            it = cls(name)
            asleep.wait()
        return it

    def _run(self) -> None:
        if self.lock.acquire(timeout=PATIENCE):
            self.acquired.set()
            self.lock.release()

    def end(self) -> bool:
        """Whether it got the lock."""
        self._thread.join(PATIENCE + 5)
        return self.acquired.is_set()


# -- calls -------------------------------------------------------------------------------------


def test_a_cycle_is_four_calls_on_one_connection_and_leaves_no_lease(
    make: Make, own_etcd: EtcdServer, etcd_proxy: Proxy
) -> None:
    backend = make(behind(etcd_proxy))
    for _ in range(10):
        assert release(backend, grant(backend, request())) == "released"
    assert etcd_proxy.commands == CYCLE * 10
    assert etcd_proxy.connections == 1
    assert own_etcd.leases == set()


def test_a_hundred_leases_are_renewed_by_three_calls(
    make: Make, own_etcd: EtcdServer, etcd_proxy: Proxy
) -> None:
    backend = make(behind(etcd_proxy))
    leases = [grant(backend, request(f"n{number}")) for number in range(100)]
    before = etcd_proxy.count()
    assert renew(backend, *leases) == ["renewed"] * 100
    assert etcd_proxy.commands[before:] == ["range", "lease/grant", "put"]
    # One lease of etcd for all of them; a release must not revoke it.
    assert release(backend, leases[0]) == "released"
    assert renew(backend, *leases) == ["unknown"] + ["renewed"] * 99


def test_large_metadata_is_renewed_in_several_transactions(make: Make, etcd_proxy: Proxy) -> None:
    backend = make(behind(etcd_proxy))
    metadata = f'{{"note": "{"x" * 100_000}"}}'
    leases = [grant(backend, request(f"n{number}", metadata=metadata)) for number in range(9)]
    before = etcd_proxy.count("put")
    assert renew(backend, *leases) == ["renewed"] * 9
    assert etcd_proxy.count("put") == before + 3


# -- the network -------------------------------------------------------------------------------


def test_g5_an_acquire_whose_reply_was_lost_finds_its_own_grant(
    make: Make, etcd_proxy: Proxy
) -> None:
    backend = make(behind(etcd_proxy))
    etcd_proxy.drop_replies(of=("put",))
    lease = grant(backend, request())
    assert etcd_proxy.replies_dropped == 1
    assert etcd_proxy.count("put") == 2
    info = backend.get("name")
    assert info is not None
    assert (info.owner, info.token) == (lease.owner, lease.token)
    # If a whole call ends without an answer, the next call finds the grant, too.
    assert grant(backend, LeaseRequest(lease.name, lease.owner, lease.ttl)).token == lease.token


def test_g1_an_acquire_that_meets_a_late_copy_of_itself_keeps_its_key(
    make: Make, own_etcd: EtcdServer, etcd_proxy: Proxy
) -> None:
    # try 1 is late ──► try 2 finds the name free ──► try 1 arrives ──► try 2 arrives
    backend, attempt, answers = make(behind(etcd_proxy), command_timeout=1.0), request(), []
    direct = make(own_etcd.url)
    etcd_proxy.keep(2, of=("put",))
    with pytest.raises(BackendUnavailable):
        ask(backend, attempt)
    thread = threading.Thread(
        target=lambda: answers.append(ask(backend, attempt, patience=PATIENCE))
    )
    thread.start()
    etcd_proxy.wait_until(lambda proxy: proxy.kept == 2)
    etcd_proxy.deliver()
    eventually(lambda: locked(direct))
    etcd_proxy.deliver()
    thread.join(PATIENCE)
    (lease,) = answers
    info = direct.get("name")
    assert isinstance(lease, Lease)
    assert info is not None
    assert (info.owner, info.token) == (lease.owner, lease.token)
    assert len(own_etcd.leases) == 1


def test_g5_a_late_copy_of_an_acquire_that_was_refused_creates_nothing(
    make: Make, own_etcd: EtcdServer, etcd_proxy: Proxy
) -> None:
    # try 1 is late ──► another acquires ──► try 2 is refused ──► the other releases ──► try 1
    backend, attempt = make(behind(etcd_proxy), command_timeout=1.0), request()
    direct = make(own_etcd.url)
    etcd_proxy.keep(of=("put",))
    with pytest.raises(BackendUnavailable):
        ask(backend, attempt)
    other = grant(direct, request())
    assert isinstance(ask(backend, attempt), Contention)
    assert release(direct, other) == "released"
    etcd_proxy.deliver()
    assert own_etcd.leases == set()


def test_g5_a_release_whose_reply_was_lost_is_no_loss(
    alias: EtcdBackend, etcd_proxy: Proxy
) -> None:
    lock = Lock("name")
    assert lock.acquire()
    etcd_proxy.drop_replies(of=("delete_range",))
    lock.release()
    assert etcd_proxy.replies_dropped == 1
    assert lock.state == "free"
    assert not locked(alias)


def test_g5_a_break_whose_reply_was_lost_is_a_success(make: Make, etcd_proxy: Proxy) -> None:
    backend = make(behind(etcd_proxy))
    lease = grant(backend, request())
    etcd_proxy.drop_replies(of=("delete_range",))
    assert backend.break_silently(lease.name, owner=lease.owner)
    assert etcd_proxy.replies_dropped == 1
    assert not backend.break_silently(lease.name, owner=lease.owner)


def test_g10_a_break_ends_with_its_deadline(make: Make, etcd_proxy: Proxy) -> None:
    backend = make(behind(etcd_proxy))
    lease = grant(backend, request())
    with pytest.raises(BackendUnavailable):
        backend.break_silently(lease.name, owner=lease.owner, deadline=clock.now() - 1.0)
    assert backend.break_silently(lease.name, owner=lease.owner)


def test_g5_a_renewal_whose_reply_was_lost_is_repeated(make: Make, etcd_proxy: Proxy) -> None:
    backend = make(behind(etcd_proxy))
    lease = grant(backend, request())
    etcd_proxy.drop_replies(of=("put",))
    assert renew(backend, lease) == ["renewed"]
    assert etcd_proxy.replies_dropped == 1


def test_g1_a_renewal_revives_no_lease_that_was_released_meanwhile(
    make: Make, own_etcd: EtcdServer, etcd_proxy: Proxy
) -> None:
    # renewal reads the key ──► release deletes it ──► renewal writes it
    backend, answers = make(behind(etcd_proxy)), list[list[str]]()
    lease = grant(backend, request())
    etcd_proxy.drop_replies(how="swallow", of=("lease/grant",))
    thread = threading.Thread(target=lambda: answers.append(renew(backend, lease)))
    thread.start()
    etcd_proxy.wait_until(lambda proxy: proxy.replies_dropped == 1)
    assert release(make(own_etcd.url), lease) == "released"
    etcd_proxy.cut()
    thread.join(PATIENCE)
    assert answers == [["unknown"]]
    assert not locked(backend)


def test_g7_a_cancelled_acquire_leaves_nothing_that_a_late_copy_could_use(
    make: Make, own_etcd: EtcdServer, etcd_proxy: Proxy
) -> None:
    backend, attempt = make(behind(etcd_proxy), command_timeout=2.0), request()
    etcd_proxy.drop_replies(how="swallow", of=("put",))
    with pytest.raises(BackendUnavailable):
        ask(backend, attempt)
    assert len(own_etcd.leases) == 1
    etcd_proxy.heal()
    backend.cancel_acquire(attempt, deadline=clock.now() + PATIENCE)
    assert not locked(backend)
    assert own_etcd.leases == set()


def test_g7_an_acquire_that_is_cancelled_while_it_runs_creates_nothing(
    make: Make, own_etcd: EtcdServer, etcd_proxy: Proxy
) -> None:
    # acquire asks for a lease ──► cancel, which finds nothing ──► acquire creates the key
    backend, attempt, answers = make(behind(etcd_proxy)), request(), list[object]()
    etcd_proxy.drop_replies(how="swallow", of=("lease/grant",))
    thread = threading.Thread(target=lambda: answers.append(ask(backend, attempt)))
    thread.start()
    etcd_proxy.wait_until(lambda proxy: proxy.replies_dropped == 1)
    backend.cancel_acquire(attempt, deadline=clock.now() + PATIENCE)
    etcd_proxy.cut()
    thread.join(PATIENCE)
    (answer,) = answers
    assert isinstance(answer, Contention)
    assert not answer.owner
    assert not locked(backend)


def test_g10_calls_to_a_paused_etcd_return_by_their_deadline(
    own_etcd: EtcdServer, make: Make
) -> None:
    backend = make(own_etcd.url, command_timeout=0.3)
    # A first connection may take longer.
    lease = grant(backend, request(), patience=PATIENCE)
    own_etcd.pause()
    # The second one needs a new connection.
    for call in (lambda: ask(backend, request()), lambda: release(backend, lease)):
        began = clock.now()
        with pytest.raises(BackendUnavailable):
            call()
        # A busy machine may add more than a second.
        assert clock.now() - began < 3.0
    own_etcd.resume()
    # The call may have been carried out when etcd continued.
    backend = make(own_etcd.url)
    assert release(backend, lease) in {"released", "unknown"}
    assert not locked(backend)


def test_g10_a_call_into_a_black_hole_returns_by_its_deadline(
    make: Make, etcd_proxy: Proxy
) -> None:
    backend = make(behind(etcd_proxy), command_timeout=0.3)
    # A first connection may take longer.
    grant(backend, request(), patience=PATIENCE)
    etcd_proxy.black_hole()
    for _ in range(2):
        began = clock.now()
        with pytest.raises(BackendUnavailable):
            locked(backend)
        # A busy machine may add more than a second.
        assert clock.now() - began < 3.0
    etcd_proxy.heal()
    assert locked(make(behind(etcd_proxy)))


def test_an_unreachable_etcd_is_reported_at_once(make: Make) -> None:
    began = clock.now()
    with pytest.raises(BackendUnavailable, match="refused"):
        grant(make("http://127.0.0.1:1", command_timeout=60.0), request())
    assert clock.now() - began < 30


# -- the store ---------------------------------------------------------------------------------


def test_g1_a_held_lock_survives_a_crash_and_a_restart(
    direct: EtcdBackend, own_etcd: EtcdServer
) -> None:
    # A busy machine may take seconds to restart it.
    with Lock("name", ttl=6.0) as lock:
        own_etcd.restart()
        assert isinstance(ask(direct, request(), patience=PATIENCE), Contention)
        renewals = renewals_of(direct)
        eventually(lambda: renewals_of(direct) > renewals + 1)
        lock.check()
        first = lock.token or 0
    with Lock("name") as lock:
        assert (lock.token or 0) > first > 0


def test_g2_a_holder_is_told_that_etcd_lost_everything(
    direct: EtcdBackend, own_etcd: EtcdServer
) -> None:
    with pytest.raises(Exception, match="lost"), Lock("name") as lock:
        own_etcd.call("kv/deleterange", key="AA==", range_end="AA==")
        eventually(lambda: lock.lost)
        assert lock.lost_reason == "refused"
    with Lock("name"):
        pass


def test_g2_a_holder_that_cannot_renew_is_told_by_its_deadline(
    direct: EtcdBackend, own_etcd: EtcdServer
) -> None:
    lock = Lock("name")
    assert lock.acquire()
    own_etcd.pause()
    eventually(lambda: lock.lost)
    assert lock.lost_reason == "unreachable"
    own_etcd.resume()
    # G4: nobody renews it any more.
    eventually(lambda: not direct.locked("name", deadline=clock.now() + PATIENCE))


def test_g4_the_lock_of_a_process_that_died_is_free_at_once(alias: EtcdBackend) -> None:
    # A process that is gone from this machine is a proof; the TTL need not pass.
    pid = os.fork()
    if pid == 0:
        try:
            alias.after_fork()
            grant(alias, request(ttl=3600.0))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert locked(alias)
    with Lock("name"):
        pass


def test_g8_a_child_of_a_process_that_waits_can_wait_too(
    alias: EtcdBackend, etcd_proxy: Proxy
) -> None:
    lease = grant(alias, request(ttl=3600.0))
    waiting = Waiting()
    etcd_proxy.wait_until(lambda proxy: proxy.count("watch") == 1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            acquired = Lock("name").acquire(timeout=PATIENCE)
            # Without a watch of its own, it would have asked again only when its patience ended.
            watches = {thread.name for thread in threading.enumerate()}
            status = 0 if acquired and "dlock-listener-etcd" in watches else 2
        finally:
            os._exit(status)
    etcd_proxy.wait_until(lambda proxy: proxy.count("watch") == 2)
    release(alias, lease)
    # The child ends without a release. It is proven dead, so the parent's waiter gets the lock.
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert waiting.end()


# -- waiters -----------------------------------------------------------------------------------


def test_all_waiters_of_a_process_share_one_watch(
    alias: EtcdBackend, etcd_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, so many waiters take their time to come. Nothing is released meanwhile.
    monkeypatch.setattr("django_dlock.backends.etcd.watch.SILENCE", 3 * PATIENCE)
    leases = [grant(alias, request(f"n{number}", ttl=3600.0)) for number in range(3)]

    async def wait(name: str) -> None:
        async with Lock(name):
            pass

    async def main() -> Counter[str]:
        tasks = [asyncio.create_task(wait(f"n{number % 3}")) for number in range(60)]
        await asyncio.to_thread(asleep.until, lambda it: len(it.each("waiter")) == 69)
        names = Counter(thread.name for thread in set(threading.enumerate()) - earlier)
        for lease in leases:
            await alias.acall(
                alias.release,
                lease.name,
                lease.owner,
                min_hold=0.0,
                deadline=clock.now() + PATIENCE,
            )
        await asyncio.gather(*tasks)
        return names

    # Those of other tests may still be idle.
    earlier = set(threading.enumerate())
    with heard("wait.asleep") as asleep:
        threads = [Waiting(f"n{number % 3}") for number in range(9)]
        names = asyncio.run(main())
    # A few threads make the calls of the coroutines; none of them waits for the lock.
    assert names["dlock-listener-etcd"] == 1
    assert names["dlock-call"] <= 16
    assert all(thread.end() for thread in threads)
    assert etcd_proxy.count("watch") == 1


def test_g5_a_release_while_the_watch_is_cut_is_not_missed(
    own_etcd: EtcdServer, alias: EtcdBackend, etcd_proxy: Proxy, make: Make
) -> None:
    lease = grant(alias, request(ttl=3600.0))
    waiting = Waiting.until_watching()
    assert etcd_proxy.count("watch") == 1
    etcd_proxy.refuse()
    options = AliasOptions("etcd", "etcd", location=own_etcd.url, command_timeout=PATIENCE)
    beside = EtcdBackend(options)
    assert release(beside, lease) == "released"
    beside.close()
    etcd_proxy.accept()
    assert waiting.end()


def test_a_compaction_while_the_watch_is_cut_makes_waiters_ask_again(
    own_etcd: EtcdServer, alias: EtcdBackend, etcd_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a cut replaces the watch.
    monkeypatch.setattr("django_dlock.backends.etcd.watch.SILENCE", 3 * PATIENCE)
    kept, lease = grant(alias, request("kept", ttl=3600.0)), grant(alias, request(ttl=3600.0))
    waiting = Waiting.until_watching()
    etcd_proxy.refuse()
    options = AliasOptions("etcd", "etcd", location=own_etcd.url, command_timeout=PATIENCE)
    beside = EtcdBackend(options)
    assert release(beside, lease) == "released"
    for _ in range(3):
        release(beside, grant(beside, request("other")))
    beside.close()
    own_etcd.call("kv/compaction", revision=str(own_etcd.revision), physical=True)
    etcd_proxy.accept()
    assert waiting.end()
    # The second watch asked for a revision that was compacted; the third begins after it.
    etcd_proxy.wait_until(lambda proxy: proxy.count("watch") == 3)
    again = Waiting.until_asleep("kept")
    release(alias, kept)
    assert again.end()
    assert etcd_proxy.count("watch") == 3


def test_a_store_that_begins_anew_makes_waiters_ask_again(
    own_etcd: EtcdServer, alias: EtcdBackend
) -> None:
    for _ in range(20):
        release(alias, grant(alias, request("other")))
    grant(alias, request(ttl=3600.0))
    waiting = Waiting.until_watching()
    own_etcd.kill()
    for path in (own_etcd.directory / "data").iterdir():
        shutil.rmtree(path)
    own_etcd.restart()
    assert waiting.end()
    # The new store's revisions are lower than those seen before; the watch accepts them.
    lease, again = grant(alias, request(ttl=3600.0)), Waiting.until_asleep()
    release(alias, lease)
    assert again.end()


def test_a_silent_watch_is_replaced(
    alias: EtcdBackend, etcd_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No public name says how long a connection may be silent.
    monkeypatch.setattr("django_dlock.backends.etcd.watch.SILENCE", 0.3)
    lease = grant(alias, request(ttl=3600.0))
    waiting = Waiting()
    etcd_proxy.wait_until(lambda proxy: proxy.count("watch") >= 4)
    release(alias, lease)
    assert waiting.end()


def test_watching_ends_with_the_backend(alias: EtcdBackend) -> None:
    lease = grant(alias, request())
    waiting = Waiting.until_watching()
    release(alias, lease)
    assert waiting.end()
    watchdog.shutdown()
    alias.close()
    assert "dlock-listener-etcd" not in {thread.name for thread in threading.enumerate()}
