"""The admin shows values that a stranger wrote into a store as damaged, and all other rows."""

from __future__ import annotations

import json

import pytest
from django.contrib.admin.utils import quote
from django.urls import reverse

from django_dlock import Lock, locks
from django_dlock.models import LockEvent
from django_dlock.operators.inspection import age_text
from django_dlock.process import current
from tests.support.aliases import LONG, alias, configured
from tests.support.redis_calls import client as redis_client

LIST = "/admin/django_dlock/heldlock/"
BASE = "{dlock:0}:2:"
HASH = {
    "owner": "stranger",
    "until": "9" * 13,
    "kind": "held",
    "token": "7",
    "ttl": "1000",
    "at": "1",
    "n": "0",
    "meta": "{}",
    "proc": "stranger",
}
DEEP = '{"path": ' + "[" * 30_000 + "]" * 30_000 + "}"
ROWS = {
    "deep": {"meta": DEEP},
    "surrogate": {"meta": '{"task_id": "\\ud800", "path": "\\udfff", "user": "\\udead"}'},
    "null": {"meta": '{"task_id": "\\u0000", "path": "/\\u0000"}', "owner": "a\0b"},
    "nested": {"meta": json.dumps({"task_id": [[1]], "path": {"a": 1}, "user": ["x"], "note": 1})},
    "enormous": {"meta": json.dumps({"path": "x" * 3_000_000})},
    "long": {"meta": json.dumps({"task_name": "x" * 50_000}), "owner": "o" * 5000},
    "times": {"until": "inf", "at": "nan", "ttl": "1e400", "n": "-1", "token": "-5"},
    "far": {"until": "9" * 15, "at": "-9", "ttl": "9" * 15},
    "kind": {"kind": "<b>odd</b>"},
    "bytes": {"meta": b"\xff", "owner": b"\xfe", "kind": b"\xfd"},
    "none": {field: "" for field in HASH if field != "owner"},
    "process": {"proc": "huge"},
}
STRANGE_NAMES = ["line\nbreak\rhere", "null\0", "x" * 3000, b"\xff\xfe", "/", "?a=b&c#d"]

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def damaged(own_redis, lock_events):
    with (
        configured({"default": alias(own_redis.url, TTL=LONG, OPTIONS={"command_timeout": 20})}),
        redis_client(own_redis) as server,
        Lock("sound:1"),
        Lock("sound:2"),
    ):
        for name, fields in ROWS.items():
            server.hset(f"{BASE}l:{name}", mapping={**HASH, **fields})
        names = [*ROWS, *STRANGE_NAMES]
        for name in STRANGE_NAMES:
            prefix = f"{BASE}l:".encode()
            raw = name if isinstance(name, bytes) else name.encode()
            server.hset(prefix + raw, mapping=HASH)
        server.set(f"{BASE}l:type", "a string")
        facts = current().as_dict()
        server.set(f"{BASE}p:stranger", f"nan {json.dumps(facts)}")
        facts["pid"] = 10**30
        server.set(f"{BASE}p:huge", f"{10**15} {json.dumps(facts)}")
        server.zadd(f"{BASE}i", {name: number for number, name in enumerate([*names, "type"])})
        for entry in ("x", b"\xff\n\n\nhuge\n" + DEEP.encode(), "o\n1\nheld\np\n{"):
            server.zadd(f"{BASE}q:sound:1", {entry: 1})
        yield server


def page(name, which="change"):
    return reverse(f"admin:django_dlock_heldlock_{which}", args=[quote(f"default/{name}")])


@pytest.mark.parametrize("order", ["", "?o=1", "?o=-3", "?o=4", "?o=5.2", "?o=6", "?q=sound"])
def test_the_list_shows_all_rows_and_marks_those_that_are_damaged(damaged, admin_client, order):
    answer = admin_client.get(LIST + order)
    assert answer.status_code == 200
    rows = {row.info.name: row for row in answer.context["cl"].result_list}
    assert {"sound:1", "sound:2"} <= set(rows)
    text = answer.content.decode()
    if "q=" not in order:
        assert set(rows) >= {*ROWS, "type"}
        assert len(rows) == len(ROWS) + len(STRANGE_NAMES) + 3
        marked = {name for name, row in rows.items() if row.info.damaged}
        odd = {"null", "nested", "long", "far"}
        assert marked == {*ROWS, "type"} - odd
        assert text.count(">damaged</span>") == len(marked)
        assert "Not as django-dlock writes it: metadata" in text
        assert len(text) < 600_000
    assert "<b>odd</b>" not in text


@pytest.mark.parametrize("name", [*ROWS, "type", "sound:1", *STRANGE_NAMES[:3], *STRANGE_NAMES[4:]])
@pytest.mark.parametrize("which", ["change", "release"])
def test_each_page_of_a_damaged_row_opens(damaged, admin_client, name, which):
    answer = admin_client.get(page(name, which))
    assert answer.status_code == 200
    assert len(answer.content) < 600_000


def test_the_page_says_what_is_damaged_and_nothing_that_the_entry_does_not_say(
    damaged, admin_client
):
    text = admin_client.get(page("type")).content.decode()
    assert "<dt>Damaged</dt><dd>type</dd>" in text
    for unknown in ("Held since", "Last sign of life"):
        assert unknown not in text
    deep = admin_client.get(page("deep")).content.decode()
    assert "<dt>Damaged</dt><dd>metadata</dd>" in deep
    assert "Held since" in deep


def test_the_age_of_an_entry_of_another_type_is_not_known(damaged, admin_client):
    rows = admin_client.get(LIST).context["cl"].result_list
    ages = {row.info.name: age_text(row.info) for row in rows}
    assert ages["type"] == ages["times"] == "-"
    assert ages["deep"] != "-"


def test_the_page_of_all_waiters_opens(damaged, admin_client):
    address = reverse("admin:django_dlock_heldlock_blocking")
    answer = admin_client.get(address)
    assert answer.status_code == 200
    text = answer.content.decode()
    assert "sound:<wbr>1" in text
    assert ">damaged</span>" in text


@pytest.mark.parametrize("name", ["type", "deep", "null", "long", "surrogate", "process"])
def test_an_operator_releases_a_damaged_row(damaged, admin_client, name):
    info = locks["default"].get(name)
    answer = admin_client.post(
        page(name, "release"), {"owner": info.owner, "force": "on"}, follow=True
    )
    assert answer.status_code == 200
    assert locks["default"].get(name) is None
    assert LockEvent.objects.get(event="broken").name == name
    assert {info.name for info in locks["default"].list()} >= {"sound:1", "sound:2"}
