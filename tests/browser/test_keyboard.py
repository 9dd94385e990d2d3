"""Locks are released with the keyboard alone."""

from __future__ import annotations

import pytest
from selenium.webdriver import ActionChains, Keys

from django_dlock import locks
from tests.support.posed import owner_of, pose_locks
from tests.support.screen import text_of, wait_for

LIST = "/admin/django_dlock/heldlock/"

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # A browser starts slowly on a busy machine.
    pytest.mark.timeout(180),
]

IN_VIEW = """(() => {
    const one = document.activeElement, box = one.getBoundingClientRect();
    const seen = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
    return one.contains(seen);
})()"""
OURS = (
    "#result_list, .dlock-tiles, .dlock-refresh, .dlock-narrow, .dlock-confirmation form, "
    ".dlock-why #content-main"
)


def press(page, key):
    ActionChains(page).send_keys(key).perform()


def tab_to(page, selector):
    """Press Tab until an element has the focus; every stop of ours must show that it has it."""
    stops = []
    for _ in range(100):
        press(page, Keys.TAB)
        stop = page.execute_script(
            "const one = document.activeElement, style = getComputedStyle(one);"
            "return {is: one.matches(arguments[0]), ours: Boolean(one.closest(arguments[1])),"
            " shown: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1,"
            " html: one.outerHTML.slice(0, 200)}",
            selector,
            OURS,
        )
        stops.append(stop["html"])
        if stop["ours"]:
            assert stop["shown"], f"the focus is not seen on {stop['html']}"
            # A page may scroll to it in steps.
            wait_for(page, IN_VIEW, 5)
        if stop["is"]:
            return stops
    raise AssertionError(f"Tab does not reach {selector}: {stops}")


@pytest.fixture
def listed(page, live_server):
    pose_locks()
    page.get(live_server.url + LIST)
    wait_for(page, "!document.getElementById('dlock-refresh').hidden")
    # Tab begins at the top.
    page.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    return page


def test_a_lock_is_released_with_tab_space_and_enter(listed):
    tab_to(listed, "[href*='report_3Adaily/release']")
    press(listed, Keys.ENTER)
    wait_for(listed, "document.querySelector('form.card')")
    tab_to(listed, "[name=force]")
    press(listed, Keys.SPACE)
    tab_to(listed, "form.card input[type=submit]")
    press(listed, Keys.ENTER)
    wait_for(listed, "document.querySelector('.messagelist .success')")
    assert "The lock “report:daily” of alias “default” was released." in text_of(listed)
    assert locks["default"].get("report:daily") is None


def test_the_page_of_a_lock_is_unfolded_with_the_keyboard(listed):
    tab_to(listed, ".field-lock_name a[href*='import_3A1207']")
    press(listed, Keys.ENTER)
    wait_for(listed, "document.querySelector('.dlock-more')")
    assert owner_of("import:1207") not in text_of(listed)
    tab_to(listed, ".dlock-more summary")
    press(listed, Keys.ENTER)
    wait_for(listed, "document.querySelector('.dlock-more').open")
    assert owner_of("import:1207") in text_of(listed)
    tab_to(listed, ".dlock-steps a[href*='/release/']")
    press(listed, Keys.ENTER)
    wait_for(listed, "document.querySelector('form.card')")


def test_several_locks_are_ticked_and_released_with_the_keyboard(listed):
    tab_to(listed, "select[name=action]")
    # The only other key besides Tab, Space and Enter; it chooses an action.
    press(listed, Keys.ARROW_DOWN)
    for name in ("stock:7", "order:5519"):
        tab_to(listed, f".action-select[value='default/{name}']")
        press(listed, Keys.SPACE)
    press(listed, Keys.ENTER)
    wait_for(listed, "document.querySelector('form.card')")
    assert "Release these 2 locks?" in text_of(listed)
    tab_to(listed, "[name=force]")
    press(listed, Keys.SPACE)
    tab_to(listed, "form.card input[type=submit]")
    press(listed, Keys.ENTER)
    wait_for(listed, "document.querySelector('.messagelist .success')")
    assert locks["default"].get("stock:7") is locks["default"].get("order:5519") is None


def test_the_pause_and_the_filters_are_reached_in_the_order_of_the_page(listed):
    stops = tab_to(listed, "[name=prefix]")
    order = (
        "dlock-refresh-pause",
        'id="searchbar"',
        'href="?waiting=deadlock"',
        'name="action"',
        "_selected_action",
        "/release/",
    )
    places = [next(i for i, html in enumerate(stops) if part in html) for part in order]
    assert places == sorted(places)
    press(listed, "order:")
    press(listed, Keys.ENTER)
    wait_for(listed, "location.search.includes('prefix=order')")
    assert "order:5519" in text_of(listed)
    assert "report:daily" not in text_of(listed)
