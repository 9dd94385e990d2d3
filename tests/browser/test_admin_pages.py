"""What the admin pages do in a browser under a strict policy: refresh, pause, release."""

from __future__ import annotations

import pytest

from django_dlock import locks
from testproject.shop.models import Order
from tests.support.posed import pose_locks
from tests.support.screen import REFRESH_OFTEN, complaints, text_of, wait_for

LIST = "/admin/django_dlock/heldlock/"

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # A browser starts slowly on a busy machine.
    pytest.mark.timeout(180),
]


@pytest.fixture
def short_timers(page):
    """Timers of 5 seconds, as of the list's first refresh, take 0.1 seconds."""
    script = page.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {
            "source": "const wait = window.setTimeout;"
            "window.setTimeout = (run, ms) => wait(run, ms === 5000 ? 100 : ms)"
        },
    )
    yield
    page.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


@pytest.mark.usefixtures("short_timers")
def test_the_list_refreshes_itself_until_it_is_paused(page, live_server):
    page.get(live_server.url + LIST)
    wait_for(page, "!document.getElementById('dlock-refresh').hidden")
    backend = locks["default"]
    backend.pose("order:1", "web-1", 1, age=1)
    wait_for(page, "document.body.innerText.includes('order:1')")
    button = page.find_element("css selector", ".dlock-refresh-pause")
    button.click()
    assert button.text == "Resume"
    backend.pose("order:2", "web-1", 1, age=1)
    # While paused, it still counts the rounds that it would have made.
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
        "document.querySelector('.field-lock_name a').focus();"
        "document.querySelector('#changelist-form table').dataset.old = 'yes';" + REFRESH_OFTEN
    )
    wait_for(page, "!document.querySelector('#changelist-form table').dataset.old")
    assert page.execute_script("return document.activeElement.innerText") == "order:1"


def test_the_end_of_the_session_is_reported_and_the_list_stays(page, live_server):
    locks["default"].pose("order:1", "web-1", 1, age=1)
    page.get(live_server.url + LIST)
    page.delete_all_cookies()
    page.execute_script(REFRESH_OFTEN)
    wait_for(page, "document.querySelector('.dlock-refresh-failure').innerText.length > 0")
    assert "order:1" in text_of(page)


def test_a_lock_can_be_released_by_clicks(page, live_server):
    pose_locks()
    page.get(live_server.url + LIST)
    row = page.find_element("xpath", "//tr[contains(., 'stock:7')]")
    row.find_element("css selector", ".field-release_link a").click()
    page.find_element("css selector", "form.card input[type=submit]").click()
    wait_for(page, "document.querySelector('.messagelist .success')")
    assert "The lock “stock:7” of alias “default” was released." in text_of(page)
    assert locks["default"].get("stock:7") is None
    assert complaints(page) == []


def test_several_locks_can_be_ticked_after_a_refresh_and_released(page, live_server):
    pose_locks()
    page.get(live_server.url + LIST)
    page.execute_script(
        "document.querySelector('#changelist-form table').dataset.old = 'yes';" + REFRESH_OFTEN
    )
    wait_for(page, "!document.querySelector('#changelist-form table').dataset.old")
    # Done in the page, so that no refresh comes between finding an element and clicking it.
    page.execute_script("document.getElementById('action-toggle').click()")
    assert page.execute_script("return document.querySelectorAll('tr.selected').length") == 6
    page.execute_script(
        "for (const box of document.querySelectorAll('.action-select'))"
        " if (!['default/stock:7', 'default/report:daily'].includes(box.value)) box.click()"
    )
    # Ticked rows stay ticked, because no list is fetched that would untick them.
    page.execute_script(
        "window.rounds = 0; const old = window.setTimeout;"
        "window.setTimeout = (f, ms) => { window.rounds++; return old(f, ms); }"
    )
    wait_for(page, "window.rounds >= 3")
    assert page.execute_script("return document.querySelectorAll('tr.selected').length") == 2
    page.find_element("css selector", "[name=action] option[value=release_selected]").click()
    page.find_element("css selector", "[name=index]").click()
    page.find_element("css selector", "form.card input[type=submit]").click()
    wait_for(page, "document.querySelector('.errorlist')")
    assert "The lock “stock:7” of alias “default” was released." in text_of(page)
    page.find_element("css selector", "[name=force]").click()
    page.find_element("css selector", "form.card input[type=submit]").click()
    # The confirmation has the address of the list, too.
    wait_for(
        page, "document.querySelector('#changelist-form') && !document.querySelector('form.card')"
    )
    assert "The lock “report:daily” of alias “default” was released." in text_of(page)
    assert locks["default"].count() == 4
    assert complaints(page) == []


def test_a_lock_is_released_from_the_page_of_its_object(page, live_server):
    pose_locks()
    order = Order.objects.create(number=5519)
    page.get(f"{live_server.url}/admin/shop/order/{order.pk}/change/")
    assert "shop.tasks.charge" in text_of(page)
    page.find_element("css selector", ".dlock-row-tool").click()
    page.find_element("css selector", "[name=force]").click()
    page.find_element("css selector", "form.card input[type=submit]").click()
    wait_for(page, "document.querySelector('.messagelist .success')")
    assert "The lock “order:5519” of alias “default” was released." in text_of(page)
    assert "No lock of this object is held." in text_of(page)
    assert locks["default"].get("order:5519") is None
    assert complaints(page) == []
