"""No list is cut, on a wide screen or a narrow one, however much its cells say."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from django_dlock import locks
from django_dlock.models import FollowUp, IdempotencyRecord, LockEvent
from tests.support.screen import show, text_of

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # A browser starts slowly on a busy machine.
    pytest.mark.timeout(180),
]

ADMIN = "/admin/django_dlock/"
LONG_NAME, WORDS = "x" * 250, "a:b " * 60
TASK = "warehouse.tasks.nightly.recalculate_everything_for_each_customer"
WIDTHS = pytest.mark.parametrize("width", [1280, 1024, 768, 390, 320])


@pytest.fixture(autouse=True)
def spare_alias(page, settings):
    settings.DLOCKS = {**settings.DLOCKS, "a-spare-alias": settings.DLOCKS["default"]}
    locks.reset()


@WIDTHS
def test_no_column_is_cut_however_much_its_cells_say(page, live_server, width):
    task = f'{{"task_name": "{TASK}", "task_id": "%s"}}'
    for alias in ("default", "a-spare-alias"):
        backend = locks[alias]
        backend.pose("x" * 200, "w" * 60, 4194304, age=86399, waiting=12345, metadata=task % "7")
        backend.pose(WORDS, "web-1", 1, age=3599, silent_for=99, metadata=task % ("9" * 80))
        backend.pose("reserved", "web-1", 1, age=59.94, kind="reserved")
        backend.pose("late:customer-statement", "web-1", 1, age=8.9, renewals=9, waiting=1)
        backend._entries["late:customer-statement"].until -= 12
    pose_deadlock()
    open_list(page, live_server, "heldlock", width)
    text = text_of(page)
    assert all(mark in text for mark in ("deadlock", "silent", "reserved", "renewal late"))
    nothing_is_cut(page, width)


def pose_deadlock():
    """The holders of two locks wait for each other; their names are long."""
    backend, names = locks["default"], ("statement:2026-11:customer:77812", "balance")
    for name in names:
        backend.pose(name, "web-1", 7, age=99)
    for name, held in (names, names[::-1]):
        backend.pose_waiter(name, "web-1", 7, waited=98, holds=[held])


@WIDTHS
@pytest.mark.parametrize("model", ["idempotencyrecord", "lockevent", "followup"])
def test_no_other_list_is_cut_either(page, live_server, model, width):
    pose_long_rows()
    open_list(page, live_server, model, width, "?published=all" if model == "followup" else "")
    nothing_is_cut(page, width)
    is_card = page.execute_script(
        "return getComputedStyle(document.querySelector('#result_list')).display === 'block'"
    )
    if width in (1280, 390):
        assert is_card == (width == 390)
    labels = page.execute_script(
        "return [...document.querySelectorAll('#result_list tbody tr')].map((row) => "
        "[...row.querySelectorAll('.dlock-label')].filter((one) => one.offsetWidth)"
        ".map((one) => one.textContent))"
    )
    assert len(labels) == 3
    if not is_card:
        assert labels == [[], [], []]
        return
    # What a row does not have is left out of its card.
    assert [labels[0], labels[-1]] == CARDS[model]


CARDS = {
    "idempotencyrecord": [["Scope", "Started at"], ["Scope", "Runs", "Started at"]],
    "lockevent": [["Name", "Holder", "User"], ["Name"]],
    "followup": [["Created at"], ["Created at", "Error"]],
}
"""The labels of the first card and of the last one."""


def pose_long_rows():
    """A row whose cells say much, one with much else, and one that has hardly anything."""
    now = timezone.now()
    for key, scope, state, attempt, deaths in (
        (LONG_NAME, LONG_NAME, "failed", 2147483647, 2147483647),
        (WORDS, f"{TASK}.{TASK}", "running", 12345, 0),
        ("7", "shop", "succeeded", 1, 0),
    ):
        record = IdempotencyRecord.objects.create(
            digest=IdempotencyRecord.digest_of(scope, key),
            scope=scope,
            key=key,
            state=state,
            attempt=attempt,
            deaths=deaths,
            owner="o" * 32,
            lock_alias="default",
            lock_name="gone",
            task_id="9" * 255,
            created_at=now,
            started_at=now - dt.timedelta(days=999),
            finished_at=None if state == "running" else now,
            expires_at=now,
        )
        FollowUp.objects.create(
            record=record,
            task=scope,
            task_id="9" * 255,
            message="{}",
            error="" if state == "succeeded" else f"{LONG_NAME} {WORDS}",
            created_at=now,
            published_at=None if state == "failed" else now,
            expires_at=now,
        )
    for number, (event, name, reason, user, detail) in enumerate(
        (
            (
                *("lost", LONG_NAME, "x" * 255, "u" * 150),
                {"held_for": 86399999.9, "task_name": TASK, "host": "w" * 250, "pid": 4194304},
            ),
            ("taken_over", WORDS, "holder_dead", "", {"path": "/" + LONG_NAME}),
            ("max_hold", "a", "", "", {}),
        )
    ):
        LockEvent.objects.create(
            when=now - dt.timedelta(minutes=number),
            event=event,
            alias="a-spare-alias",
            name=name,
            reason=reason,
            user=user,
            detail=detail,
        )


def open_list(page, live_server, model, width, query=""):
    show(page, width)
    page.get(f"{live_server.url}{ADMIN}{model}/{query}")


def nothing_is_cut(page, width):
    table, frame = page.execute_script(
        "const table = document.querySelector('#result_list');"
        "return [table.scrollWidth, table.parentElement.clientWidth]"
    )
    assert table <= frame
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    cut = page.execute_script(
        "return [...document.querySelectorAll('#result_list :is(th, td)')]"
        ".filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.outerHTML)"
    )
    assert cut == []
