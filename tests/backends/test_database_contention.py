"""Many callers of one name on a database: what each of them is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import connections

from django_dlock import clock
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.connection import Connection, Failure
from django_dlock.backends.database.statements import Found
from django_dlock.backends.database.store import Store
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease, LeaseRequest, ReleaseRequest
from tests.support import databases
from tests.support.database_bed import Bed, ask, grant, release, request, store_of, table_of
from tests.support.proxy import Proxy


def overtaken(backend: DatabaseBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every write finds that the row has changed since it was read.

    This uses private names, because nothing else lets other callers be faster each time.
    """
    dialect = store_of(backend).dialect
    for method in ("write", "insert"):
        monkeypatch.setattr(dialect, method, lambda *args: False)
    # On PostgreSQL, these two would change a row in one statement, without reading it before.
    monkeypatch.setattr(dialect, "acquire", lambda *args: 0)
    monkeypatch.setattr(dialect, "release", lambda *args: None)


def ask_briefly(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease | Contention:
    return backend.acquire(attempt, deadline=clock.now() + 1.0)


def test_a_caller_that_others_always_overtake_is_told_of_contention(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    overtaken(backend, monkeypatch)
    answer = ask_briefly(backend, request(waits=True))
    assert isinstance(answer, Contention)
    assert answer.owner == lease.owner


def test_a_caller_that_is_overtaken_on_a_free_name_is_told_of_its_last_owner(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    release(backend, lease)
    overtaken(backend, monkeypatch)
    # An attempt that has waited reads the row at once.
    answer = ask_briefly(backend, request(waits=True, since=1.0))
    assert isinstance(answer, Contention)
    assert (answer.owner, answer.remaining) == (lease.owner, 0.0)


def test_a_caller_that_is_overtaken_at_its_last_attempt_leaves_no_ticket(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease, waiter = grant(backend, request()), request(waits=True)
    assert isinstance(ask(backend, waiter), Contention)
    with monkeypatch.context() as patches:
        overtaken(backend, patches)
        last = waiter._replace(waits=False, since=1.0)
        assert isinstance(ask_briefly(backend, last), Contention)
    databases.until(lambda: not backend.get("name").waiting)  # type: ignore[union-attr]
    release(backend, lease)
    assert not backend.locked("name", deadline=backend.call_deadline())


def test_a_caller_that_conflicts_always_refuse_is_told_of_contention(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a server whose transactions are serializable.
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())

    def conflict(*args: Any) -> int:
        raise Failure("overtaken", RuntimeError("could not serialize access"))

    monkeypatch.setattr(store_of(backend).dialect, "acquire", conflict)
    answer = ask_briefly(backend, request())
    assert isinstance(answer, Contention)
    assert answer.owner == lease.owner


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
def test_g7_a_caller_that_is_overtaken_until_a_reply_comes_too_late_leaves_no_lease(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    # overtaken ──► granted the name, but the deadline passes before the reply
    backend = bed.backend(database, command_timeout=20.0)
    release(backend, grant(backend, request()))
    # An attempt that has waited reads the row at once.
    attempt, over = request(waits=waits, since=1.0), clock.now() + 4.0
    dialect = store_of(backend).dialect
    write, calls = dialect.write, list[str]()

    def late(*args: Any) -> bool:
        calls.append("write")
        if len(calls) == 1:
            return False
        written = write(*args)
        if len(calls) == 2:
            while clock.now() < over:
                threading.Event().wait(0.01)
            monkeypatch.undo()
            raise Failure("broken", TimeoutError("no reply by the deadline"))
        return written

    monkeypatch.setattr(dialect, "write", late)
    answer = backend.acquire(attempt, deadline=over)
    assert isinstance(answer, Contention)
    if waits:
        assert grant(backend, attempt).owner == attempt.owner
    else:
        # Nobody asks again, so the lease is given back.
        databases.until(lambda: not backend.locked("name", deadline=backend.call_deadline()))


@pytest.mark.parametrize("how", ["refuse", "black_hole"])
def test_g10_an_outage_that_follows_a_conflict_is_reported_as_an_outage(
    bed: Bed,
    postgres_alias: str,
    postgres_proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    backend = bed.backend(bed.behind(postgres_proxy, postgres_alias), command_timeout=2.0)
    grant(backend, request())

    def overtaken_and_cut(*args: Any) -> bool:
        getattr(postgres_proxy, how)()
        return False

    monkeypatch.setattr(store_of(backend).dialect, "write", overtaken_and_cut)
    with pytest.raises(BackendUnavailable):
        ask(backend, request(waits=True, since=1.0))


def test_g4_a_waiter_that_was_overtaken_asks_again_soon(
    bed: Bed, postgres_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=10.0)
    grant(backend, request())
    wakeup, waiter = store_of(backend).wakeup, request(waits=True)
    assert wakeup is not None
    wakeup.keep_listening()
    databases.until(lambda: wakeup.subscribed)
    overtaken(backend, monkeypatch)
    met = ask_briefly(backend, waiter)
    assert isinstance(met, Contention)
    # It has no ticket, so no notification will come.
    until = clock.now() + 6.0
    assert backend.wait(waiter, met, until=until, interrupted=lambda: False) is None
    assert clock.now() < until


def test_a_release_that_is_overtaken_all_the_time_has_an_unknown_outcome(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    ask(backend, request(waits=True))
    with monkeypatch.context() as patches:
        overtaken(backend, patches)
        with pytest.raises(BackendUnavailable):
            backend.release("name", lease.owner, min_hold=0.0, deadline=clock.now() + 1.0)
    assert release(backend, lease) == "released"


def test_callers_of_a_serializable_database_exclude_each_other(
    bed: Bed, postgres_alias: str
) -> None:
    options = {"options": "-c default_transaction_isolation=serializable"}
    settings = {**connections.settings[postgres_alias], "OPTIONS": options}
    bed.stack.enter_context(databases.added("serializable", settings))
    backend = bed.backend("serializable", command_timeout=10.0, connections=10)
    answers: list[Any] = []
    together = threading.Barrier(8)

    def work() -> None:
        for number in range(10):
            together.wait(60)
            try:
                answers.append(ask(backend, request(f"n{number}", waits=True)))
            except Exception as error:
                answers.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    granted = [answer for answer in answers if isinstance(answer, Lease)]
    assert len(granted) == len({lease.name for lease in granted}) == 10
    assert [type(it) for it in answers if not isinstance(it, Lease)] == [Contention] * 70


# -- attempts that are over --------------------------------------------------------------------


@pytest.mark.parametrize("how", ["expired", "broken"])
def test_g4_a_waiter_whose_hand_over_ended_unseen_is_told_to_begin_anew(
    bed: Bed, database: str, how: str
) -> None:
    # W waits ──► it is handed the lease, unseen ──► that ends ──► X holds ──► W asks again
    backend = bed.backend(database, command_timeout=10.0)
    # One that is to be broken must not end before that.
    ttl = 0.2 if how == "expired" else 30.0
    first, waiter = grant(backend, request()), request(ttl=ttl, waits=True)
    assert isinstance(ask(backend, waiter), Contention)
    release(backend, first)
    if how == "broken":
        assert backend.break_silently("name", owner=waiter.owner)
    databases.until(lambda: not backend.locked("name", deadline=backend.call_deadline()))
    holder = grant(backend, request())
    answer = ask(backend, waiter)
    assert isinstance(answer, Contention)
    # No owner: the caller goes on with a new attempt, which gets a position in the queue.
    assert answer.owner == ""
    again = request(waits=True)
    assert isinstance(ask(backend, again), Contention)
    release(backend, holder)
    info = backend.get("name")
    assert info is not None
    assert info.owner == again.owner


# -- lost replies ------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [False, True])
def test_g5_a_break_whose_reply_was_lost_is_a_success(
    bed: Bed, postgres_alias: str, postgres_proxy: Proxy, waiting: bool
) -> None:
    backend = bed.backend(bed.behind(postgres_proxy, postgres_alias), command_timeout=10.0)
    lease = grant(backend, request())
    if waiting:
        assert isinstance(ask(backend, request(waits=True)), Contention)
    postgres_proxy.drop_replies(of=("UPDATE", "WITH"))
    assert backend.break_silently("name", owner=lease.owner)
    assert postgres_proxy.replies_dropped == 1
    # Another one is told that there is nothing to break any more.
    assert not backend.break_silently("name", owner=lease.owner)


def used_by_many(backend: DatabaseBackend, times: int = 40) -> None:
    for _ in range(times):
        release(backend, grant(backend, request()))


def lose_reply(
    monkeypatch: pytest.MonkeyPatch, backend: DatabaseBackend, method: str, then: Callable[[], None]
) -> list[tuple[Any, ...]]:
    """Lose the reply to the next plain statement; ``then`` happens before it is repeated.

    An acquire is not executed, as if it still waited for the row; its arguments are returned.
    """
    dialect, lost = store_of(backend).dialect, list[tuple[Any, ...]]()
    statement = getattr(dialect, method)

    def lose(*args: Any) -> Any:
        lost.append(args[1:])
        if method != "acquire":
            statement(*args)
        monkeypatch.undo()
        then()
        raise Failure("broken", ConnectionError("the reply was lost"))

    monkeypatch.setattr(dialect, method, lose)
    return lost


def plain_acquire(arguments: Any, one: Connection, store: Store) -> int | Found:
    return store.dialect.acquire(one, *arguments)


def test_g5_a_repeated_release_that_a_busy_name_no_longer_remembers_is_no_loss(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # released, reply lost ──► many others hold the name ──► released again
    backend = bed.backend(database, command_timeout=20.0)
    other = bed.backend(database, key_prefix=backend.options.key_prefix, command_timeout=20.0)
    lease = grant(backend, request())
    lose_reply(monkeypatch, backend, "release", lambda: used_by_many(other))
    assert release(backend, lease) == "unknown"
    # The first release of a lease cannot have happened before.
    assert release(backend, lease) == "refused"


def test_g5_a_repeated_release_of_many_that_are_no_longer_remembered_is_no_loss(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(database, command_timeout=20.0)
    other = bed.backend(database, key_prefix=backend.options.key_prefix, command_timeout=20.0)
    leases = [grant(backend, request()), grant(backend, request("quiet"))]
    lose_reply(monkeypatch, backend, "release_many", lambda: used_by_many(other))
    asked = [ReleaseRequest(lease.name, lease.owner, 0.0) for lease in leases]
    assert backend.release_many(asked, deadline=backend.call_deadline()) == ["unknown", "released"]


def test_g5_a_lost_lease_is_reported_as_lost_on_a_busy_name(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=20.0)
    lease = grant(backend, request())
    assert backend.break_silently(lease.name, owner=lease.owner)
    used_by_many(backend)
    assert release(backend, lease) == "broken"


def test_g5_a_copy_of_an_acquire_that_arrives_many_leases_later_is_granted_nothing(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # asked, no answer ──► asked again, granted ──► many others hold the name ──► the copy arrives
    backend = bed.backend(database, command_timeout=20.0)
    release(backend, grant(backend, request()))
    (attempt, lost) = request(), lose_reply(monkeypatch, backend, "acquire", lambda: None)
    release(backend, grant(backend, attempt))
    used_by_many(backend)
    copy = partial(plain_acquire, lost[0])
    assert table_of(backend).call(copy, backend.call_deadline()) == 0
    late = ask(
        bed.backend(database, key_prefix=backend.options.key_prefix, command_timeout=20.0), attempt
    )
    assert isinstance(late, Contention)
    assert late.owner == ""
    assert not backend.locked("name", deadline=backend.call_deadline())


@pytest.mark.parametrize("waits", [True, False])
def test_g5_a_copy_of_an_acquire_that_was_repeated_in_another_call_is_granted_nothing(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    backend = bed.backend(database, command_timeout=20.0)
    lease, attempt = grant(backend, request()), request(waits=waits, renewed=True)
    lost = lose_reply(monkeypatch, backend, "acquire", lambda: None)
    with pytest.raises(BackendUnavailable):
        # Too late to repeat it within this call.
        backend.acquire(attempt, deadline=clock.now())
    met = ask(backend, attempt)
    assert isinstance(met, Contention)
    wakeup = store_of(backend).wakeup
    if waits:
        databases.until(lambda: wakeup is None or wakeup.subscribed)
        # From here on it expects a notification.
        met = ask(backend, attempt)
        assert isinstance(met, Contention)
    release(backend, lease)
    if waits:
        # The lease was handed over to it. The row must record that before the lease is used.
        until = clock.now() + 20.0
        assert backend.wait(attempt, met, until=until, interrupted=lambda: False) is None
        release(backend, grant(backend, attempt))
    used_by_many(backend)
    assert isinstance(ask(backend, attempt), Contention)
    assert not backend.locked("name", deadline=backend.call_deadline())
    assert len(lost) == 1


def test_the_memory_of_ends_costs_a_busy_name_few_statements(
    bed: Bed, postgres_alias: str, postgres_proxy: Proxy
) -> None:
    backend = bed.backend(bed.behind(postgres_proxy, postgres_alias), command_timeout=10.0)
    used_by_many(backend, 20)
    before = postgres_proxy.count()
    used_by_many(backend, 56)
    commands = postgres_proxy.commands[before:]
    # Each read of the row is followed by a write.
    assert commands.count("SELECT") == 56 / 14
    assert len(commands) == 2 * 56 + 2 * commands.count("SELECT")
