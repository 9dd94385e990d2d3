"""What the page of lock statistics counts leads to the lists of it, and says what is normal."""

from __future__ import annotations

import datetime as dt
import html
import re
from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings

from django_dlock import Lock, signals
from django_dlock.core import dispatch
from django_dlock.metrics import instruments, recorder
from django_dlock.models import LockEvent
from tests.support.counted import (  # noqa: F401 - a fixture
    NOW,
    PAGE,
    now,
    point,
    series,
    text_of,
    write,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("now")]

EVENTS = "/admin/django_dlock/lockevent/"
HELD = "/admin/django_dlock/heldlock/"


def links(client, **query):
    """Text → address of the links in the statistics themselves."""
    body = client.get(PAGE, query).content.decode().partition('<dl class="dlock-totals">')[2]
    found = re.findall(r'<a href="([^"]+)">([^<]*)</a>', body)
    return {text: html.unescape(url) for url, text in found}


def write_all(alias="default"):
    of = {"alias": alias}
    write(
        {
            series(instruments.WAITS, **of): point(0, 0.0, 0.01, 31.0, 4000.0),
            series(instruments.CONTENTIONS, **of): point(120),
            series(instruments.ATTEMPTS, "contended", **of): point(120),
            series(instruments.HELD, **of): point(0, 90.0),
            series(instruments.LOSSES, "max_hold", **of): point(3),
            series(instruments.LOSSES, "expired", **of): point(4),
            series(instruments.REQUEUES, "contended", alias="", group="t"): point(118),
        }
    )


def make_event(event, reason="", before=120, alias="default"):
    when = dt.datetime.fromtimestamp(NOW - before, dt.timezone.utc)
    return LockEvent.objects.create(when=when, event=event, reason=reason, alias=alias, name="x")


def listed(client, url):
    found = client.get(url)
    assert found.status_code == 200, url
    return set(found.context["cl"].queryset.values_list("pk", flat=True))


def test_losses_lead_to_their_events_of_the_same_time(admin_client):
    write_all()
    late, expired = make_event("max_hold", "max_hold"), make_event("lost", "expired")
    make_event("lost", "expired", before=4000)
    make_event("broken", "operator"), make_event("taken_over", "holder_dead")
    found = links(admin_client)
    assert listed(admin_client, found["Lock events"]) == {late.pk, expired.pk}
    assert listed(admin_client, found["3"]) == {late.pk}
    assert listed(admin_client, found["4"]) == {expired.pk}


def test_the_list_shows_which_events_were_chosen(admin_client):
    write_all()
    page = admin_client.get(links(admin_client)["Lock events"])
    chosen = [
        choice["display"]
        for choice in page.context["cl"].filter_specs[0].choices(page.context["cl"])
        if choice["selected"]
    ]
    assert chosen == ["lost", "max_hold reached"]


def test_long_waits_lead_to_their_events(admin_client):
    write_all()
    waited = make_event("long_wait")
    make_event("long_wait", before=4000)
    url = links(admin_client)["2 waited longer than 30 s"]
    assert listed(admin_client, url) == {waited.pk}
    day = links(admin_client, range="day")["2 waited longer than 30 s"]
    assert len(listed(admin_client, day)) == 2


def test_a_chosen_alias_is_kept(admin_client):
    write_all("b")
    ours, _other = make_event("lost", "expired", alias="b"), make_event("lost", "expired")
    found = links(admin_client, alias="b")
    assert listed(admin_client, found["Lock events"]) == {ours.pk}
    assert parse_qs(urlsplit(found["Held now"]).query) == {"kind": ["held"], "alias": ["b"]}


def test_what_is_held_and_waits_leads_to_what_is_now(admin_client):
    write_all()
    found = links(admin_client)
    assert found["Held now"] == HELD + "?kind=held"
    for name in ("Held now", "Who waits now"):
        assert admin_client.get(found[name]).status_code == 200


def test_times_are_those_of_the_column(admin_client, settings):
    """Without time zones, the table has local times."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kathmandu"
    write_all()
    query = parse_qs(urlsplit(links(admin_client)["Lock events"]).query)
    # NOW is 14:30:30 UTC.
    assert query["when__lt"] == ["2026-09-21 20:16:00"]
    assert query["when__gte"] == ["2026-09-21 19:15:00"]
    assert admin_client.get(links(admin_client)["Lock events"]).status_code == 200


def test_what_nothing_lists_is_no_link(admin_client):
    write_all()
    assert set(links(admin_client)) == {
        *("Lock events", "3", "4", "2 waited longer than 30 s", "Held now", "Who waits now")
    }


@pytest.mark.parametrize(
    ("permission", "paths"), [("", set()), ("view_lockevent", {EVENTS}), ("view_heldlock", {HELD})]
)
def test_only_those_who_may_see_a_list_get_its_links(permission, paths):
    write_all()
    user = User.objects.create_user("visitor", is_staff=True)
    wanted = ("view_lockstatistics", permission)
    user.user_permissions.set(Permission.objects.filter(codename__in=wanted))
    client = Client()
    client.force_login(user)
    found = {re.sub("blocking/$", "", urlsplit(url).path) for url in links(client).values()}
    assert found == paths


def test_a_site_without_these_lists_has_no_links(admin_client, monkeypatch):
    write_all()
    monkeypatch.delitem(admin.site._registry, LockEvent)
    assert set(links(admin_client)) == {"Held now", "Who waits now"}


# -- what is normal, and what is a problem --------------------------------------------------------


def trouble(client, **query):
    """What the numbers at the top mark as a problem."""
    body = client.get(PAGE, query).content.decode()
    body = body.partition('<dl class="dlock-totals">')[2].partition("</dl>")[0]
    found = re.findall(r'<span class="[^"]*dlock-trouble">(.*?)</span>', body)
    return [re.sub("<[^>]+>", "", each) for each in found]


def test_contention_and_requeues_are_normal(admin_client):
    write(
        {
            series(instruments.WAITS): point(0, 0.0, 0.01),
            series(instruments.CONTENTIONS): point(120),
            series(instruments.ATTEMPTS, "contended"): point(120),
            series(instruments.REQUEUES, "contended", alias="", group="t"): point(118),
            series(instruments.REQUEUES, "in_progress", alias="", group="t"): point(4),
        }
    )
    text = text_of(admin_client.get(PAGE))
    assert "Not acquired 120 118 of them requeued" in text
    assert "Requeued 122 tasks, 4 for other reasons than a lock" in text
    assert "t · in progress" in text
    assert trouble(admin_client) == []


def test_a_store_without_an_answer_and_losses_are_problems(admin_client):
    write(
        {
            series(instruments.ATTEMPTS, "contended"): point(10),
            series(instruments.ATTEMPTS, "unavailable"): point(3),
            series(instruments.LOSSES, "expired"): point(2),
            # Those of tasks alone: a view or a plain lock requeues nothing.
            series(instruments.REQUEUES, "unavailable", alias="", group="t"): point(1),
        }
    )
    assert trouble(admin_client) == ["3 without an answer of the store", "2"]
    assert "Not acquired 13 1 of them requeued" in text_of(admin_client.get(PAGE))


def test_requeues_for_which_no_lock_was_refused_are_not_of_those(admin_client):
    """Views and plain locks were refused; tasks were requeued because of their records."""
    write(
        {
            series(instruments.ATTEMPTS, "contended"): point(50),
            series(instruments.REQUEUES, "in_progress", alias="", group="t"): point(50),
            series(instruments.REQUEUES, "other", alias="", group="t"): point(7),
        }
    )
    text = text_of(admin_client.get(PAGE))
    assert "Not acquired 50 Requeued 57 tasks, 57 for other reasons than a lock" in text


def test_of_one_alias_it_is_not_known_which_were_requeued(admin_client):
    write_all("b")
    text = text_of(admin_client.get(PAGE, {"alias": "b"}))
    assert "Not acquired 120 Requeued 118 tasks of all aliases" in text


# -- real losses ----------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("lock_events")
def test_every_loss_that_is_counted_is_listed(admin_client):
    about = {"name": "x", "alias": "default", "owner": "o", "token": 1, "metadata": {}}
    reasons = ("broken", "expired", "max_hold", "max_hold")
    with override_settings(DLOCK_METRICS={"EXPORTERS": ["admin"]}):
        for reason in reasons:
            dispatch.send(signals.lost, Lock, reason=reason, held_for=1.0, **about)
        # Listed, too, but no loss: its holder's process is dead.
        dispatch.send(signals.broken, Lock, reason="holder_dead", process=None, **about)
        dispatch.flush()
        # This writes what was counted.
        recorder.disconnect()
    assert LockEvent.objects.count() == 5
    LockEvent.objects.update(when=dt.datetime.fromtimestamp(NOW, dt.timezone.utc))
    found = links(admin_client)
    assert len(listed(admin_client, found["Lock events"])) == 4
    assert len(listed(admin_client, found["2"])) == 2
