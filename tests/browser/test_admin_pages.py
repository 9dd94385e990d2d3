"""The admin pages as an operator sees them: refreshed, strict, light, dark and on a phone.

With ``DLOCK_PICTURES`` set to a folder, the pictures of the documentation are written to it.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from base64 import b64decode
from hashlib import sha256
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dlock import locks, process
from django_dlock.backends import local
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import IdempotencyRecord, LockEvent

LIST = "/admin/django_dlock/heldlock/"
RECORDS = "/admin/django_dlock/idempotencyrecord/"
EVENTS = "/admin/django_dlock/lockevent/"

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # A browser starts slowly on a busy machine.
    pytest.mark.timeout(180),
]


class PictureBackend(local.LocalBackend):
    """Locks of several hosts, some of them hours old, without the hours and the hosts."""

    def pose(self, name, host, pid, *, age, unheard=0.0, renewals=0, waiting=0, **facts):
        """A lock that ``host`` has held for ``age`` seconds."""
        me = process.current()
        # Of another boot, so that nothing is proven about it from here.
        holder = me._replace(id=f"{host}-{pid}", host=host, pid=pid, boot_id="x", machine_id="")
        request = LeaseRequest(
            name=name, owner=sha256(name.encode()).hexdigest()[:32], ttl=30.0, **facts
        )
        lease = self.acquire(request, deadline=self.call_deadline())
        assert isinstance(lease, Lease)
        entry = self._entries[name]
        entry.process, entry.renewals = holder, renewals
        entry.at -= age
        entry.wall_at -= age
        # The token is the time of the grant, in microseconds, and the order of the list.
        entry.token -= int(age * 1e6)
        entry.until -= age % 9
        self._waiters[name] = {f"waiter {number}" for number in range(waiting)}
        self._heard[holder.id] = self._heard.get(me.id, entry.at) - unheard
        return lease


@pytest.fixture(autouse=True)
def aliases(settings):
    settings.DLOCKS = {"default": {"BACKEND": f"{__name__}.PictureBackend"}}
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def page(browser, live_server):
    """The browser, logged in as an operator."""
    operator = User.objects.create_superuser("operator", password="operator")
    client = Client()
    client.force_login(operator)
    show(browser, 1280)
    browser.get(live_server.url + "/admin/login/")
    browser.add_cookie(
        {
            "name": django_settings.SESSION_COOKIE_NAME,
            "value": client.cookies[django_settings.SESSION_COOKIE_NAME].value,
        }
    )
    browser.get_log("browser")
    yield browser
    browser.delete_all_cookies()


def show(browser, width, colours="light", height=600):
    """Lay the page out as on a screen of this width, in these colours."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": colours}]},
    )


def wait_for(page, condition, timeout=30.0):
    """Until a JavaScript expression is true in the page."""
    ends = time.monotonic() + timeout
    while not page.execute_script(f"return {condition}"):
        assert time.monotonic() < ends, f"never true: {condition}"
        time.sleep(0.05)


def text_of(page):
    return page.execute_script("return document.body.innerText")


def complaints(page):
    """What the browser refused, such as an inline script under the strict policy."""
    messages = [entry["message"] for entry in page.get_log("browser")]
    return [message for message in messages if "/favicon.ico" not in message]


def pose_locks():
    backend = locks["default"]
    task = '{"task_name": "shop.tasks.%s", "task_id": "%s"}'
    backend.pose(
        "import:1207",
        "worker-1",
        218,
        age=4210,
        renewals=421,
        metadata=task % ("import_account", "5e0c1f6e-32d4"),
    )
    backend.pose(
        "report:daily",
        "worker-2",
        94,
        age=760,
        unheard=48,
        renewals=71,
        metadata=task % ("daily_report", "9b1d7a20-80aa"),
    )
    backend.pose(
        "invoice:2281",
        "worker-1",
        221,
        age=12.4,
        renewals=1,
        waiting=2,
        metadata=task % ("send_invoice", "c7e2a911-0f3c"),
    )
    backend.pose(
        "order:5519",
        "worker-3",
        57,
        age=8.1,
        kind="parked",
        metadata=task % ("charge", "20f6ab1c-77de"),
    )
    backend.pose(
        "checkout:81", "web-1", 33, age=1.2, metadata='{"path": "/checkout/", "user": "81"}'
    )
    backend.pose(
        "stock:7", "worker-2", 91, age=66, renewals=6, metadata=task % ("reprice", "f1a0be34-1a2b")
    )
    backend.goodbye("worker-2-91", deadline=backend.call_deadline())


def pose_records():
    now = timezone.now()
    for number, (scope, key, state, attempt, deaths) in enumerate(
        [
            ("shop.tasks.charge", "5519", "waiting", 2, 0),
            ("shop.tasks.charge", "5518", "succeeded", 1, 0),
            ("shop.tasks.charge", "5517", "succeeded", 3, 2),
            ("shop.tasks.send_invoice", "2281", "running", 1, 0),
            ("shop.tasks.send_invoice", "2280", "failed", 5, 5),
            ("shop.tasks.refund", "140", "succeeded", 1, 0),
        ]
    ):
        started = now - dt.timedelta(minutes=3 * number + 1)
        ended = state in ("succeeded", "failed")
        IdempotencyRecord.objects.create(
            digest=IdempotencyRecord.digest_of(scope, key),
            scope=scope,
            key=key,
            state=state,
            attempt=attempt,
            deaths=deaths,
            owner=f"{number:032x}",
            lock_alias="default",
            lock_name=f"{scope}:{key}",
            task_id=f"{number}e0c1f6e-32d4",
            created_at=started,
            started_at=started,
            finished_at=started + dt.timedelta(seconds=4) if ended else None,
            expires_at=started + dt.timedelta(days=7),
        )


def pose_events():
    now = timezone.now()
    for number, (event, name, reason, held_for, task) in enumerate(
        [
            ("broken", "stock:7", "operator", 66.0, "reprice"),
            ("lost", "import:1206", "expired", 31.4, "import_account"),
            ("taken_over", "invoice:2279", "holder_dead", None, "send_invoice"),
            ("max_hold", "report:weekly", "max_hold", 86400.0, "weekly_report"),
            ("lost", "order:5482", "broken", 12.0, "charge"),
        ]
    ):
        LockEvent.objects.create(
            when=now - dt.timedelta(minutes=17 * number),
            event=event,
            alias="default",
            name=name,
            reason=reason,
            token=1790000000000000 + 7919 * number,
            user="operator" if event == "broken" else "",
            detail={"held_for": held_for, "task_name": f"shop.tasks.{task}"},
        )


def url_of(name, step):
    return reverse(f"admin:django_dlock_heldlock_{step}", args=[quote(f"default/{name}")])


# -- what the pages do --------------------------------------------------------------------


def test_the_list_refreshes_itself_until_it_is_paused(page, live_server):
    page.get(live_server.url + LIST)
    wait_for(page, "!document.getElementById('dlock-refresh').hidden")
    page.execute_script("document.getElementById('dlock-refresh').dataset.seconds = '0.1'")
    backend = locks["default"]
    backend.pose("order:1", "web-1", 1, age=1)
    wait_for(page, "document.body.innerText.includes('order:1')")
    button = page.find_element("css selector", ".dlock-refresh-pause")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert button.text == "Resume"
    backend.pose("order:2", "web-1", 1, age=1)
    # Paused, it still counts the rounds that it would have made.
    page.execute_script(
        "window.rounds = 0; const old = window.setTimeout;"
        "window.setTimeout = (f, ms) => { window.rounds++; return old(f, ms); }"
    )
    wait_for(page, "window.rounds >= 3")
    assert "order:2" not in text_of(page)
    button.click()
    wait_for(page, "document.body.innerText.includes('order:2')")
    assert complaints(page) == []


def test_a_keyboard_user_stays_on_the_link_through_a_refresh(page, live_server):
    locks["default"].pose("order:1", "web-1", 1, age=1)
    page.get(live_server.url + LIST)
    page.execute_script(
        "document.getElementById('dlock-refresh').dataset.seconds = '0.1';"
        "document.querySelector('.field-lock_name a').focus();"
        "document.querySelector('#changelist-form table').dataset.old = 'yes'"
    )
    wait_for(page, "!document.querySelector('#changelist-form table').dataset.old")
    assert page.execute_script("return document.activeElement.innerText") == "order:1"


def test_the_end_of_the_session_is_told_and_keeps_what_was_shown(page, live_server):
    locks["default"].pose("order:1", "web-1", 1, age=1)
    page.get(live_server.url + LIST)
    page.execute_script("document.getElementById('dlock-refresh').dataset.seconds = '0.1'")
    page.delete_all_cookies()
    wait_for(page, "document.querySelector('.dlock-refresh-failure').innerText.length > 0")
    assert "order:1" in text_of(page)


def test_a_lock_is_released_by_clicking_through(page, live_server):
    pose_locks()
    page.get(live_server.url + LIST)
    row = page.find_element("xpath", "//tr[contains(., 'stock:7')]")
    row.find_element("css selector", ".field-release_link a").click()
    page.find_element("css selector", "input[type=submit].default").click()
    wait_for(page, "document.querySelector('.messagelist .success')")
    assert "The lock “stock:7” of alias “default” was released." in text_of(page)
    assert locks["default"].get("stock:7") is None
    assert complaints(page) == []


# -- how they look ------------------------------------------------------------------------

LOOKS = {"light": (1440, "light"), "dark": (1440, "dark"), "phone": (390, "light")}


def look_at(page, url, name, look):
    """Open a page in one look; it must fit and break no rule of the policy."""
    width, colours = LOOKS[look]
    show(page, width, colours)
    page.get(url)
    wait_for(page, "document.readyState === 'complete'")
    assert complaints(page) == []
    # The page itself never scrolls sideways; a wide table does so within its frame.
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    folder = os.environ.get("DLOCK_PICTURES")
    if folder:
        height = page.execute_script("return document.documentElement.scrollHeight")
        show(page, width, colours, min(height, 1200))
        picture = page.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{name}-{look}.png").write_bytes(b64decode(picture["data"]))


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ["held-locks", "release", "records", "events", "lock", "forget"])
def test_a_page_fits_and_breaks_no_rule(page, live_server, name, look):
    pose_locks()
    pose_records()
    pose_events()
    running = IdempotencyRecord.objects.get(state="running")
    url = {
        "held-locks": LIST,
        "lock": url_of("import:1207", "change"),
        "release": url_of("report:daily", "release"),
        "records": RECORDS,
        "forget": f"{RECORDS}{running.pk}/forget/",
        "events": EVENTS,
    }[name]
    look_at(page, live_server.url + url, name, look)


@pytest.mark.parametrize("look", LOOKS)
def test_an_alias_without_an_answer_leaves_the_page_whole(page, live_server, settings, look):
    settings.DLOCKS = {
        **settings.DLOCKS,
        "billing": {
            "BACKEND": "django_dlock.backends.redis.RedisBackend",
            "LOCATION": "redis://127.0.0.1:1/0",
        },
    }
    locks.reset()
    pose_locks()
    look_at(page, live_server.url + LIST, "outage", look)
    assert "Alias “billing” gave no answer" in text_of(page)
    assert "invoice:2281" in text_of(page)
