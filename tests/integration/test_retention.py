"""Which idempotency records are deleted, on the databases that people use."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest.mock import Mock

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import ConnectionHandler, OperationalError, connections, transaction
from django.db.models.functions import Now
from django.db.models.signals import pre_delete
from django.test.utils import CaptureQueriesContext

from django_dlock import locks
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import FollowUp, IdempotencyRecord, LockEvent
from django_dlock.operators import audit
from django_dlock.records import idempotency, retention
from django_dlock.records.idempotency import Claim, ClaimRequest

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

State = IdempotencyRecord.State
LOCAL = "django_dlock.backends.local.LocalBackend"
WEEK = dt.timedelta(days=7)


class SilentBackend(LocalBackend):
    """An alias that does not answer and counts its calls."""

    asked = 0

    def get(self, name):
        type(self).asked += 1
        raise BackendUnavailable("nobody answers", name, self.alias)


@pytest.fixture(autouse=True)
def aliases(settings):
    settings.DLOCKS = {
        "default": {"BACKEND": LOCAL},
        "silent": {"BACKEND": f"{__name__}.SilentBackend"},
    }
    locks.reset()
    SilentBackend.asked = 0
    yield
    locks.reset()


@pytest.fixture
def database(database: str) -> str:
    """An alias with an empty table of records, outside any transaction."""
    IdempotencyRecord.objects.using(database).all().delete()
    return database


def begin(key: str, using: str, *, owner: str = "a", alias: str = "default") -> Claim:
    """A run of a key whose lease nobody holds."""
    request = ClaimRequest(
        scope="shop.charge",
        key=key,
        payload="p",
        ttl=WEEK,
        lock_alias=alias,
        lock_name=f"order:{key}",
        owner=owner,
    )
    claim = idempotency.claim(request, holds=lambda *holder: False, using=using)
    assert isinstance(claim, Claim)
    return claim


def hold(key: str, owner: str = "a") -> None:
    backend = locks["default"]
    request = LeaseRequest(name=f"order:{key}", owner=owner, ttl=30)
    assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)


def expire(using: str) -> None:
    expired = Now() - dt.timedelta(seconds=1)
    IdempotencyRecord.objects.using(using).update(expires_at=expired)


def keys(using: str) -> list[str]:
    return sorted(IdempotencyRecord.objects.using(using).values_list("key", flat=True))


def test_purge_deletes_what_expired_in_batches(database):
    for number in range(5):
        idempotency.complete(begin(str(number), database))
    expire(database)
    begin("kept", database)
    assert list(retention.purge(batch_size=2, using=database)) == [2, 2, 1]
    assert keys(database) == ["kept"]


def test_purge_deletes_published_follow_ups_in_batches(database):
    idempotency.complete(begin("42", database))
    record = IdempotencyRecord.objects.using(database).get()
    past = record.expires_at - 2 * WEEK
    follow_ups = FollowUp.objects.using(database)
    follow_ups.all().delete()
    for number in range(5):
        facts = {"task_id": str(number), "message": "{}", "created_at": past, "expires_at": past}
        follow_ups.create(record=record, published_at=past, **facts)
    follow_ups.create(record=record, **{**facts, "task_id": "pending"})
    with CaptureQueriesContext(connections[database]) as queries:
        assert list(retention.purge(batch_size=2, using=database)) == []
    deleted = [query for query in queries if query["sql"].startswith("DELETE")]
    assert len(deleted) == 3
    assert list(follow_ups.values_list("task_id", flat=True)) == ["pending"]


def test_purge_accepts_a_point_in_time(database):
    idempotency.complete(begin("42", database))
    moment = IdempotencyRecord.objects.using(database).get().expires_at
    assert list(retention.purge(before=moment, using=database)) == []
    later = moment + dt.timedelta(seconds=1)
    assert list(retention.purge(before=later, using=database)) == [1]


def test_g12_purge_keeps_the_record_of_a_living_run_past_its_retention(database):
    for key in ("alive", "dead", "taken over"):
        begin(key, database)
    begin("untold", database, alias="silent")
    begin("untold too", database, alias="silent")
    begin("renamed", database, alias="no alias of the settings")
    hold("alive")
    hold("taken over", owner="another")
    expire(database)
    assert list(retention.purge(using=database)) == [2]
    assert keys(database) == ["alive", "renamed", "untold", "untold too"]
    assert SilentBackend.asked == 1


def test_purge_continues_after_records_that_it_keeps(database):
    for key in "abc":
        begin(key, database)
        hold(key)
    idempotency.complete(begin("d", database))
    expire(database)
    assert list(retention.purge(batch_size=2, using=database)) == [0, 1]
    assert keys(database) == ["a", "b", "c"]


@contextmanager
def while_it_is_deleted(other: Callable[[], object]) -> Iterator[list[object]]:
    """Run a function on another thread after Django has found the rows to delete.

    A receiver of ``post_delete``, as projects have, makes Django find them with a separate query.
    """
    done: list[object] = []
    threads: list[threading.Thread] = []

    def run() -> None:
        try:
            # MariaDB may abort it as a deadlock; a real delivery would come again.
            with suppress(OperationalError):
                done.append(other())
        finally:
            connections.close_all()

    def collected(**facts: object) -> None:
        threads.append(threading.Thread(target=run))
        threads[-1].start()
        # It ends at once, or waits for the deleting transaction.
        threads[-1].join(1)

    pre_delete.connect(collected, sender=IdempotencyRecord)
    try:
        yield done
    finally:
        pre_delete.disconnect(collected, sender=IdempotencyRecord)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("how", ["purge", "forget"])
def test_g12_a_run_that_begins_while_its_record_is_deleted_keeps_it(database, how):
    idempotency.mark_failed(begin("42", database), "no")
    expire(database)
    with while_it_is_deleted(lambda: begin("42", database, owner="b")) as begun:
        if how == "purge":
            list(retention.purge(using=database))
        else:
            IdempotencyRecord.objects.db_manager(database).forget("shop.charge", "42")
    # In a new record or in the old one: a run that has begun can be recorded.
    for claim in begun:
        idempotency.complete(claim)


def test_forget_deletes_only_the_given_attempt(database):
    begin("42", database)
    begin("42", database, owner="b")
    records = IdempotencyRecord.objects.db_manager(database)
    assert not records.forget("shop.charge", "42", attempt=1)
    assert records.forget("shop.charge", "42", attempt=2)
    assert not records.forget("shop.charge", "42")


@pytest.mark.parametrize("alias", ["default", "silent", "no alias of the settings"])
def test_g12_forget_keeps_the_record_of_a_possibly_living_run_unless_forced(database, alias):
    begin("42", database, alias=alias)
    if alias == "default":
        hold("42")
    records = IdempotencyRecord.objects.db_manager(database)
    assert not records.forget("shop.charge", "42")
    assert keys(database) == ["42"]
    assert records.forget("shop.charge", "42", force=True)
    assert keys(database) == []


def follow_ups_of(key: str, using: str) -> FollowUp:
    """A published and a pending one; returns the pending one."""
    record = IdempotencyRecord.objects.using(using).get(key=key)
    facts = {"message": "{}", "created_at": record.created_at, "expires_at": record.expires_at}
    made = FollowUp.objects.using(using)
    made.create(record=record, task_id="sent", published_at=record.created_at, **facts)
    return made.create(record=record, task_id="pending", **facts)


def test_forget_deletes_the_follow_ups_of_its_record_alone(database):
    for key in ("42", "43"):
        idempotency.complete(begin(key, database))
        follow_ups_of(key, database)
    records = IdempotencyRecord.objects.db_manager(database)
    assert records.forget("shop.charge", "42", force=True)
    kept = FollowUp.objects.using(database)
    assert {follow_up.record.key for follow_up in kept} == {"43"}
    assert kept.count() == 2


def test_g13_forget_keeps_a_record_with_pending_follow_ups_unless_forced(database):
    """Their run is committed, and nobody would send them any more."""
    idempotency.complete(begin("42", database))
    pending = follow_ups_of("42", database)
    records = IdempotencyRecord.objects.db_manager(database)
    assert not records.forget("shop.charge", "42")
    assert keys(database) == ["42"]
    assert FollowUp.objects.using(database).count() == 2
    pending.published_at = pending.created_at
    pending.save()
    assert records.forget("shop.charge", "42")
    assert not FollowUp.objects.using(database).exists()


def test_forget_writes_a_lock_event(database):
    LockEvent.objects.all().delete()
    idempotency.complete(begin("42", database))
    follow_ups_of("42", database)
    records = IdempotencyRecord.objects.db_manager(database)
    assert not records.forget("shop.charge", "43")
    assert not LockEvent.objects.exists()
    assert records.forget("shop.charge", "42", force=True, user="grace")
    event = LockEvent.objects.get()
    assert (event.event, event.reason, event.user) == ("forgotten", "code", "grace")
    assert (event.alias, event.name, event.owner) == ("default", "order:42", "a")
    assert event.detail == {
        "scope": "shop.charge",
        "key": "42",
        "state": "succeeded",
        "attempt": 1,
        "task_id": "",
        "follow_ups": 2,
        "pending": 1,
    }


def test_a_record_is_forgotten_even_if_its_event_cannot_be_written(database, monkeypatch, caplog):
    idempotency.complete(begin("42", database))
    monkeypatch.setattr(LockEvent._meta, "db_table", "no_such_table")
    records = IdempotencyRecord.objects.db_manager(database)
    with transaction.atomic(using=database):
        assert records.forget("shop.charge", "42")
        assert keys(database) == []
    assert "The lock event 'forgotten' of lock 'order:42' was not written" in caplog.text


def test_forgetting_what_is_just_claimed_again_deletes_no_follow_ups(database):
    """The record that was seen, and the one that is there by now, have the same primary key."""
    idempotency.complete(begin("42", database))
    follow_ups_of("42", database)
    FollowUp.objects.using(database).filter(task_id="pending").delete()
    seen = IdempotencyRecord.objects.using(database).get()
    expire(database)
    begin("42", database, owner="b")
    assert retention.forget_record(seen) is None
    assert FollowUp.objects.using(database).count() == 1


def test_a_record_is_forgotten_in_a_project_that_has_no_database_for_events(database, monkeypatch):
    idempotency.complete(begin("42", database))
    nowhere = ConnectionHandler({"default": {"ENGINE": "django.db.backends.dummy"}})
    monkeypatch.setattr(audit, "connections", nowhere)
    # As Django's own database without an engine.
    monkeypatch.setattr(audit, "record", Mock(side_effect=ImproperlyConfigured))
    assert IdempotencyRecord.objects.db_manager(database).forget("shop.charge", "42")
    assert keys(database) == []
