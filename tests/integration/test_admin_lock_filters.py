"""The filters of the list of held locks, what it tells of renewals, and the links of a lock."""

from __future__ import annotations

import dataclasses
import re
from html import unescape

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import DatabaseError
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dlock import locks, process
from django_dlock.backends.local import LocalBackend
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import IdempotencyRecord, LockEvent

LOCAL = "django_dlock.backends.local.LocalBackend"
LIST = "/admin/django_dlock/heldlock/"
HOST = process.current().host

pytestmark = pytest.mark.django_db


class LateBackend(LocalBackend):
    """Leases whose last renewal was 20 of 30 seconds ago; no thread renews them here."""

    def _info(self, name, entry, now):
        info = super()._info(name, entry, now)
        return dataclasses.replace(info, ttl=10.0, granted_ttl=30.0, renewals=int(name[-1]))


@pytest.fixture(autouse=True)
def aliases(settings):
    # Loads the project's views, which are made with the aliases of the project.
    reverse("admin:index")
    settings.DLOCKS = {"default": {"BACKEND": LOCAL}}
    locks.reset()
    yield
    locks.reset()


def hold(name, **facts):
    backend = locks["default"]
    request = LeaseRequest(name=name, owner=f"owner of {name}", ttl=30, **facts)
    lease = backend.acquire(request, deadline=backend.call_deadline())
    assert isinstance(lease, Lease)
    return lease


def names_on(response):
    cells = re.findall(r'class="field-lock_name">(.*?)</th>', response.content.decode(), re.DOTALL)
    return [unescape(re.sub(r"<.*?>", "", cell)) for cell in cells]


def page_of(name, alias="default", step="change"):
    return reverse(f"admin:django_dlock_heldlock_{step}", args=[quote(f"{alias}/{name}")])


def visitor(*permissions):
    user = User.objects.create_user(f"visitor-{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


# -- filters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"prefix": "order:"}, ["order:1", "order:2"]),
        ({"prefix": "rder"}, []),
        ({"task": "shop."}, ["order:1", "invoice:1"]),
        ({"task": "shop.charge"}, ["order:1"]),
        ({"task": "charge"}, []),
        ({"task": "shop.", "prefix": "inv"}, ["invoice:1"]),
        ({"task": "shop.", "q": "invoice"}, ["invoice:1"]),
        ({"host": HOST}, ["order:1", "order:2", "invoice:1"]),
        ({"host": HOST[:1], "kind": "parked"}, ["order:2"]),
        ({"host": HOST + "0"}, []),
        ({"older_than": "0"}, ["order:1", "order:2", "invoice:1"]),
        ({"older_than": "60"}, []),
        ({"prefix": "", "host": "", "task": ""}, ["order:1", "order:2", "invoice:1"]),
    ],
)
def test_the_list_is_filtered_by_the_beginning_of_name_host_and_task_and_by_age(
    admin_client, query, names
):
    hold("order:1", metadata='{"task_name": "shop.charge"}')
    hold("order:2", kind="parked")
    hold("invoice:1", metadata='{"task_name": "shop.invoice"}')
    response = admin_client.get(LIST, query)
    assert names_on(response) == names
    if not any(query.values()):
        assert "Clear all filters" not in response.content.decode()


@pytest.mark.parametrize("age", ["old", "-1", "nan", "inf"])
def test_an_impossible_age_redirects_to_the_list(admin_client, age):
    assert admin_client.get(LIST, {"older_than": age}).url == f"{LIST}?e=1"


def test_the_small_form_keeps_the_other_filters_and_shows_its_own(admin_client):
    query = {"kind": "held", "q": "a&b", "o": "-1", "p": "2", "host": '"w<', "prefix": "x"}
    page = admin_client.get(LIST, query).content.decode()
    form = page[page.index('id="dlock-narrow"') :]
    form = form[: form.index("</form>")]
    hidden = re.findall(r'type="hidden" name="(\w+)" value="(.*?)"', form)
    assert dict(hidden) == {"kind": "held", "q": "a&amp;b", "o": "-1"}
    fields = re.findall(r'<input type="text"[^>]* name="(\w+)" value="(.*?)" form="(.*?)"', page)
    assert fields == [
        ("prefix", "x", "dlock-narrow"),
        ("host", "&quot;w&lt;", "dlock-narrow"),
        ("task", "", "dlock-narrow"),
    ]


def test_a_page_that_is_filtered_reads_only_the_rows_it_shows(admin_client, monkeypatch):
    for number in range(120):
        hold(f"lock:{number:03}", metadata='{"task_name": "shop.charge"}')
    asked, original = [], LocalBackend.page

    def spy(self, query, *, offset=0, limit=None):
        asked.append((query.prefix, query.host, query.task, query.older_than, offset, limit))
        return original(self, query, offset=offset, limit=limit)

    monkeypatch.setattr(LocalBackend, "page", spy)
    admin_client.get(LIST, {"prefix": "l", "host": HOST, "task": "shop.", "p": "2"})
    counted = [("", "", "", 0.0, 0, 0), ("", "", "", 0.0, 0, 100)]
    assert asked == [*counted, ("l", HOST, "shop.", 0.0, 50, 50)]


# -- renewals -----------------------------------------------------------------------------


def test_a_renewal_that_is_late_is_named(admin_client, settings):
    settings.DLOCKS = {"default": {"BACKEND": f"{__name__}.LateBackend"}}
    locks.reset()
    hold("renewed:1")
    hold("never renewed:0")
    page = admin_client.get(LIST).content.decode()
    assert page.count("renewal late") == 1
    assert 'title="last renewed 20.0s ago"' in page
    page = admin_client.get(page_of("renewed:1")).content.decode()
    assert 'class="dlock-bar dlock-warn"' in page
    assert '<rect class="dlock-bar-left" width="33.3"' in page
    assert "20.0s ago" in page


# -- links --------------------------------------------------------------------------------


def record(**facts):
    now = timezone.now()
    values = {"scope": "shop.charge", "key": "42", "state": "running", "attempt": 1, **facts}
    values.setdefault("owner", "another")
    return IdempotencyRecord.objects.create(
        digest=IdempotencyRecord.digest_of(values["scope"], values["key"]),
        created_at=now,
        started_at=now,
        expires_at=now,
        **values,
    )


def links_on(response):
    """The links to a task, to records and to the list of events."""
    ours = "/admin/django_dlock"
    wanted = (
        rf'href="(https://flower[^"]*|{ours}/idempotencyrecord/\d[^"]*|{ours}/lockevent/\?[^"]*)"'
    )
    return [unescape(href) for href in re.findall(wanted, response.content.decode())]


def record_page(found):
    return f"/admin/django_dlock/idempotencyrecord/{found.pk}/change/"


def test_a_lock_is_linked_to_its_task_its_record_and_its_events(admin_client, settings):
    settings.DLOCK_ADMIN = {"TASK_URL": "https://flower.example.com/task/{task_id}"}
    hold("order:1", metadata='{"task_name": "shop.charge", "task_id": "t/1"}')
    mine = record(owner="owner of order:1")
    task, run, events = links_on(admin_client.get(page_of("order:1")))
    assert task == "https://flower.example.com/task/t%2F1"
    assert run == record_page(mine)
    assert admin_client.get(run).status_code == 200
    LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="order:1")
    LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="order:12")
    LockEvent.objects.create(when=timezone.now(), event="lost", alias="other", name="order:1")
    assert len(admin_client.get(events).context["cl"].result_list) == 1
    assert f'href="{task}" rel="noreferrer"' in admin_client.get(LIST).content.decode()


@pytest.mark.parametrize(
    "facts",
    [
        {"lock_alias": "default", "lock_name": "order:1"},
        {"task_id": "t-1"},
        {"owner": "owner of order:1"},
    ],
)
def test_the_record_is_found_by_its_lock_its_task_or_its_owner(admin_client, facts):
    hold("order:1", metadata='{"task_id": "t-1"}')
    record(key="other", lock_alias="default", lock_name="order:2", task_id="t-2")
    assert links_on(admin_client.get(page_of("order:1")))[:-1] == []
    found = record(**facts)
    assert links_on(admin_client.get(page_of("order:1")))[0] == record_page(found)


def test_the_record_of_the_present_run_comes_first(admin_client):
    hold("order:1")
    mine = record(key="1", owner="owner of order:1")
    record(key="2", lock_alias="default", lock_name="order:1")
    assert links_on(admin_client.get(page_of("order:1")))[0] == record_page(mine)


def test_a_database_without_records_does_not_hide_the_lock(admin_client, monkeypatch):
    def no_table(*_, **__):
        raise DatabaseError("no such table")

    hold("order:1")
    monkeypatch.setattr(type(IdempotencyRecord.objects.all()), "aggregate", no_table)
    response = admin_client.get(page_of("order:1"))
    assert response.status_code == 200
    assert len(links_on(response)) == 1


def test_links_lead_only_to_what_one_may_see(settings):
    hold("order:1")
    record(owner="owner of order:1")
    assert links_on(visitor("view_heldlock").get(page_of("order:1"))) == []
    (events,) = links_on(visitor("view_heldlock", "view_lockevent").get(page_of("order:1")))
    assert events.startswith("/admin/django_dlock/lockevent/?")
    (run,) = links_on(visitor("view_heldlock", "view_idempotencyrecord").get(page_of("order:1")))
    assert "idempotencyrecord" in run


@pytest.mark.parametrize("name", ["order:1", "a/b", '"><script>', "שלום:1"])
def test_an_event_and_a_record_lead_back_to_the_lock(admin_client, name):
    hold(name)
    event = LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name=name)
    pages = (
        f"/admin/django_dlock/lockevent/{event.pk}/change/",
        record_page(record(lock_alias="default", lock_name=name)),
    )
    for address in pages:
        page = admin_client.get(address).content.decode()
        back = unescape(re.search(r'href="(/admin/django_dlock/heldlock/.+?/change/)"', page)[1])
        assert admin_client.get(back).context["original"].info.name == name
        viewer = visitor("view_lockevent", "view_idempotencyrecord")
        assert b"heldlock" not in viewer.get(address).content


def test_a_record_without_a_lock_has_no_link_to_one(admin_client):
    page = admin_client.get(record_page(record())).content.decode()
    assert "heldlock/default" not in page
    assert "/heldlock/_2F" not in page


def test_a_wrong_address_of_tasks_makes_no_links_and_breaks_no_page(admin_client, settings):
    settings.DLOCK_ADMIN = {"TASK_URL": "javascript:alert('{task_id}')"}
    hold("order:1", metadata='{"task_id": "t-1"}')
    for address in (LIST, page_of("order:1")):
        page = admin_client.get(address).content.decode()
        assert "t-<wbr>1" in page or "t-1" in page
        assert "javascript:alert" not in page


# -- names --------------------------------------------------------------------------------

AWKWARD = (
    "<b onclick=x>&amp;</b>",
    "🔒🧑‍🚀:⏳",
    "עברית:שלום-12",
    "a\u202eb:\u2067c",
    "x" * 255,
    "wörd " * 51,
    "{{ name }}{% load %}%s",
)


@pytest.mark.parametrize("name", AWKWARD)
def test_a_name_is_shown_as_text_and_changes_nothing_beside_it(admin_client, name):
    hold(name, metadata='{"task_name": "<i>משימה", "path": "/<u>/"}')
    listed = admin_client.get(LIST)
    # Only marks of the writing direction are escaped.
    text = name.replace("\u202e", r"\u202e").replace("\u2067", r"\u2067")
    assert names_on(listed) == [text]
    pages = [listed] + [
        admin_client.get(page_of(name, step=step)) for step in ("change", "release")
    ]
    for response in pages:
        page = response.content.decode()
        assert response.status_code == 200
        assert "<b onclick" not in page
        assert "<i>משימה" not in page
        # Isolated by <bdi>, so that its direction does not reorder the text beside it.
        shown = [
            unescape(re.sub("<.*?>", "", each)) for each in re.findall("<bdi>(.*?)</bdi>", page)
        ]
        assert text in shown
        assert "<i>משימה" in shown


def test_a_lock_of_an_awkward_name_is_found_by_its_beginning(admin_client):
    for name in AWKWARD:
        hold(name)
    for name in AWKWARD:
        found = names_on(admin_client.get(LIST, {"prefix": name[:9]}))
        assert found == [name.replace("\u202e", r"\u202e").replace("\u2067", r"\u2067")]
