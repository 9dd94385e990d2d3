"""Rows that somebody else has written: the admin shows them escaped, and all others beside them."""

from __future__ import annotations

import datetime as dt
import html
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db.models import JSONField, Value
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from hypothesis import example, given
from hypothesis import strategies as some

from django_dlock.admin.figures import RANGES
from django_dlock.metrics import instruments
from django_dlock.models import FollowUp, IdempotencyRecord, LockEvent, LockStatistics
from django_dlock.testing import local_locks
from tests.support.fuzzing import examples, json_values, texts

pytestmark = pytest.mark.django_db

UTC = dt.timezone.utc
MARK = "<i>&\"'</i>"
"""In texts that are shown; a page that has it unescaped would run what a visitor has sent."""


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def storable(value: str) -> bool:
    # SQLite stores neither lone surrogates nor what follows a NUL.
    return not re.search("[\ud800-\udfff\0]", value)


def words(longest: int) -> some.SearchStrategy[str]:
    return some.one_of(texts(min(longest, 30)).filter(storable), some.just(MARK[:longest]))


def deep(levels: int, inside: str = "") -> str:
    return "[" * levels + inside + "]" * levels


long_texts = some.one_of(
    words(60),
    json_values().map(json.dumps),
    some.sampled_from(["NaN", "1" * 5_000, deep(900), deep(100_000), '"\\ud800"', '{"args": 1}']),
    json_values().map(lambda value: json.dumps({"args": value, "kwargs": value})),
    json_values().map(lambda value: json.dumps({"args": [], "kwargs": {}, "options": value})),
)
times = some.one_of(
    some.datetimes(timezones=some.just(UTC)),
    some.sampled_from([dt.datetime.min.replace(tzinfo=UTC), dt.datetime.max.replace(tzinfo=UTC)]),
)
integers = some.sampled_from([0, 1, 2**31 - 1])
tokens = some.sampled_from([None, 0, -1, 2**63 - 1, -(2**63)])


records = some.fixed_dictionaries(
    {
        "scope": words(255),
        "key": words(255),
        "payload": words(64),
        "state": some.sampled_from([*IdempotencyRecord.State.values, ""]) | words(16),
        "ending": some.sampled_from([*IdempotencyRecord.Ending.values, ""]) | words(16),
        "attempt": integers,
        "deaths": integers,
        "lock_alias": some.sampled_from(["default", "default", ""]) | words(255),
        "lock_name": words(255),
        "owner": words(255),
        "token": tokens,
        "task_id": words(255),
        "worker": words(255),
        "step": integers,
        "message": some.none() | long_texts,
        "result": long_texts,
        "error": long_texts,
        "created_at": times,
        "started_at": times,
        "finished_at": some.none() | times,
        "expires_at": times,
    }
)
NOW = dt.datetime(2026, 1, 1, tzinfo=UTC)
PLAIN = {
    "scope": "plain",
    "key": "plain",
    "payload": "",
    "state": "running",
    "ending": "",
    "attempt": 1,
    "deaths": 0,
    "lock_alias": "default",
    "lock_name": "plain",
    "owner": "o",
    "token": None,
    "task_id": "",
    "worker": "",
    "step": 0,
    "message": None,
    "result": "",
    "error": "",
    "created_at": NOW,
    "started_at": NOW,
    "finished_at": None,
    "expires_at": NOW,
}


def write(*rows: dict[str, Any]) -> list[int]:
    """The rows, in the place of all others; and one that is as we write them."""
    IdempotencyRecord.objects.all().delete()
    made = [
        IdempotencyRecord.objects.create(**{**PLAIN, **row}, digest=f"{number}")
        for number, row in enumerate(({"key": "the good one", "state": "succeeded"}, *rows))
    ]
    return [record.pk for record in made[1:]]


def page(client: Client, model: str, page: str, *args: Any, **query: str) -> str:
    address = reverse(f"admin:django_dlock_{model}_{page}", args=args)
    response = client.get(address, query)
    assert response.status_code == 200, (address, response.status_code)
    shown = response.content.decode()
    assert MARK not in shown
    return shown


@examples(8)
@given(some.lists(records, min_size=1, max_size=3))
@example([{**PLAIN, "state": "new"}])
@example([{**PLAIN, "result": deep(900)}])
@example([{**PLAIN, "result": deep(100_000)}])
@example([{**PLAIN, "message": deep(400)}])
@example([{**PLAIN, "message": json.dumps({"args": json.loads(deep(400)), "kwargs": {}})}])
@example([{**PLAIN, "lock_name": "a\nb"}])
@example([{**PLAIN, "lock_name": ""}])
@example([{**PLAIN, "lock_alias": "gone"}])
@example([{**PLAIN, "started_at": dt.datetime.min.replace(tzinfo=UTC)}])
@example([{**PLAIN, "error": "\u202e" + MARK}])
def test_odd_records_are_shown_and_hide_no_others(client: Client, rows: Any) -> None:
    keys = write(*rows)
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
        with timezone.override(zone):
            assert "the good one" in page(client, "idempotencyrecord", "changelist")
    for key in keys:
        page(client, "idempotencyrecord", "change", key)
        page(client, "idempotencyrecord", "forget", key)
        address = reverse("admin:django_dlock_idempotencyrecord_rerun", args=[key])
        assert client.get(address).status_code in (200, 302)


@examples(15)
@given(records, some.sampled_from(["forget", "rerun"]), some.booleans())
@example({**PLAIN, "message": "not JSON"}, "rerun", True)
@example({**PLAIN, "message": "[]"}, "rerun", True)
@example({**PLAIN, "message": deep(100_000)}, "rerun", True)
@example({**PLAIN, "message": '{"args": [], "kwargs": {}}'}, "rerun", True)
@example({**PLAIN, "message": '{"task": 1, "options": {}}'}, "rerun", True)
@example({**PLAIN, "message": '{"task": "x", "options": {"eta": 1}}'}, "rerun", True)
@example({**PLAIN, "state": "new"}, "forget", True)
def test_steps_end_with_a_message(client: Client, row: Any, step: str, force: bool) -> None:
    FollowUp.objects.all().delete()
    (key,) = write(row)
    facts = {name: row[name] for name in ("attempt", "state", "owner")}
    address = reverse(f"admin:django_dlock_idempotencyrecord_{step}", args=[key])
    response = client.post(address, {**facts, "force": "on" if force else ""}, follow=True)
    assert response.status_code == 200
    assert MARK not in response.content.decode()
    assert "the good one" in page(client, "idempotencyrecord", "changelist")


@examples(15)
@given(some.lists(records, min_size=1, max_size=3))
@example([{**PLAIN, "state": "running", "lock_name": ""}])
@example([{**PLAIN, "state": "running", "lock_name": "a\nb"}])
@example([{**PLAIN, "state": "new"}])
def test_odd_records_are_purged_like_others(rows: Any) -> None:
    write(*rows)
    IdempotencyRecord.objects.update(expires_at=NOW)
    call_command("purge_idempotency_records", verbosity=0)
    left = IdempotencyRecord.objects.values_list("state", "lock_alias")
    # A run whose alias cannot be asked may be alive.
    assert all(state == "running" and alias != "default" for state, alias in left)


# -- follow-ups ----------------------------------------------------------------------------

follow_ups = some.fixed_dictionaries(
    {
        "record_id": some.sampled_from([0, -1, 2**63 - 1]),
        "task": words(255),
        "task_id": words(255),
        "message": long_texts,
        "error": long_texts,
        "created_at": times,
        "published_at": some.none() | times,
        "expires_at": times,
    }
)


@examples(6)
@given(some.lists(follow_ups, min_size=1, max_size=3))
def test_odd_follow_ups_are_shown_and_published_one_by_one(client: Client, rows: Any) -> None:
    FollowUp.objects.all().delete()
    good = {"record_id": 1, "task": "shop.good", "task_id": "t", "message": "", "created_at": NOW}
    made = [FollowUp.objects.create(**row) for row in ({**good, "expires_at": NOW}, *rows)]
    assert "shop.good" in page(client, "followup", "changelist", published="all")
    for follow_up in made:
        page(client, "followup", "change", follow_up.pk)
    address = reverse("admin:django_dlock_followup_changelist")
    chosen = {"action": "publish_selected", "_selected_action": [row.pk for row in made]}
    response = client.post(f"{address}?published=all", chosen, follow=True)
    assert response.status_code == 200
    assert MARK not in response.content.decode()


# -- lock events ---------------------------------------------------------------------------

NULL = Value(None, JSONField())
"""The ``null`` of JSON, not that of SQL."""

events = some.fixed_dictionaries(
    {
        "when": times,
        "event": some.sampled_from(LockEvent.Event.values) | words(16),
        "alias": some.sampled_from(["default", ""]) | words(255),
        "name": words(255),
        "owner": words(255),
        "token": tokens,
        "reason": words(255),
        "user": words(255),
        "detail": some.one_of(
            json_values(),
            some.dictionaries(
                some.sampled_from(["host", "pid", "held_for", "waited", "task_name", "path"]),
                json_values(),
                max_size=6,
            ),
        )
        # The database itself refuses what is no JSON, and so NaN.
        .filter(lambda value: not re.search(r"\b(NaN|Infinity)\b", json.dumps(value)))
        .map(lambda value: NULL if value is None else value),
    }
)
EVENT = {
    "when": NOW,
    "event": "lost",
    "alias": "default",
    "name": "plain",
    "owner": "o",
    "token": None,
    "reason": "expired",
    "user": "",
    "detail": {},
}


@examples(12)
@given(some.lists(events, min_size=1, max_size=4))
@example([{**EVENT, "event": "new"}])
@example([{**EVENT, "detail": NULL}])
@example([{**EVENT, "detail": []}])
@example([{**EVENT, "detail": "text"}])
@example([{**EVENT, "detail": 7}])
@example([{**EVENT, "detail": {"host": "h"}}])
@example([{**EVENT, "detail": {"held_for": 1e300}}])
@example([{**EVENT, "detail": {"held_for": 10**400}}])
@example([{**EVENT, "detail": {"waited": -1}}])
@example([{**EVENT, "detail": json.loads(deep(300))}])
@example([{**EVENT, "name": ""}])
@example([{**EVENT, "name": "a\nb"}])
@example([{**EVENT, "detail": {"path": MARK, "task_name": [MARK]}}])
def test_odd_events_are_shown_and_hide_no_others(client: Client, rows: Any) -> None:
    LockEvent.objects.all().delete()
    good = {**EVENT, "name": "the good one"}
    made = [LockEvent.objects.create(**row) for row in (good, *rows)]
    assert "the good one" in html.unescape(page(client, "lockevent", "changelist"))
    for event in made:
        page(client, "lockevent", "change", event.pk)


# -- statistics ----------------------------------------------------------------------------

rows_of_statistics = some.fixed_dictionaries(
    {
        "metric": some.sampled_from(
            [
                *(instruments.WAITS.name, instruments.HOLDS.name, instruments.LOSSES.name),
                *(instruments.HELD.name, instruments.LATENESS.name, instruments.REQUEUES.name),
                instruments.CONTENTIONS.name,
            ]
        )
        | words(64),
        "alias": some.sampled_from(["default", ""]) | words(255),
        "group": words(64),
        "label": words(64),
        "count": some.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]),
        "total": some.floats(allow_nan=False) | some.sampled_from([1e308, -1e308]),
        "highest": some.floats(allow_nan=False) | some.sampled_from([1e308, -1.0]),
        "bucket_0": some.sampled_from([0, 1, -1, 2**31 - 1]),
        "bucket_11": some.sampled_from([0, 1, -1, 2**31 - 1]),
    }
)


def counted(**facts: Any) -> dict[str, Any]:
    buckets = dict.fromkeys(LockStatistics.BUCKETS, 0)
    usual = {"metric": instruments.LOSSES.name, "alias": "default", "group": "order", "label": "x"}
    return {**buckets, **usual, "count": 1, "total": 1.0, "highest": 1.0, **facts}


INFINITE = float("inf")


@examples(10)
@given(some.lists(rows_of_statistics, min_size=1, max_size=4))
@example([counted(metric=instruments.WAITS.name, total=INFINITE, highest=INFINITE, bucket_11=1)])
@example([counted(metric=instruments.HELD.name, total=INFINITE)])
@example([counted(metric=instruments.HELD.name, total=-INFINITE)])
@example([counted(metric=instruments.LATENESS.name, highest=INFINITE)])
@example([counted(metric=instruments.LATENESS.name, highest=-1.0)])
@example([counted(metric=instruments.CONTENTIONS.name, count=-1)])
@example([counted(metric=instruments.CONTENTIONS.name, group=MARK, label=MARK, count=2)])
def test_odd_statistics_are_drawn(client: Client, rows: Any) -> None:
    LockStatistics.objects.all().delete()
    now = int(timezone.now().timestamp())
    for chosen in RANGES.values():
        start = now // chosen.period * chosen.period - 2 * chosen.period
        for number, row in enumerate([counted(group="good", count=3), *rows]):
            key = f"{LockStatistics.first_id(chosen.period, start)}{number}"
            LockStatistics.objects.create(
                id=key, period=chosen.period, start=start, **{**counted(), **row}
            )
    for chosen in RANGES:
        shown = page(client, "lockstatistics", "changelist", range=chosen)
        assert "nan" not in re.findall(r'[dx12yr]="([^"]*)"', shown)
