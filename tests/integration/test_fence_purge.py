"""``purge_fences``: rows of the fence table that nobody has touched for long."""

from __future__ import annotations

import datetime as dt
import io
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.models.signals import post_delete
from django.test import override_settings

from django_dlock import Lock, StaleToken, locks
from django_dlock.databases.time import Now
from django_dlock.models import Fence
from django_dlock.records import retention
from tests.support.aliases import configured

LOCAL = "django_dlock.backends.local.LocalBackend"
DAY = dt.timedelta(days=1)

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(autouse=True)
def dlocks():
    day, week = 86_400, 7 * 86_400
    entries = {"default": {"BACKEND": LOCAL, "MAX_HOLD": day}}
    with configured({**entries, "long": {"BACKEND": LOCAL, "MAX_HOLD": week}}):
        yield
    locks.reset()


def fence(using: str, name: str, *, age: dt.timedelta) -> Fence:
    facts = {"alias": "default", "key_prefix": "dlock", "name": name}
    row = Fence(digest=Fence.digest_of(**facts), token=1, updated_at=Now() - age, **facts)
    Fence.objects.using(using).bulk_create([row])
    return row


def left(using: str) -> set[str]:
    return set(Fence.objects.using(using).values_list("name", flat=True))


def purge(using: str, **options: Any) -> str:
    out = io.StringIO()
    call_command("purge_fences", using=using, stdout=out, **options)
    return out.getvalue()


def test_only_rows_that_nobody_has_touched_for_so_long_are_deleted(database):
    for days in (1, 20, 40, 100, 200):
        fence(database, str(days), age=days * DAY)
    assert purge(database, verbosity=0) == "2 fences were deleted.\n"
    assert left(database) == {"1", "20", "40"}
    assert purge(database, older_than=30, batch_size=1, format="json") == '{\n  "deleted": 1\n}\n'
    assert left(database) == {"1", "20"}


@pytest.mark.parametrize("days", [0, 0.5, 6.99])
def test_rows_are_kept_for_at_least_the_largest_max_hold(days):
    fence("default", "old", age=100 * DAY)
    with pytest.raises(CommandError, match=r"DLOCKS\['long'\]\['MAX_HOLD'\].* 7 days") as caught:
        purge("default", older_than=days)
    assert caught.value.returncode == 2
    assert left("default") == {"old"}
    assert purge("default", older_than=7) == "1 fences were deleted.\n"


@pytest.mark.parametrize("days", [-1.0, float("nan"), float("inf"), 1e9])
def test_wrong_usage_is_refused(days):
    with pytest.raises(CommandError, match="must be") as caught:
        purge("default", older_than=days)
    assert caught.value.returncode == 2


def test_without_valid_settings_nothing_is_deleted():
    fence("default", "old", age=100 * DAY)
    wrong = override_settings(DLOCKS={"default": {"BACKEND": LOCAL, "MAX_HOLD": "x"}})
    with wrong, pytest.raises(CommandError, match="MAX_HOLD") as caught:
        purge("default")
    assert caught.value.returncode == 1
    assert left("default") == {"old"}


@pytest.mark.parametrize("with_receiver", [False, True])
def test_g3_a_row_that_is_touched_after_it_was_read_stays(database, with_receiver):
    """With a receiver of ``post_delete``, Django deletes by the keys that it has read."""
    row = fence(database, "touched", age=100 * DAY)
    fence(database, "old", age=100 * DAY)
    touched = list[str]()

    def touch_after_reading(execute, sql, params, many, context):
        answer = execute(sql, params, many, context)
        if sql.startswith("SELECT") and not touched:
            touched.append(sql)
            Fence.objects.using(database).filter(pk=row.pk).update(token=2, updated_at=Now())
        return answer

    def hear(**facts: Any) -> None:
        pass

    if with_receiver:
        post_delete.connect(hear, sender=Fence)
    try:
        with connections[database].execute_wrapper(touch_after_reading):
            (deleted,) = retention.purge_fences(untouched_for=30 * DAY, using=database)
    finally:
        post_delete.disconnect(hear, sender=Fence)
    assert touched
    assert deleted == 1
    assert left(database) == {"touched"}


def test_a_row_that_a_holder_has_locked_is_left_out(database):
    if not connections[database].features.has_select_for_update_skip_locked:
        pytest.skip("SQLite has no locks of rows")
    fence(database, "it", age=100 * DAY)
    other = connections[database].copy()
    try:
        with other.cursor() as cursor:
            other.set_autocommit(False)
            cursor.execute("UPDATE django_dlock_fence SET token = 5 WHERE name = 'it'")
            assert list(retention.purge_fences(untouched_for=30 * DAY, using=database)) == [0]
            other.rollback()
    finally:
        other.close()
    assert left(database) == {"it"}


def test_the_clock_of_the_database_says_when_a_holder_touched_the_row(database, monkeypatch):
    from django.utils import timezone

    past = timezone.now() - 365 * DAY
    monkeypatch.setattr(timezone, "now", lambda: past)
    lock = Lock("it", using="default", bound=False, renew=False)
    assert lock.acquire(blocking=False)
    for _ in range(2):
        with lock.atomic(using=database):
            pass
    assert list(retention.purge_fences(untouched_for=30 * DAY, using=database)) == []
    assert left(database) == {"it"}
    lock.release()


def test_g3_a_good_holder_whose_row_is_purged_meanwhile_is_not_refused(database):
    """The row was untouched for long, and is deleted between two statements of the holder."""
    lock = Lock("it", using="default", bound=False, renew=False)
    assert lock.acquire(blocking=False)
    fence(database, "it", age=100 * DAY)
    purged = list[str]()

    def purge_after_reading(execute, sql, params, many, context):
        answer = execute(sql, params, many, context)
        if sql.startswith("SELECT") and not purged:
            purged.append(sql)
            Fence.objects.using(database).all().delete()
        return answer

    purging = connections[database].execute_wrapper(purge_after_reading)
    with purging, lock.atomic(using=database):
        pass
    assert purged
    assert Fence.objects.using(database).get().token == lock.token
    with pytest.raises(StaleToken), lock.atomic(using=database):
        Fence.objects.using(database).all().delete()
    assert not transaction.get_connection(database).in_atomic_block
    lock.release()
