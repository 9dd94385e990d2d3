"""How the list of held locks refreshes itself, and what it leaves alone."""

from __future__ import annotations

import pytest
from django.contrib.sessions.models import Session

from django_dlock import locks
from tests.support.posed import pose_locks
from tests.support.screen import REFRESH_OFTEN, complaints, text_of, wait_for

LIST = "/admin/django_dlock/heldlock/"

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # A browser starts slowly on a busy machine.
    pytest.mark.timeout(180),
]

COUNTED = """
    window.asked = 0; window.answered = 0; window.broken = false;
    const ask = window.fetch;
    window.fetch = async (...args) => {
        window.asked++;
        if (window.broken) { window.answered++; throw new TypeError("no network"); }
        try { return await ask(...args); } finally { window.answered++; }
    };
"""
HIDE, SHOW = (
    f"Object.defineProperty(document, 'hidden', {{value: {value}, configurable: true}});"
    "document.dispatchEvent(new Event('visibilitychange'));"
    for value in ("true", "false")
)


def seconds(page, value):
    page.execute_script(f"document.getElementById('dlock-refresh').dataset.seconds = '{value}'")


@pytest.fixture
def opened(page, live_server):
    """The list of posed locks, which counts what it asks for; it has not refreshed itself yet."""
    pose_locks()
    page.get(live_server.url + LIST)
    wait_for(page, "!document.getElementById('dlock-refresh').hidden")
    page.execute_script(COUNTED)
    return page


@pytest.fixture
def listed(opened):
    """The list of posed locks; it refreshes itself often."""
    opened.execute_script(REFRESH_OFTEN)
    return opened


def refreshed(page, times=2):
    """Wait for further answers, which have been taken over."""
    page.execute_script("window.answered_before = window.answered")
    wait_for(page, f"window.answered >= window.answered_before + {times}")


def test_a_background_tab_asks_nothing_and_refreshes_when_it_comes_back(listed):
    refreshed(listed)
    listed.execute_script(HIDE)
    wait_for(listed, "window.asked === window.answered")
    asked = listed.execute_script("return window.asked")
    # Five of its intervals.
    listed.execute_script("window.setTimeout(() => { window.later = true; }, 500)")
    wait_for(listed, "window.later")
    assert listed.execute_script("return window.asked") == asked
    seconds(listed, 1000)
    # It asks before the script returns, and so without waiting for its interval.
    assert listed.execute_script(SHOW + "return window.asked") == asked + 1
    assert complaints(listed) == []


def test_a_failure_says_since_when_the_list_is_old_and_is_read_out_once(listed):
    refreshed(listed)
    listed.execute_script("window.broken = true")
    wait_for(listed, "document.querySelector('.dlock-refresh-failure').textContent")
    said = "return document.querySelector('.dlock-refresh-failure').textContent"
    first = listed.execute_script(said)
    assert first.startswith("Not updated since ")
    assert "Last tried at " in text_of(listed)
    assert "import:1207" in text_of(listed)
    listed.execute_script(
        "window.changes = 0; new MutationObserver(() => { window.changes++; }).observe("
        "document.querySelector('.dlock-refresh-failure'), {characterData: true, subtree: true})"
    )
    refreshed(listed)
    assert listed.execute_script(said) == first
    listed.execute_script("window.broken = false")
    wait_for(listed, "!document.querySelector('.dlock-refresh-failure').textContent")
    news = listed.find_element("css selector", ".dlock-refresh-news")
    assert news.get_attribute("role") == "status"
    assert news.get_attribute("textContent") == "The list is complete and updated again."
    assert "Last tried" not in text_of(listed)


def test_the_page_says_how_old_the_list_is(opened):
    seconds(opened, 1000)
    wait_for(opened, "/Read [1-9]\\d?s ago/.test(document.body.innerText)")
    opened.execute_script(
        "window.dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))"
    )
    wait_for(opened, "window.asked >= 1 && window.asked === window.answered")
    wait_for(opened, "document.querySelector('.dlock-refresh-time').textContent === 'Read 0s ago'")


def test_a_refresh_counts_again_and_leaves_the_rest(listed, live_server):
    listed.get(live_server.url + LIST + "?prefix=import")
    wait_for(listed, "!document.getElementById('dlock-refresh').hidden")
    listed.execute_script(COUNTED + REFRESH_OFTEN)
    refreshed(listed)
    listed.execute_script(
        "document.querySelector('.field-lock_name a').mark = 'kept';"
        "document.querySelector('.dlock-tile').focus()"
    )
    assert "1\ndead" in text_of(listed)
    backend = locks["default"]
    backend.deregister("worker-2-94", deadline=backend.call_deadline())
    wait_for(listed, "document.body.innerText.includes('2\\ndead')")
    assert "0\nsilent" in text_of(listed)
    quiet = "return document.querySelector('[href=\"?holder_state=silent\"]').className"
    assert "dlock-none" in listed.execute_script(quiet)
    assert listed.execute_script("return document.activeElement.className").startswith("dlock-tile")
    assert listed.execute_script("return document.querySelector('.field-lock_name a').mark")
    assert complaints(listed) == []


def test_a_refresh_replaces_only_the_cells_that_have_changed(listed):
    refreshed(listed)
    listed.execute_script("document.querySelector('.field-lock_name a').mark = 'kept'")
    refreshed(listed)
    kept = "return document.querySelector('.field-lock_name a').mark"
    assert listed.execute_script(kept) == "kept"
    locks["default"].pose("order:9", "web-1", 1, age=1)
    wait_for(listed, "document.body.innerText.includes('order:9')")
    assert listed.execute_script(kept) is None


def test_marked_text_stays_marked(listed):
    refreshed(listed)
    listed.execute_script(
        "document.getSelection().selectAllChildren(document.querySelector('.field-holder'))"
    )
    wait_for(listed, "window.asked === window.answered")
    marked = listed.execute_script("return document.getSelection().toString()")
    assert "worker-1" in marked
    wait_for(listed, "document.body.innerText.includes('not refreshed while you choose')")
    assert listed.execute_script("return document.getSelection().toString()") == marked
    listed.execute_script("document.getSelection().removeAllRanges()")
    refreshed(listed)
    assert "not refreshed" not in text_of(listed)


@pytest.mark.parametrize("selector", [".action-select", "[name=index]", ".field-release_link a"])
def test_a_refresh_moves_neither_focus_nor_page(listed, selector):
    for number in range(40):
        locks["default"].pose(f"more:{number:02}", "web-1", 1, age=1)
    wait_for(listed, "document.body.innerText.includes('more:39')")
    listed.execute_script(
        "const one = document.querySelector(arguments[0]); one.focus();"
        "window.focused = [one.value, one.getAttribute('href')].join(); window.scrollTo(0, 300);",
        selector,
    )
    locks["default"].pose("more:40", "web-1", 1, age=0.5)
    wait_for(listed, "document.body.innerText.includes('more:40')")
    assert listed.execute_script(
        "const one = document.activeElement;"
        "return window.focused === [one.value, one.getAttribute('href')].join()"
    )
    assert listed.execute_script("return window.scrollY") == 300


def test_an_outage_is_read_out_when_it_begins_and_when_it_ends(listed, settings):
    refreshed(listed)
    down = {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": "redis://127.0.0.1:1/0",
    }
    backend = locks["default"]
    news = "document.querySelector('.dlock-refresh-news').textContent"
    settings.DLOCKS = {**settings.DLOCKS, "billing": down}
    locks.reset()
    wait_for(listed, f"{news}.includes('Alias “billing” did not answer')")
    settings.DLOCKS = {"default": settings.DLOCKS["default"]}
    locks.reset()
    wait_for(listed, f"{news} === 'The list is complete and updated again.'")
    backend.close()


# -- nobody is there ---------------------------------------------------------------------------


def leave_alone(page, after):
    page.execute_script(f"document.getElementById('dlock-refresh').dataset.idle = '{after}'")


def stopped(page):
    return page.execute_script(
        "return document.querySelector('.dlock-refresh-stopped').textContent"
    )


def wait_until_stopped(page):
    wait_for(page, "document.querySelector('.dlock-refresh-stopped').textContent")
    wait_for(page, "window.asked === window.answered")


def move_pointer(page, x):
    page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": 40})


def press_key(page, x):
    key = {"key": "Shift", "code": "ShiftLeft"}
    page.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", **key})


def come_back(page, x):
    page.execute_script(HIDE)
    page.execute_script(SHOW)


@pytest.mark.parametrize("act", [move_pointer, press_key, come_back])
def test_a_page_that_is_left_alone_does_not_prolong_a_session(listed, settings, act):
    settings.SESSION_SAVE_EVERY_REQUEST = True
    refreshed(listed)
    before = expiry()
    refreshed(listed)
    assert expiry() > before, "each refresh prolongs the session"
    leave_alone(listed, 0.1)
    wait_until_stopped(listed)
    assert stopped(listed) == "not refreshed: no action for 15 minutes"
    asked, before = listed.execute_script("return window.asked"), expiry()
    # Five of its intervals.
    listed.execute_script("window.setTimeout(() => { window.later = true; }, 500)")
    wait_for(listed, "window.later")
    assert listed.execute_script("return window.asked") == asked
    assert expiry() == before
    seconds(listed, 1000)
    act(listed, 60)
    wait_for(listed, f"window.asked === {asked + 1} && window.asked === window.answered")
    assert expiry() > before
    assert complaints(listed) == []


def test_a_page_goes_on_after_an_action_until_it_is_left_alone_again(listed):
    leave_alone(listed, 0.1)
    wait_until_stopped(listed)
    leave_alone(listed, 900)
    move_pointer(listed, 60)
    refreshed(listed)
    assert not stopped(listed)
    leave_alone(listed, 0.1)
    wait_until_stopped(listed)


def test_what_the_page_does_itself_is_no_action(listed):
    """It moves the focus when it replaces the list, and rows move beneath a resting pointer."""
    move_pointer(listed, 60)
    listed.execute_script("document.querySelector('.field-lock_name a').focus()")
    refreshed(listed)
    leave_alone(listed, 1)
    acted = "window.asked > 0"
    wait_for(listed, acted)
    locks["default"].pose("order:9", "web-1", 1, age=1)
    wait_until_stopped(listed)
    asked = listed.execute_script("return window.asked")
    move_pointer(listed, 60)
    listed.execute_script("document.querySelector('.field-lock_name a').blur()")
    listed.execute_script("document.querySelector('.field-lock_name a').focus()")
    assert listed.execute_script("return window.asked") == asked
    assert stopped(listed)


def expiry():
    return Session.objects.get().expire_date
