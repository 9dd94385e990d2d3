"""The page of lock statistics."""

from __future__ import annotations

import html
import re

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import translation

from django_dlock.admin import cards
from django_dlock.admin.figures import RANGES, Figures
from django_dlock.metrics import instruments
from django_dlock.models import LockStatistics
from tests.support.counted import (  # noqa: F401 - a fixture
    PAGE,
    now,
    point,
    series,
    text_of,
    write,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("now")]


def write_some():
    write(
        {
            series(instruments.WAITS): point(0, 0.0, 0.002, 0.002, 3.0),
            series(instruments.HOLDS, "released"): point(0, 0.0, 1.0, 2.0),
            series(instruments.HOLDS, "parked"): point(0, 0.0, 4.0),
            series(instruments.CONTENTIONS): point(2),
            series(instruments.ATTEMPTS, "contended"): point(1),
            series(instruments.HELD): point(0, 90.0),
            series(instruments.WAITING): point(0, 30.0),
            series(instruments.LOSSES, "max_hold"): point(1),
            series(instruments.REQUEUES, "contended", alias="", group="shop.charge"): point(5),
            series(instruments.RENEWALS, group=""): point(7),
            series(instruments.LATENESS, alias="", group=""): point(0, 0.0, 0.25),
        }
    )


def tables_of(response):
    return {str(card.title): card.ranking or card.table for card in response.context["cards"]}


def rows_of(found):
    return {name: [cell.text for cell in cells] for name, cells in found.rows}


def test_the_page_shows_what_was_counted(admin_client):
    write_some()
    response = admin_client.get(PAGE)
    text = text_of(response)
    for expected in (
        "Acquired 3 Contended 2 50 % Not acquired 1 1 of them requeued Requeued 5 tasks Lost 1",
        "Averages over a minute: at most 1.5 held, 0.5 waiting.",
        "Half within 5 ms, 95 % within 3 s, the longest 3 s.",
        "Half within 4 s, 95 % within 4 s, the longest 4 s.",
        "1 lock ended while held.",
        "7 renewals; the renewal thread woke at most 250 ms too late.",
        "5 deliveries of tasks were requeued. 1 lock was kept for a retry.",
        "Most often contended: order.",
    ):
        assert expected in text, text
    found = tables_of(response)
    assert rows_of(found["Losses"]) == {"max hold": ["1"]}
    assert rows_of(found["Requeued"]) == {"shop.charge · contended": ["5"]}
    assert rows_of(found["Contention by name"]) == {
        "order": ["2", "50 %", "3", "1", "1", "1 s", "3 s"]
    }
    assert rows_of(found["Held and waiting"])["14:28"] == ["1.5", "0.5"]
    assert rows_of(found["Waiting time"])["up to 5 ms"] == ["2"]


@pytest.mark.parametrize("chosen", RANGES)
def test_every_picture_stands_beside_its_numbers(admin_client, chosen):
    write_some()
    response = admin_client.get(PAGE, {"range": chosen})
    assert response.context["range"] == chosen
    body = response.content.decode()
    # Those of time and of durations; and each has a table.
    assert body.count('role="img"') == 6
    assert body.count("<details>") == 6
    ids = re.findall(r'id="(dlock-[\w-]+)"', body)
    assert len(ids) == len(set(ids)) == 12


def test_unfinished_minutes_have_no_level(admin_client):
    """Processes write about once a minute, so the last minutes would look like a drop."""
    for before in (30, 90, 150):
        write(
            {series(instruments.HELD): point(0, 60.0), series(instruments.LOSSES, "x"): point(1)},
            before,
        )
    held = Figures(RANGES["hour"]).level(instruments.HELD)
    # The last minute has only begun, and the one before may not have been written by all.
    assert held[-4:] == [0.0, 1.0, None, None]
    assert Figures(RANGES["hour"]).sums(instruments.LOSSES)[-4:] == [0, 1, 1, 1]


def test_a_killed_process_is_not_counted_for_ever(admin_client):
    """What it held counts only for the time that it reported, although it reported no end."""
    write({series(instruments.HELD): point(0, 60.0)}, 600)
    held = Figures(RANGES["hour"]).level(instruments.HELD)
    assert [value for value in held if value] == [1.0]


def test_what_is_ahead_or_too_old_is_left_out(admin_client):
    for before in (-86_400, -120, 2 * 3600):
        write({series(instruments.LOSSES, "x"): point(1)}, before)
    assert Figures(RANGES["hour"]).is_empty


def test_an_alias_can_be_chosen(admin_client):
    write(
        {
            series(instruments.CONTENTIONS): point(2),
            series(instruments.WAITS, alias="b", group="x"): point(4),
        }
    )
    write({series(instruments.REQUEUES, "contended", alias="", group="t"): point(5)})
    both = admin_client.get(PAGE)
    assert set(rows_of(tables_of(both)["Contention by name"])) == {"default · order", "b · x"}
    one = admin_client.get(PAGE, {"alias": "b", "range": "day"})
    assert set(rows_of(tables_of(one)["Contention by name"])) == {"x"}
    assert "Renewal lateness and requeued tasks are those of all aliases." in text_of(one)
    assert rows_of(tables_of(one)["Requeued"]) == {"t · contended": ["5"]}
    assert "?range=week&amp;alias=b" in one.content.decode()


@pytest.mark.parametrize("query", ["range=year", "alias=nobody", "range=<b>&alias='\"<i>", "x=y"])
def test_a_wrong_query_shows_the_usual_page(admin_client, query):
    write_some()
    response = admin_client.get(f"{PAGE}?{query}")
    assert response.status_code == 200
    assert (response.context["range"], response.context["alias"]) == ("hour", "")
    assert b"<i>" not in response.content


AWKWARD = [
    "<script>alert(1)</script>",
    "'\" onload=x",
    "🔒" * 30,
    "קבוצה",
    "a" * 64,
    "{{ x }}",
    "%s %d",
]


def test_names_are_only_text(admin_client):
    for name in AWKWARD:
        group = {"group": name}
        write(
            {
                series(instruments.CONTENTIONS, **group): point(1),
                series(instruments.LOSSES, name[:64], **group): point(1),
                series(instruments.REQUEUES, name[:64], alias="", **group): point(1),
            }
        )
    response = admin_client.get(PAGE)
    body = response.content.decode().replace("<wbr>", "")
    assert "<script>alert" not in body
    for name in AWKWARD:
        assert html.escape(name) in body
    assert set(AWKWARD) <= set(rows_of(tables_of(response)["Contention by name"]))
    # Text of either direction stays in its cell.
    assert "<bdi>קבוצה</bdi>" in body


@pytest.mark.parametrize(("group", "told"), [("other", True), ("order", False)])
def test_the_page_says_how_names_leave_the_group_other(admin_client, group, told):
    write({series(instruments.WAITS, group=group): point(0, 0.0, 0.1)})
    page = admin_client.get(PAGE).content.decode()
    assert ("other: names " in page and 'DLOCK_METRICS["GROUPS"]' in page) == told


def test_many_groups_are_added_up(admin_client):
    write(
        {
            series(instruments.CONTENTIONS, group=f"g{number:02}"): point(100 - number)
            for number in range(50)
        }
    )
    rows = rows_of(tables_of(admin_client.get(PAGE))["Contention by name"])
    assert list(rows) == [f"g{number:02}" for number in range(12)] + ["38 others"]
    assert rows["38 others"][0] == f"{sum(range(51, 89)):,}"


@pytest.mark.parametrize("language", ["de", "fr", "ar", "en"])
def test_the_page_works_in_other_languages(admin_client, language, settings):
    settings.USE_THOUSAND_SEPARATOR = True
    write_some()
    with translation.override(language):
        response = admin_client.get(PAGE, headers={"accept-language": language})
    found = re.findall(r'<svg class="dlock.*?</svg>', response.content.decode(), re.DOTALL)
    assert found
    for svg in found:
        for numbers in re.findall(r' (?:x|y|width|height)="([^"]+)"', svg):
            float(numbers)


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "America/St_Johns", "UTC"])
def test_times_are_those_of_the_project(admin_client, settings, zone):
    settings.TIME_ZONE = zone
    write_some()
    for chosen, most in (("hour", 5), ("day", 5), ("week", 8)):
        figures = Figures(RANGES[chosen])
        ticks = cards._ticks(figures)
        assert most - 2 <= len(ticks) <= most
        assert all(0 < tick.at < 1 for tick in ticks)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (0.0004, "0.4 ms"),
        (0.0333333, "33.3 ms"),
        (0.25, "250 ms"),
        (1, "1 s"),
        (90, "90 s"),
        (150, "2.5 min"),
        (3600, "1 h"),
        (86400, "24 h"),
    ],
)
def test_durations_are_shown_in_one_unit(seconds, text):
    assert cards.span(seconds) == text


# -- permissions ----------------------------------------------------


def visitor(*permissions):
    user = User.objects.create_user("visitor", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def test_the_page_has_a_permission_of_its_own():
    assert visitor("view_lockevent", "view_heldlock").get(PAGE).status_code == 403
    assert Client().get(PAGE).status_code == 302
    User.objects.all().delete()
    client = visitor("view_lockstatistics")
    assert client.get(PAGE).status_code == 200
    assert PAGE in client.get("/admin/").content.decode()
    assert PAGE in client.get("/admin/django_dlock/").content.decode()


def test_rows_have_no_pages_of_their_own(admin_client):
    write_some()
    row = LockStatistics.objects.first()
    for path in ("add/", f"{row.pk}/", f"{row.pk}/change/", f"{row.pk}/delete/"):
        assert admin_client.get(PAGE + path).status_code == 404
    admin_client.post(
        PAGE, {"action": "delete_selected", "_selected_action": row.pk, "post": "yes"}
    )
    assert LockStatistics.objects.filter(pk=row.pk).exists()


# -- much of it ----------------------------------------------------------------------------------


def test_three_queries_read_the_page_however_much_there_is(admin_client):
    counts = []
    for _ in range(2):
        for number in range(100):
            write({series(instruments.WAITS, group=f"g{number}"): point(1)}, 60 * number)
        with CaptureQueriesContext(connections["default"]) as queries:
            admin_client.get(PAGE, {"range": "week"})
        counts.append(sum("lockstatistics" in each["sql"] for each in queries))
    assert counts == [3, 3]
