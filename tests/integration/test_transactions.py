"""G15: a lock outlives the transaction it guards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import transaction
from django.db.transaction import TransactionManagementError

from django_dlock import LeaseLost, Lock, locks, signals
from django_dlock.backends.local import LocalBackend
from django_dlock.core import dispatch

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    locks.reset()


def guard(**options: object) -> Lock:
    return Lock("it", using="local", **options)  # type: ignore[arg-type]


def test_g15_the_warning_for_a_release_inside_the_transaction_names_the_solution(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with transaction.atomic(), guard():
        pass
    assert "hold_until='commit'" in caplog.text


def test_g15_a_release_after_the_transaction_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "django_dlock"):
        with guard(), transaction.atomic():
            pass
        with transaction.atomic():
            lock = guard()
            lock.acquire()
        lock.release()
        # Acquired in one transaction, released in another that began later.
        with transaction.atomic():
            lock.acquire()
        with transaction.atomic():
            lock.release()
    me = threading.get_ident()
    # Other threads may warn that the machine is busy.
    assert [record.message for record in caplog.records if record.thread == me] == []


def test_g15_hold_until_commit_releases_after_the_commit() -> None:
    with transaction.atomic():
        with guard(hold_until="commit") as lock:
            pass
        assert lock.locked()
        assert lock.held
    assert not lock.locked()
    assert lock.state == "free"


def test_g2_a_lock_entered_again_before_the_commit_is_still_held_after_it() -> None:
    lock = guard(hold_until="commit", reentrant=True)
    with transaction.atomic():
        with lock:
            pass
        lock.acquire()
    assert lock.held
    assert lock.locked()
    lock.release()
    assert not lock.locked()


def test_g15_hold_until_commit_waits_for_the_commit_itself() -> None:
    at_commit: list[bool] = []
    lock = guard(hold_until="commit")
    connection = transaction.get_connection()
    commit = connection._commit

    def spy() -> None:
        at_commit.append(lock.locked())
        commit()

    connection._commit = spy  # type: ignore[method-assign]
    try:
        with transaction.atomic(), lock:
            pass
    finally:
        del connection._commit
    assert at_commit == [True]
    assert not lock.locked()


def test_g15_hold_until_commit_releases_after_a_rollback() -> None:
    lock = guard(hold_until="commit")
    with pytest.raises(KeyError), transaction.atomic():
        with lock:
            pass
        assert lock.locked()
        raise KeyError
    assert not lock.locked()


def test_g15_a_rolled_back_savepoint_does_not_release() -> None:
    lock = guard(hold_until="commit")
    with transaction.atomic():
        with pytest.raises(KeyError), transaction.atomic():
            with lock:
                pass
            raise KeyError
        assert lock.locked(), "the outer transaction is still open"
    assert not lock.locked()


def test_hold_until_commit_without_a_transaction_releases_at_once() -> None:
    with guard(hold_until="commit") as lock:
        pass
    assert not lock.locked()


def test_a_loss_before_the_commit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with transaction.atomic():
        with guard(hold_until="commit") as lock:
            pass
        locks["local"].break_("it", owner=lock.owner or "")
    assert "After the transaction" in caplog.text


def test_g2_a_loss_before_the_release_is_raised_while_the_transaction_can_be_rolled_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = threading.Event()
    lock = guard(hold_until="commit", ttl=3, on_lost=lambda *_: told.set())
    with pytest.raises(LeaseLost, match="broken"), transaction.atomic(), lock:
        Group.objects.create(name="written")
        locks["local"].break_("it", owner=lock.owner or "")
        assert told.wait(20)
    assert not Group.objects.exists()
    # It is told once.
    assert "After the transaction" not in caplog.text


def test_g2_a_lease_acquired_after_a_loss_in_the_same_transaction_is_held() -> None:
    told = threading.Event()
    lock = guard(hold_until="commit", ttl=3, on_lost=lambda *_: told.set())
    with transaction.atomic():
        with pytest.raises(LeaseLost), transaction.atomic(), lock:
            locks["local"].break_("it", owner=lock.owner or "")
            assert told.wait(20)
        with transaction.atomic(), lock:
            lock.check()
            assert lock.state == "held"
        assert lock.locked()
    assert not lock.locked()
    assert lock.state == "free"


@pytest.fixture
def released() -> Iterator[threading.Event]:
    told = threading.Event()

    def tell(**_: Any) -> None:
        told.set()

    signals.released.connect(tell)
    yield told
    signals.released.disconnect(tell)


def test_g15_a_lock_is_released_although_an_earlier_function_of_on_commit_raises(
    released: threading.Event,
) -> None:
    def fails() -> None:
        raise KeyError

    lock = guard(hold_until="commit", ttl=3)
    # The error is kept, and with it the functions that Django has not called.
    with pytest.raises(KeyError) as kept, transaction.atomic():
        transaction.on_commit(fails)
        with lock:
            pass
    assert released.wait(20)
    assert not lock.locked()
    del kept


def test_g15_a_lock_is_released_although_its_transactions_connection_was_closed(
    released: threading.Event,
) -> None:
    connection = transaction.get_connection()
    lock = guard(hold_until="commit", ttl=3)
    with transaction.atomic():
        Group.objects.create(name="written")
        with lock:
            pass
        connection.close()
    assert released.wait(20)
    assert not lock.locked()


@pytest.fixture
def renewed() -> Iterator[threading.Event]:
    told = threading.Event()

    def tell(**_: Any) -> None:
        told.set()

    signals.renewed.connect(tell)
    yield told
    signals.renewed.disconnect(tell)


def test_g15_a_lock_is_kept_while_its_transaction_lasts(renewed: threading.Event) -> None:
    lock = guard(hold_until="commit", ttl=3)
    with transaction.atomic():
        with transaction.atomic(), lock:
            pass
        assert renewed.wait(20)
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_g15_a_lock_is_kept_while_a_second_transaction_lasts(
    renewed: threading.Event, released: threading.Event, postgres_alias: str
) -> None:
    def fails() -> None:
        raise KeyError

    lock = guard(hold_until="commit", ttl=3)
    with transaction.atomic(using=postgres_alias):
        with pytest.raises(KeyError) as kept, transaction.atomic():
            transaction.on_commit(fails)
            with lock:
                pass
        renewed.clear()
        assert renewed.wait(20)
        assert dispatch.flush(20)
        assert lock.locked()
    # Nobody was told of its end, either.
    assert released.wait(20)
    del kept


def test_g15_hold_until_commit_is_refused_in_manual_transaction_management() -> None:
    lock = guard(hold_until="commit")
    transaction.set_autocommit(False)
    try:
        with pytest.raises(TransactionManagementError, match=r"set_autocommit.*'default'"), lock:
            pass
        with pytest.raises(TransactionManagementError):
            lock.acquire(blocking=False)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not lock.locked()


def test_g15_a_manual_transaction_that_began_in_the_block_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        with guard(hold_until="commit"):
            transaction.set_autocommit(False)
        assert "manual transaction on database 'default'" in caplog.text
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_g13_functions_of_on_commit_are_called_although_a_release_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SoftTimeLimit(Exception):
        pass

    def interrupted(*_: Any, **__: Any) -> None:
        called.append("release")
        raise SoftTimeLimit

    called: list[str] = []
    with transaction.atomic():
        with guard(hold_until="commit"):
            pass
        transaction.on_commit(lambda: called.append("publish"))
        monkeypatch.setattr(LocalBackend, "release", interrupted)
    assert called[0] == "release"
    assert called[-1] == "publish"
