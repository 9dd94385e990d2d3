"""The admin and the commands with a real Redis, real holders and real outages."""

from __future__ import annotations

import io
import json

import pytest
import redis
from django.contrib.admin.utils import quote
from django.core.management import CommandError, call_command
from django.urls import reverse

from django_dlock import LeaseLost, Lock, locks
from django_dlock.models import LockEvent
from tests.support.aliases import LONG, alias, configured
from tests.support.holder import Holder

LIST = "/admin/django_dlock/heldlock/"

# Not in a transaction: a thread with its own connection records losses.
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def options():
    """Of the alias: an answer may come late."""
    return {"command_timeout": LONG / 4}


@pytest.fixture
def dlocks(own_redis, options):
    entries = {"default": alias(own_redis.url, TTL=LONG, OPTIONS=options)}
    with configured(entries):
        yield entries


@pytest.fixture
def holder(dlocks):
    with Holder(dlocks) as started:
        yield started


def list_locks(**options):
    out = io.StringIO()
    call_command("list_locks", format="json", stdout=out, **options)
    return json.loads(out.getvalue())


def clear(**options):
    out = io.StringIO()
    call_command("clear_stale_locks", format="json", stdout=out, **options)
    return [lock["name"] for lock in json.loads(out.getvalue())]


def release(client, name, **answers):
    url = reverse("admin:django_dlock_heldlock_release", args=[quote(f"default/{name}")])
    return client.post(url, answers, follow=True)


def hold(holder, name):
    """Make the other process hold ``name``; return its owner."""
    holder.do("from django_dlock import Lock")
    return holder.do(f"(lock := Lock({name!r})).acquire() and lock.owner")


@pytest.mark.usefixtures("lock_events")
def test_the_lock_of_a_killed_process_is_cleared_and_nothing_else(holder, dlocks):
    hold(holder, "dead")
    with Lock("alive"):
        holder.kill()
        assert {lock["name"]: lock["holder_state"] for lock in list_locks()} == {
            "dead": "dead",
            "alive": "alive",
        }
        assert clear(dry_run=True) == ["dead"]
        assert clear() == ["dead"]
        assert [lock["name"] for lock in list_locks()] == ["alive"]
    assert LockEvent.objects.filter(name__in=["dead", "alive"]).get().name == "dead"


def test_an_entry_without_a_ttl_is_shown_and_cleared(admin_client, own_redis, dlocks):
    client = redis.Redis.from_url(own_redis.url)
    with Lock("healthy"):
        # Not renewed, because a renewal would set a TTL again.
        damaged = Lock("damaged", renew=False, bound=False)
        damaged.acquire()
        for key in client.scan_iter("*damaged*"):
            client.persist(key)
        assert {lock["name"]: lock["ttl"] is None for lock in list_locks()} == {
            "healthy": False,
            "damaged": True,
        }
        assert "never ends" in admin_client.get(LIST).content.decode()
        assert clear() == ["damaged"]
        assert [lock["name"] for lock in list_locks()] == ["healthy"]
    client.close()


def test_a_living_holder_learns_of_the_release(admin_client, dlocks):
    lock = Lock("order:1")
    lock.acquire()
    refused = release(admin_client, "order:1", owner=lock.owner)
    assert "Its holder may still be running" in refused.content.decode()
    lock.renew()
    release(admin_client, "order:1", owner=lock.owner, force="on")
    with pytest.raises(LeaseLost) as caught:
        lock.renew()
    assert caught.value.reason == "broken"


def test_a_waiter_gets_the_lock_after_a_release(admin_client, holder, dlocks):
    holder.do("from django_dlock import Lock")
    lock = Lock("order:1")
    lock.acquire()
    holder.begin("Lock('order:1', wait=None).acquire()")
    while locks["default"].get("order:1").waiting == 0:
        assert not holder.answered
    assert list_locks()[0]["waiting"] == 1
    release(admin_client, "order:1", owner=lock.owner, force="on")
    assert holder.answer() is True


def test_a_lock_whose_owner_changed_since_the_page_was_loaded_is_not_released(admin_client, dlocks):
    first = Lock("order:1")
    first.acquire()
    seen = first.owner
    first.release()
    with Lock("order:1") as second:
        response = release(admin_client, "order:1", owner=seen, force="on")
        assert "now has another owner" in response.content.decode()
        second.check()
        assert locks["default"].get("order:1").owner == second.owner


@pytest.mark.parametrize(
    ("fault", "options"),
    # The usual timeout, because no answer comes.
    [pytest.param("kill", {}, id="kill"), pytest.param("pause", {}, id="pause")],
)
def test_the_pages_work_while_redis_does_not(admin_client, own_redis, dlocks, fault):
    getattr(own_redis, fault)()
    response = admin_client.get(LIST)
    assert response.status_code == 200
    assert "gave no answer" in response.content.decode()
    url = reverse("admin:django_dlock_heldlock_change", args=[quote("default/order:1")])
    assert admin_client.get(url, follow=True).status_code == 200
    assert release(admin_client, "order:1", owner="o", force="on").status_code == 200
    for command in ("list_locks", "clear_stale_locks"):
        with pytest.raises(CommandError) as caught:
            call_command(command, stdout=io.StringIO())
        assert caught.value.returncode == 1
    if fault == "pause":
        own_redis.resume()


def test_a_name_of_any_alphabet_is_found_by_search_and_pattern(admin_client, dlocks):
    with Lock("straße/鍵 ☂ [x]*"):
        assert [lock["name"] for lock in list_locks(name="straße/*☂ [x]*")] == ["straße/鍵 ☂ [x]*"]
        page = admin_client.get(LIST, {"q": "鍵 ☂ ["})
        assert [row.info.name for row in page.context["cl"].result_list] == ["straße/鍵 ☂ [x]*"]


def test_the_pages_of_the_list_show_each_lock_once(admin_client, dlocks):
    held = [Lock(f"lock:{number:03}", bound=False) for number in range(120)]
    for lock in held:
        lock.acquire()
    names = [
        row.info.name
        for page in (1, 2, 3)
        for row in admin_client.get(LIST, {"p": page}).context["cl"].result_list
    ]
    assert names == [lock.name for lock in held]
    for lock in held:
        lock.release()
