"""Many callers of one name on a database: what each of them is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connections

from django_dlock import clock
from django_dlock.backends.database import DatabaseBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease, LeaseRequest
from tests.support import databases
from tests.support.database_bed import Bed, ask, grant, release, request
from tests.support.proxy import Proxy


def overtaken(backend: DatabaseBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, whoever reads a row finds it changed when it writes it.

    By private names, because nothing else makes others quicker each time.
    """
    for method in ("write", "insert"):
        monkeypatch.setattr(backend._store.dialect, method, lambda *args: False)


def ask_briefly(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease | Contention:
    return backend.acquire(attempt, deadline=clock.now() + 1.0)


def test_who_is_overtaken_by_others_all_the_time_is_told_of_contention(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    overtaken(backend, monkeypatch)
    answer = ask_briefly(backend, request(waits=True))
    assert isinstance(answer, Contention)
    assert answer.owner == lease.owner


def test_who_is_overtaken_on_a_free_name_is_told_of_its_last_owner(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    release(backend, lease)
    overtaken(backend, monkeypatch)
    # One that has waited reads the row at once.
    answer = ask_briefly(backend, request(waits=True, since=1.0))
    assert isinstance(answer, Contention)
    assert (answer.owner, answer.remaining) == (lease.owner, 0.0)


def test_who_is_overtaken_at_its_last_attempt_leaves_no_ticket(
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
    backend = bed.backend(database)
    first, waiter = grant(backend, request()), request(ttl=0.2, waits=True)
    assert isinstance(ask(backend, waiter), Contention)
    release(backend, first)
    if how == "broken":
        assert backend.break_("name", owner=waiter.owner)
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
    assert backend.break_("name", owner=lease.owner)
    assert postgres_proxy.replies_dropped == 1
    # Another one is told that there is nothing to break any more.
    assert not backend.break_("name", owner=lease.owner)
