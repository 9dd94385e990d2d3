"""Records of runs whose process is gone: they say "running", because nobody could write the end."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping

import pytest
from celery import Celery
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from kombu.utils import json

from django_dlock import locks
from django_dlock.admin import runs
from django_dlock.admin.base import local_text
from django_dlock.backends.local import LocalBackend
from django_dlock.celery.publishing.redelivery import redelivery_of
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import LeaseInfo
from django_dlock.models import IdempotencyRecord
from django_dlock.records.liveness import states_of
from testproject.celery import app as usual

RECORDS = "/admin/django_dlock/idempotencyrecord/"

pytestmark = pytest.mark.django_db(transaction=True)

asked: list[tuple[str, int]] = []
"""Alias, and how many names it was asked for."""


class Store(LocalBackend):
    """Tells what the name of each lock says, and counts the questions for many."""

    def get_many(self, names):
        asked.append((self.alias, len(names)))
        found = ((name, self._told(name)) for name in names)
        return {name: info for name, info in found if info is not None}

    def get(self, name):
        return self._told(name)

    def _told(self, name):
        state = name.partition(":")[0]
        if state == "away":
            raise BackendUnavailable("nobody answers", name, self.alias)
        if state in ("unlocked", "ending"):
            return None
        owner = "another" if state == "taken" else "owner"
        told = "alive" if state == "taken" else state
        at = timezone.now()
        return LeaseInfo(name, self.alias, "held", owner, 1, at, 1.0, 9.0, 0, 0, None, told)


@pytest.fixture(autouse=True)
def _aliases(settings):
    asked.clear()
    store = {"BACKEND": f"{__name__}.Store"}
    settings.DLOCKS = {"default": store, "other": store, "away": store}
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def broker():
    """Makes an app with this URL the current one."""
    apps = []

    def use(url, **transport_options):
        app = Celery("interrupted", broker=url, set_as_current=False)
        app.conf.broker_transport_options = transport_options
        app.set_current()
        apps.append(app)
        return app

    yield use
    usual.set_current()


numbers = iter(range(1_000_000))


def record(run="dead", alias="default", **facts):
    now = timezone.now()
    key = f"{run}-{next(numbers)}"
    values = {
        "scope": "shop.charge",
        "state": "running",
        "attempt": 1,
        "lock_alias": alias,
        "lock_name": f"{run}:{key}",
        "owner": "owner",
        "task_id": f"id-{key}",
        "created_at": now,
        "started_at": now,
        "expires_at": now + dt.timedelta(days=7),
        **facts,
    }
    digest = IdempotencyRecord.digest_of(values["scope"], key)
    return IdempotencyRecord.objects.create(key=key, digest=digest, **values)


def told_of(client, it, query=""):
    """The text in the state column of a record."""
    page = client.get(RECORDS + query).content.decode()
    row = re.search(rf"<tr>(?:(?!<tr>).)*/{it.pk}/change/.*?</tr>", page, re.DOTALL)
    assert row, "the record is not in the list"
    cell = re.search(r'<td class="field-state_badge">(.*?)</td>', row[0], re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", cell[1]).split())


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("dead", "interrupted its process is gone"),
        ("unlocked", "interrupted it holds its lock no longer"),
        ("taken", "interrupted it holds its lock no longer"),
        ("silent", "running no sign of life"),
        ("alive", "running"),
        ("unknown", "running"),
    ],
)
def test_the_list_says_whether_the_process_is_gone(admin_client, broker, state, shown):
    broker("redis://127.0.0.1:1/0")
    said = told_of(admin_client, record(state))
    if shown.startswith("interrupted"):
        assert said.startswith(f"{shown} delivered again at about ")
    else:
        assert said == shown


def test_a_store_that_does_not_answer_is_not_taken_for_a_death(admin_client):
    said = "running not known whether it still runs"
    assert told_of(admin_client, record("away", "away")) == said
    assert told_of(admin_client, record("dead", "undefined")) == said


def test_a_run_that_ends_meanwhile_is_not_shown_as_interrupted(admin_client, monkeypatch):
    it = record("ending")

    def ends(self, names):
        IdempotencyRecord.objects.filter(pk=it.pk).update(state="succeeded")
        return {}

    monkeypatch.setattr(Store, "get_many", ends)
    assert told_of(admin_client, it) == "succeeded"


def test_a_page_of_a_hundred_records_asks_each_alias_once(admin_client):
    def queries() -> int:
        with CaptureQueriesContext(connection) as found:
            assert admin_client.get(RECORDS).status_code == 200
        return len(found)

    for alias in ("default", "other"):
        record("dead", alias)
    few = queries()
    for alias in ("default", "other"):
        for state in ("dead", "unlocked", "silent", "alive") * 12:
            record(state, alias)
    record("dead", "away", state="succeeded")
    asked.clear()
    assert queries() == few
    # Not about a record that does not say that it is running.
    assert sorted(asked) == [("default", 49), ("other", 49)]


def test_the_filter_finds_interrupted_runs(admin_client):
    found = {state: record(state) for state in ("dead", "unlocked", "silent", "alive")}
    record("dead", state="succeeded")
    away = record("away", "away")

    def keys(run):
        page = admin_client.get(f"{RECORDS}?run={run}")
        return {each.pk for each in page.context["cl"].result_list}

    assert keys("interrupted") == {found["dead"].pk, found["unlocked"].pk}
    assert keys("silent") == {found["silent"].pk}
    assert keys("unknown") == {away.pk}
    assert admin_client.get(f"{RECORDS}?run=x").status_code == 302


def test_the_filter_reads_the_latest_records_only(admin_client, monkeypatch):
    old, new = record("dead"), record("dead")
    monkeypatch.setattr(runs.BoundedPaginator, "MAX_ROWS", 1)
    page = admin_client.get(f"{RECORDS}?run=interrupted")
    assert [each.pk for each in page.context["cl"].result_list] == [new.pk] != [old.pk]


# -- what comes next ------------------------------------------------------------------------


EAGER = json.dumps({"task": "t", "args": [], "kwargs": {}, "options": {}})
SENT = json.dumps({"task": "t", "args": [], "kwargs": {}, "options": {"routing_key": "celery"}})


@pytest.mark.parametrize(
    ("url", "facts", "outlook"),
    [
        ("redis://h/0", {}, ("timed", "delivers the message of this run again at about")),
        (
            "sentinel://h/0",
            {"message": SENT},
            ("timed", "delivers the message of this run again at about"),
        ),
        ("amqp://h//", {}, ("at_once", "as soon as it notices")),
        ("sqla+sqlite:///x", {}, ("never", "(sqla) deletes a message")),
        ("kafka://h", {}, ("unknown", "It is not known when")),
        ("redis://h/0", {"task_id": ""}, ("never", "its client sends the request again")),
        ("redis://h/0", {"message": EAGER}, ("never", "it has no message")),
    ],
)
def test_a_record_says_when_its_message_comes_again(
    admin_client, broker, url, facts: Mapping[str, str], outlook
):
    broker(url)
    when, text = outlook
    it = record("dead", **facts)
    assert redelivery_of(it).when == when
    assert text in admin_client.get(f"{RECORDS}{it.pk}/change/").content.decode()


def test_the_visibility_timeout_counts_from_the_start_of_the_run(admin_client, broker):
    broker("redis://h/0", visibility_timeout=600)
    soon = record("dead")
    at = soon.started_at + dt.timedelta(minutes=10)
    assert redelivery_of(soon) == ("timed", "redis", at)
    page = admin_client.get(f"{RECORDS}{soon.pk}/change/").content.decode()
    assert f"again at about {local_text(at)} (visibility timeout)" in page
    late = record("dead", started_at=timezone.now() - dt.timedelta(hours=1))
    page = admin_client.get(f"{RECORDS}{late.pk}/change/").content.decode()
    assert "was to deliver the message of this run again by" in page


def test_without_a_broker_in_the_settings_nothing_is_promised(broker):
    assert redelivery_of(record("dead"), broker(None)).when == "unknown"


def test_a_run_in_progress_promises_nothing(admin_client):
    page = admin_client.get(f"{RECORDS}{record('alive').pk}/change/").content.decode()
    assert "field-next_delivery" not in page


def test_a_silent_process_may_wake_up(admin_client, broker):
    broker("amqp://h//")
    page = admin_client.get(f"{RECORDS}{record('silent').pk}/change/").content.decode()
    assert "Its process may wake up." in page


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://h/0", "finds the outcome of the first"),
        ("sqla+sqlite:///x", "does not come again"),
    ],
)
def test_run_again_says_what_the_old_message_will_do(admin_client, broker, url, text):
    broker(url)
    it = record("dead", message=SENT)
    assert text in admin_client.get(f"{RECORDS}{it.pk}/rerun/").content.decode()
    alive = record("alive", message=SENT)
    assert text not in admin_client.get(f"{RECORDS}{alive.pk}/rerun/").content.decode()


def test_the_page_of_a_lock_says_that_the_run_of_its_record_is_interrupted(admin_client, broker):
    broker("redis://h/0")
    it = record("dead")
    page = admin_client.get(f"/admin/django_dlock/heldlock/default/{it.lock_name}/change/")
    assert "interrupted: its process is gone" in page.content.decode()
    assert "delivers the message of this run again at about" in page.content.decode()


def test_records_of_several_states_are_told_apart():
    found = {state: record(state) for state in ("dead", "silent", "alive", "unlocked")}
    done = record("dead", state="failed")
    states = states_of([*found.values(), done])
    assert states == {it.pk: state for state, it in found.items()}
