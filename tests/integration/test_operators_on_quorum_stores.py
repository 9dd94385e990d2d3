"""The admin, the commands and the metrics with a real ZooKeeper and a real etcd."""

from __future__ import annotations

import io
import json
import re
import secrets
from html import unescape

import pytest
from django.contrib.admin.utils import quote
from django.core.management import call_command
from django.urls import reverse

from django_dlock import Lock, locks
from django_dlock.metrics.stores import StoreFacts
from tests.support.aliases import configured
from tests.support.holder import Holder

LIST = "/admin/django_dlock/heldlock/"
SECONDS = 60.0
"""Of a TTL; nothing here waits for its end."""

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["zookeeper", "etcd"])
def store(request):
    return request.param


@pytest.fixture
def dlocks(request, store):
    server = request.getfixturevalue(f"{store}_server")
    kind = {"zookeeper": "ZooKeeper", "etcd": "Etcd"}[store]
    entry = {
        "BACKEND": f"django_dlock.backends.{store}.{kind}Backend",
        "LOCATION": server.location if store == "zookeeper" else server.url,
        "KEY_PREFIX": f"test-{secrets.token_hex(4)}",
        "TTL": SECONDS,
        "OPTIONS": {"command_timeout": 5.0},
    }
    with configured({"default": entry}) as entries:
        yield entries or {"default": entry}


@pytest.fixture
def holder(dlocks):
    with Holder(dlocks) as started:
        started.do("from django_dlock import Lock")
        yield started


def listed(command="list_locks", **options):
    out = io.StringIO()
    call_command(command, format="json", stdout=out, stderr=io.StringIO(), **options)
    return json.loads(out.getvalue())


def printed(command="list_locks", **options):
    out, err = io.StringIO(), io.StringIO()
    call_command(command, stdout=out, stderr=err, **options)
    return out.getvalue(), err.getvalue()


def text_of(response):
    assert response.status_code == 200
    text = re.sub(r"<(script|style).*?</\1>", "", response.content.decode(), flags=re.DOTALL)
    return unescape(re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", text)))


def hold(holder, name, **options):
    return holder.do(f"(lock := Lock({name!r}, **{options!r})).acquire() and lock.owner")


def queue_up(holder, name):
    """Make the other process wait for a name, while it holds what it holds."""
    holder.begin(f"Lock({name!r}, wait=30).acquire()")


def test_list_locks_shows_the_holder_and_names_what_is_not_known(holder, store):
    owner = hold(holder, "invoice:1", metadata={"note": "ü"})
    (lock,) = listed()
    assert (lock["name"], lock["alias"], lock["owner"]) == ("invoice:1", "default", owner)
    assert lock["holder"]["pid"] == holder.pid
    assert lock["holder_state"] == "alive"
    assert 0 <= lock["age"] < SECONDS
    unknown = {"zookeeper": ["renewals", "ttl"], "etcd": ["waiting"]}[store]
    assert lock["unknown"] == unknown
    assert [lock[fact] for fact in unknown] == [None] * len(unknown)
    table, _ = printed()
    assert ("at most " if store == "zookeeper" else "  unknown  ") in table


def test_the_lock_of_a_killed_process_is_cleared_and_nothing_else(holder, dlocks):
    hold(holder, "dead")
    with Lock("alive"):
        holder.kill()
        states = {lock["name"]: lock["holder_state"] for lock in listed()}
        assert states == {"dead": "dead", "alive": "alive"}
        # A process that is known is nobody's, even if its state should not be known.
        assert [lock["name"] for lock in listed("clear_stale_locks")] == ["dead"]
        assert [lock["name"] for lock in listed()] == ["alive"]
        assert locks["default"].locked("alive", deadline=locks["default"].call_deadline())


def test_a_lock_that_changed_hands_is_not_broken(holder):
    with Lock("a") as lock:
        seen = lock.owner
    hold(holder, "a")
    assert not locks["default"].break_("a", owner=seen)
    assert [lock["holder"]["pid"] for lock in listed()] == [holder.pid]


def test_the_admin_searches_sorts_and_pages(admin_client, dlocks):
    backend = locks["default"]
    held = [Lock(f"order:{number}", ttl=SECONDS, renew=False) for number in range(3)]
    for lock in held:
        lock.acquire()

    def shown(**query):
        response = admin_client.get(LIST, query)
        return [row.info.name for row in response.context_data["cl"].result_list]

    assert shown() == [lock.name for lock in held]
    # The first column is the name, the third the age.
    assert shown(o="-1") == [lock.name for lock in reversed(held)]
    assert shown(o="3") == [lock.name for lock in reversed(held)]
    assert shown(q="der:1") == ["order:1"]
    assert shown(holder_state="dead") == []
    assert backend.count(prefix="order:") == 3
    for lock in held:
        lock.release()


def test_pages_say_what_the_store_does_not_know(admin_client, holder, store):
    hold(holder, "a")
    page = text_of(admin_client.get(LIST))
    assert str(holder.pid) in page
    # Of ZooKeeper, what is not known is on the page of the lock only.
    assert ("not known" in page) == (store == "etcd")
    url = reverse("admin:django_dlock_heldlock_change", args=[quote("default/a")])
    detail = text_of(admin_client.get(url))
    url = reverse("admin:django_dlock_heldlock_release", args=[quote("default/a")])
    confirm = text_of(admin_client.get(url))
    assert ("Waiting not known" in confirm) == (store == "etcd")
    assert ("Renewals not known" in detail) == (store == "zookeeper")
    assert ("TTL left at most" in detail) == (store == "zookeeper")
    assert ("cannot tell who waits" in detail) == (store == "etcd")
    assert "Until that changes, this store does not know" in detail
    admin_client.post(
        reverse("admin:django_dlock_heldlock_release", args=[quote("default/a")]),
        {"_selected_action": "default/a", "owner": listed()[0]["owner"], "force": "on"},
    )
    assert listed() == []


def test_who_blocks_whom_shows_waits_or_says_that_they_are_not_known(admin_client, holder, store):
    hold(holder, "theirs")
    with Lock("ours"):
        queue_up(holder, "ours")
        if store == "zookeeper":
            while not locks["default"].waiters("ours"):
                assert not holder.answered
            (wait,) = locks["default"].waiters("ours")
            assert wait.process is not None
            assert wait.process.pid == holder.pid
            assert [lock["waiting"] for lock in listed(name="ours")] == [1]
        page = text_of(admin_client.get(f"{LIST}blocking/"))
        _, errors = printed(waiters=True)
        untold = "does not know who waits for its locks"
        assert (untold in page) == (untold in errors) == (store == "etcd")
        assert ("theirs" in page) == (store == "zookeeper")
        assert "Nobody waits for a lock now" not in page
    holder.answer()


def test_metrics_count_what_is_known(holder, store):
    hold(holder, "a")
    found = {}
    for sample in StoreFacts(records=False).samples():
        name, state = sample.instrument.name, sample.labels.get("state")
        found[f"{name}.{state}" if state else name] = sample.value
    assert found["django_dlock.store.leases"] == 1
    assert found["django_dlock.store.holders.alive"] == 1
    assert found.get("django_dlock.store.waiting") == (0 if store == "zookeeper" else None)
