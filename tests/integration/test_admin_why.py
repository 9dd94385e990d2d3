"""The page of a lock, which says why nothing moves, and "Who blocks whom"."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import threading
from html import unescape

import pytest
from django.contrib.admin.utils import quote
from django.db import DatabaseError
from django.urls import reverse
from django.utils import timezone

from django_dlock import LeaseLost, Lock, clock, locks, process
from django_dlock.admin import blocking_page, lock_past
from django_dlock.admin.base import BoundedPaginator
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import HOLDING, LeaseRequest, Renewal
from django_dlock.models import IdempotencyRecord, LockEvent
from tests.integration.test_admin_held_locks import (
    LIST,
    LOCAL,
    aliases,
    say_goodbye,
    use,
    visitor,
)
from tests.integration.test_admin_held_locks import (
    hold as hold_for,
)

__all__ = ["aliases"]

pytestmark = pytest.mark.django_db

BLOCKING = LIST + "blocking/"


class Down(LocalBackend):
    """An alias that does not answer."""

    asked = 0

    def get(self, name):
        Down.asked += 1
        raise BackendUnavailable("nobody answers", name, self.alias)

    def page(self, query, **_):
        Down.asked += 1
        raise BackendUnavailable("nobody answers", "", self.alias)


class AwayBetween(LocalBackend):
    """Answers the first question only."""

    def waiters(self, name, *, limit=100):
        raise BackendUnavailable("gone meanwhile", name, self.alias)


class Mute(LocalBackend):
    """Neither lists its locks nor knows its waiters."""

    capabilities = frozenset({"wakeup"})

    def page(self, query, **_):
        raise NotImplementedError

    def waiters(self, name, *, limit=100):
        raise NotImplementedError(f"Alias {self.alias!r} cannot tell who waits for a lock")


def hold(name, alias="default", **facts):
    return hold_for(name, alias, owner=f"owner-{name}", **facts)


def queue_up(name, owner="w", alias="default", holding=(), **metadata):
    store = locks[alias]
    if holding:
        metadata[HOLDING] = " ".join(one[:16] for one in holding)
    request = LeaseRequest(name, owner, 30.0, metadata=json.dumps(metadata), waits=True)
    store.acquire(request, deadline=store.call_deadline())


def why_page(name, alias="default", step="change"):
    return reverse(f"admin:django_dlock_heldlock_{step}", args=[quote(f"{alias}/{name}")])


def text_of(response):
    assert response.status_code == 200
    page = re.sub(r"<wbr>|</?bdi>", "", response.content.decode())
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def see(client, name, alias="default"):
    return text_of(client.get(why_page(name, alias)))


def headings_of(response):
    found = re.findall(r"<h2[^>]*>(.*?)</h2>", response.content.decode())
    return found[found.index("Why does nothing move?") :]


# -- one name -----------------------------------------------------------------------------


def test_the_page_tells_who_holds_and_who_waits(admin_client):
    hold("a", metadata='{"task_name": "shop.charge", "task_id": "t-1"}')
    queue_up("a", "one", task_name="shop.refund", task_id="t-2")
    queue_up("a", "two", path="/pay/", user="ann")
    page = see(admin_client, "a")
    assert "The holder is alive: it is still working, or it hangs." in page
    assert re.search(r"Its process renewed a lock or reported \S+s ago\.", page)
    assert page.index("shop.charge") < page.index("shop.refund") < page.index("/pay/ user ann")
    assert "app.control.revoke('t-1', terminate=True)" in page
    assert "two may be running at once" in page


def test_pages_show_no_marks_of_the_writing_direction(admin_client):
    """Such a mark would show another name than that of the lock."""
    metadata = json.dumps({"path": "/\u202e/\x1b[2J\ud800"})
    hold_for("a\u202ecod", "default", owner="other", metadata=metadata)
    queue_up("a\u202ecod", "one", path="/\u202e")
    confirm = {"action": "release_selected", "_selected_action": "default/a\u202ecod"}
    shown = [
        *(admin_client.get(page) for page in (LIST, BLOCKING, why_page("a\u202ecod"))),
        admin_client.post(LIST, confirm),
        admin_client.post(LIST, {**confirm, "owner": "another", "force": "on"}, follow=True),
    ]
    for response in shown:
        page = text_of(response)
        assert "a\\u202ecod" in page
        assert not {"\u202e", "\x1b"} & set(page)


def test_a_row_of_the_list_has_one_link_to_it(admin_client):
    hold("a")
    listed = admin_client.get(LIST).content.decode()
    assert len(re.findall(r'href="[^"]*/default_2Fa/(?!release)', listed)) == 1
    assert f'href="{why_page("a")}"' in listed
    assert "Why?" not in listed
    assert f'href="{BLOCKING}"' in listed
    assert f'href="{BLOCKING}"' in admin_client.get(why_page("a")).content.decode()


@pytest.mark.parametrize("name", ["a", "free", "a/b_2F ☂"])
def test_the_former_address_leads_to_it(admin_client, name):
    hold("a")
    response = admin_client.get(why_page(name, step="why") + "?_changelist_filters=q%3Da")
    assert response.status_code == 302
    assert response["Location"] == why_page(name) + "?_changelist_filters=q%3Da"
    assert admin_client.get(response["Location"]).status_code == 200


def test_it_shows_all_that_is_known_of_the_lease(admin_client):
    facts = {"task_name": "shop.charge", "note": "<b>"}
    lease = hold("a", metadata=json.dumps(facts))
    response = admin_client.get(why_page("a"))
    page, text = response.content.decode(), text_of(response)
    assert "<h1><bdi>a</bdi></h1>" in page
    for fact in ("Alias default", "Held by", "Held since", "TTL left"):
        assert fact in text
    # What is rarely asked for is folded up, without a script.
    rare = re.search(r'<details class="dlock-more">.*?</details>', page, re.DOTALL)[0]
    note = "&quot;note&quot;: &quot;&lt;b&gt;&quot;"
    for fact in (str(lease.token), lease.owner, "Kind", "Renewals", note):
        assert fact in rare
    assert "Last renewal" not in text, "it was never renewed"
    deadline = locks["default"].call_deadline()
    renewal = Renewal("a", lease.owner, 30.0)
    locks["default"].renew([renewal], process=process.current().id, deadline=deadline)
    assert re.search(r"Last renewal \S+ ago .* Renewals 1 ", see(admin_client, "a"))


def test_only_what_there_is_has_a_heading(admin_client):
    """Which nobody has to read to learn that there is nothing."""
    question, holder, steps = "Why does nothing move?", "Holder", "What you can do"
    assert headings_of(admin_client.get(why_page("free"))) == [question]
    hold("a")
    alone = admin_client.get(why_page("a"))
    assert headings_of(alone) == [question, holder, steps]
    assert "No thread or coroutine waits for it." in text_of(alone)
    queue_up("a")
    LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="a")
    past = "What happened to it in the last 24 hours"
    full = admin_client.get(why_page("a"))
    assert headings_of(full) == [question, holder, "Waiters", steps, past]
    # Nor has a column that would be empty.
    assert "Holds" not in text_of(full)
    assert "Duration" not in text_of(full)
    viewer = visitor("view_heldlock").get(why_page("a"))
    assert headings_of(viewer) == [question, holder, "Waiters", steps]


def test_nothing_can_be_posted_to_it(admin_client):
    hold("a")
    for data in ({}, {"owner": "owner-a", "force": "on"}):
        assert admin_client.post(why_page("a"), data).status_code == 403
    assert locks["default"].get("a") is not None


def test_a_name_that_nobody_holds_has_a_page_too(admin_client):
    assert "Nobody holds this lock now, and nobody is known to wait" in see(admin_client, "free")
    # By search, and by the link of an event.
    found = admin_client.get(LIST, {"q": "free"}).content.decode()
    assert f'href="{why_page("free")}"' in found
    hold("free:other")
    assert why_page("free") not in admin_client.get(LIST, {"q": "free"}).content.decode()
    LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="free")
    events = reverse("admin:django_dlock_lockevent_changelist")
    assert f'href="{why_page("free")}"' in admin_client.get(events).content.decode()
    outsider = visitor("view_lockevent").get(events).content.decode()
    assert "heldlock" not in outsider
    assert ">free<" in outsider


def test_the_page_follows_the_holder_to_what_it_waits_for(admin_client, settings):
    use(settings, default=LOCAL, other=LOCAL)
    hold("a", metadata='{"task_name": "shop.first"}')
    hold("b", "other", metadata='{"task_name": "shop.second"}')
    hold("c", metadata='{"task_name": "shop.third"}')
    queue_up("b", "w1", "other", ["owner-a"])
    queue_up("c", "w2", "default", ["owner-b"])
    page = see(admin_client, "a")
    assert "The holder waits for another lock itself, “c”. Look there. c default" in page
    assert re.search(r"has waited \S+ for b other held by alive .*shop\.second", page)
    assert re.search(r"has waited \S+ for c default held by alive .*shop\.third", page)
    assert re.search(r"Waiters .* a default What you can do", see(admin_client, "b", "other"))


def test_a_deadlock_is_named(admin_client):
    hold("a")
    hold("b")
    queue_up("a", "w1", holding=["owner-b"])
    queue_up("b", "w2", holding=["owner-a"])
    for name in ("a", "b"):
        response = admin_client.get(why_page(name))
        page = text_of(response)
        assert "Deadlock: the holder waits for a lock" in page
        assert re.search(r"That holder has waited \S+ for this lock\.", page)
        assert "Deadlock" in headings_of(response)
        assert '<span class="dlock-badge dlock-bad">deadlock</span>' in response.content.decode()
    page = text_of(admin_client.get(BLOCKING))
    assert "These holders wait for each other" in page
    # A lock whose holder waits for one of them is not in the deadlock itself.
    hold("c")
    queue_up("a", "w3", holding=["owner-c"])
    page = see(admin_client, "c")
    assert "The holder waits for “a”, which is in a deadlock. Look there." in page
    assert "deadlock</span>" not in admin_client.get(why_page("c")).content.decode()


def test_real_threads_in_a_deadlock_are_found(admin_client):
    def work(mine, other):
        with contextlib.suppress(LeaseLost), mine:
            both_hold.wait(20)
            with Lock(other.name, wait=None):
                pass

    first, second, both_hold = Lock("a"), Lock("b"), threading.Barrier(2)
    pairs = (first, second), (second, first)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    give_up_at = clock.now() + 20
    while not (locks["default"].waiters("a") and locks["default"].waiters("b")):
        assert clock.now() < give_up_at
    page = text_of(admin_client.get(BLOCKING))
    assert locks["default"].break_("a", owner=first.owner)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert "Deadlock" in page


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("parked", "kept for a task that waits for its retry"),
        ("reserved", "reserved for a task that waits in its queue"),
        ("cooling", "its min_hold keeps it taken"),
    ],
)
def test_a_lease_that_is_held_by_no_process_is_explained(admin_client, kind, told):
    if kind == "cooling":
        lease = hold("a")
        deadline = locks["default"].call_deadline()
        locks["default"].release("a", lease.owner, min_hold=20.0, deadline=deadline)
    else:
        hold("a", kind=kind)
    page = see(admin_client, "a")
    assert told in page
    assert "Stop the" not in page
    assert "State" not in page, "it has no process whose state could be known"
    assert "holder may be running" not in page


def test_a_dead_holder_and_a_dead_waiter_are_told(admin_client):
    hold("a")
    queue_up("a")
    say_goodbye()
    page = see(admin_client, "a")
    assert "The holder is dead." in page
    assert "Proven: the store knows that its process ended." in page
    assert "will not get the lock" in page
    assert "clear_stale_locks --using default --name a" in page
    assert "Stop the" not in page
    assert "Nothing" not in page
    assert "Release the lock…" in page


def test_events_of_the_last_day_are_shown_the_newest_first(admin_client):
    now = timezone.now()
    for minutes, event, name in [
        (10, "lost", "a"),
        (5, "broken", "a"),
        (24 * 60 + 1, "max_hold", "a"),
        (1, "taken_over", "b"),
    ]:
        LockEvent.objects.create(
            when=now - dt.timedelta(minutes=minutes),
            event=event,
            alias="default",
            name=name,
            reason="expired",
            user="ann" if event == "broken" else "",
        )
    page = see(admin_client, "a")
    assert page.index("broken") < page.index("lost expired")
    assert "max_hold reached" not in page
    assert "taken over" not in page
    assert "ann" in page


def test_the_events_are_limited(admin_client):
    for _ in range(lock_past.EVENTS + 3):
        LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="a")
    response = admin_client.get(why_page("a"))
    assert len(response.context["past"].events) == lock_past.EVENTS
    assert "There are older ones" in text_of(response)
    assert 'lockevent/?alias=default&amp;name=a"' in response.content.decode()


def record(scope, key, lock_name, **facts):
    now = timezone.now()
    return IdempotencyRecord.objects.create(
        digest=IdempotencyRecord.digest_of(scope, key),
        scope=scope,
        key=key,
        state="running",
        attempt=1,
        owner="x",
        lock_alias="default",
        lock_name=lock_name,
        created_at=now,
        started_at=now,
        expires_at=now,
        **facts,
    )


def test_the_record_of_the_lock_is_linked(admin_client, monkeypatch):
    hold("a", metadata='{"task_name": "shop.charge"}')
    by_key, by_lock = record("shop.charge", "a", "a"), record("shop.refund", "17", "a")
    other = record("shop.refund", "18", "b")
    links = ('href="/admin/django_dlock/idempotencyrecord/%d/change/"',)
    page = admin_client.get(why_page("a")).content.decode()
    assert all(links[0] % it.pk in page for it in (by_key, by_lock))
    assert links[0] % other.pk not in page
    # The latest records are searched; that of the task itself is found by its key.
    monkeypatch.setattr(BoundedPaginator, "MAX_ROWS", 1)
    page = admin_client.get(why_page("a")).content.decode()
    assert links[0] % by_key.pk in page
    assert links[0] % by_lock.pk not in page


# -- outages ------------------------------------------------------------------------------


def test_what_is_known_is_shown_of_an_alias_that_does_not_answer(admin_client, settings):
    use(settings, default=f"{__name__}.Down", other=LOCAL)
    LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="a")
    Down.asked = 0
    page = see(admin_client, "a")
    assert Down.asked == 1, "each further question would take a whole command timeout"
    assert "Alias “default” did not answer" in page
    assert "nobody knows now who holds the lock" in page
    assert "diagnose_locks --using default" in page
    assert "lost" in page
    page = see(admin_client, "a", "other")
    assert "Alias “default” was not read" in page
    page = text_of(admin_client.get(BLOCKING))
    assert "Alias “default” did not answer" in page
    assert "The aliases that did not answer are missing." in page


def test_an_alias_that_goes_away_meanwhile_is_told(admin_client, settings):
    use(settings, default=f"{__name__}.AwayBetween")
    hold("a", metadata='{"task_name": "shop.charge"}')
    queue_up("a")
    page = see(admin_client, "a")
    assert "gone meanwhile" in page
    assert "shop.charge" in page
    assert "gone meanwhile" in text_of(admin_client.get(BLOCKING))


def test_a_backend_that_knows_no_waiters_says_so(admin_client, settings):
    use(settings, default=f"{__name__}.Mute")
    hold("a", metadata='{"task_name": "shop.charge"}')
    page = see(admin_client, "a")
    assert "shop.charge" in page
    assert "Alias 'default' cannot tell who waits for a lock." in page
    assert "cannot list its locks" in text_of(admin_client.get(BLOCKING))


def test_tables_that_cannot_be_read_hide_nothing_else(admin_client, monkeypatch):
    def fails(*args, **kwargs):
        raise DatabaseError("no such table")

    hold("a", metadata='{"task_name": "shop.charge"}')
    monkeypatch.setattr(lock_past.Past, "_read_events", fails)
    monkeypatch.setattr(lock_past.Past, "_read_records", fails)
    page = see(admin_client, "a")
    assert "The lock events cannot be read. Database 'default' lacks a table" in page
    assert "The idempotency records cannot be read." in page
    assert "shop.charge" in page


@pytest.mark.parametrize("object_id", ["default_2F", "nowhere_2Fa", "a", "default_2F" + "n" * 256])
def test_what_names_no_lock_leads_to_the_list(admin_client, object_id):
    response = admin_client.get(f"{LIST}{object_id}/change/", follow=True)
    assert response.redirect_chain == [(LIST, 302)]
    assert len(list(response.context["messages"])) == 1


def test_settings_without_aliases_are_told(admin_client, settings):
    settings.DLOCKS = []
    locks.reset()
    assert "The settings define no lock backend." in text_of(admin_client.get(BLOCKING))
    assert admin_client.get(why_page("a"), follow=True).status_code == 200


# -- names and permissions ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a/../b/", "שלום:42", "👾" * 255, "a_2Fb%2F'\"", "why"]
)
def test_every_name_has_its_page(admin_client, name):
    lease = hold(name)
    queue_up(name, "w", holding=[lease.owner], task_name="<i>")
    for page in (why_page(name), BLOCKING):
        content = admin_client.get(page).content.decode()
        assert "<script>alert" not in content
        assert "<i>" not in content
        assert name in text_of(admin_client.get(page))
    assert f'href="{why_page(name)}"' in unescape(admin_client.get(BLOCKING).content.decode())


def test_both_pages_need_the_permission_to_see_locks(client, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("asked a backend")

    monkeypatch.setattr(LocalBackend, "get", never)
    monkeypatch.setattr(LocalBackend, "page", never)
    outsider = visitor("release_heldlock", "view_lockevent")
    for page in (why_page("a"), why_page("a", step="why"), BLOCKING):
        assert outsider.get(page).status_code == 403
        assert client.get(page).status_code == 302


def test_steps_events_records_and_users_need_their_permissions():
    hold("a", metadata='{"task_name": "shop.charge", "user": "ann"}')
    queue_up("a", user="bob", path="/pay/")
    LockEvent.objects.create(
        when=timezone.now(), event="broken", alias="default", name="a", user="mallory"
    )
    found = record("shop.charge", "a", "a")
    viewer = visitor("view_heldlock")
    content = viewer.get(why_page("a")).content.decode() + viewer.get(BLOCKING).content.decode()
    for secret in ("ann", "bob", "mallory", "/release/", f"/{found.pk}/change/", "broken"):
        assert secret not in content, secret
    operator = visitor("view_heldlock", "release_heldlock", "view_lockevent", "view_user")
    content = operator.get(why_page("a")).content.decode()
    for fact in ("ann", "bob", "mallory", "default_2Fa/release/", "broken"):
        assert fact in content, fact


# -- all names ----------------------------------------------------------------------------


def test_the_page_says_so_when_nobody_waits(admin_client):
    hold("a")
    page = text_of(admin_client.get(BLOCKING))
    assert "Nobody waits for a lock now." in page
    assert "0 locks" not in page
    assert "Read at" in page


def test_chains_over_aliases_are_indented(admin_client, settings):
    use(settings, default=LOCAL, other=LOCAL)
    hold("a")
    hold("b", "other")
    queue_up("a", "w1", holding=["owner-b"])
    queue_up("b", "w2", "other")
    response = admin_client.get(BLOCKING)
    assert [row["depth"] for row in response.context["rows"]] == [0, 1, 2, 3]
    assert not response.context["deadlocks"]
    assert f'href="{why_page("b", "other")}"' in response.content.decode()


def test_what_is_read_is_limited(admin_client, monkeypatch):
    monkeypatch.setattr(blocking_page, "NAMES", 2)
    monkeypatch.setattr(blocking_page, "WAITERS_OF_EACH", 1)
    for name in ("a", "b", "c"):
        hold(name)
        queue_up(name, "w1")
        queue_up(name, "w2")
    page = text_of(admin_client.get(BLOCKING))
    assert "1 more waiter" in page
    assert "The waiters of 2 locks were read. These are not all" in page


def test_waiters_that_were_not_read_matter_only_where_the_holder_may_be_one(
    admin_client,
):
    note = "Not all waiters were read, so the holder may wait for a lock"
    hold("crowded")
    for number in range(21):
        queue_up("crowded", f"v{number}")
    hold("a")
    assert note in see(admin_client, "a")
    assert note not in see(admin_client, "nobody:holds:it")
    hold("b")
    queue_up("b", "w3", holding=["owner-a"])
    queue_up("a", "w4", holding=["owner-b"])
    page = see(admin_client, "a")
    assert "Deadlock:" in page
    assert note not in page
