"""How the admin pages look: in Django's own admin and in three themes, light, dark and on a phone.

With ``DLOCK_PICTURES`` set to a folder, the pictures of the documentation are written to it;
``make pictures`` does so.
"""

from __future__ import annotations

import importlib.util
import os
from base64 import b64decode
from pathlib import Path
from urllib.parse import quote

import pytest
from django.contrib.admin.utils import quote as quote_id

from tests.conftest import missing
from tests.support.screen import complaints, show, text_of, wait_for
from tests.support.themed_site import PASSWORD, THEMES, USER, ThemedSite

pytestmark = pytest.mark.timeout(180)

LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light")}
LOCKS, RECORDS, EVENTS, STATISTICS = (
    f"/admin/django_dlock/{model}/"
    for model in ("heldlock", "idempotencyrecord", "lockevent", "lockstatistics")
)
ODD = quote(quote_id("default/" + "<b>&\"'</b>/../שלום 👾 " + "long" * 50))
PAGES = {
    "held-locks": LOCKS,
    "lock": LOCKS + "default_2Fimport_3A1207/change/",
    "release": LOCKS + "default_2Freport_3Adaily/release/",
    "why": LOCKS + "default_2Fimport_3A1207/why/",
    "why-deadlock": LOCKS + "default_2Finvoice_3A2281/why/",
    "why-not-held": LOCKS + "default_2Forder_3A5482/why/",
    "why-odd-name": LOCKS + ODD + "/why/",
    "blocking": LOCKS + "blocking/",
    "records": RECORDS,
    "record": RECORDS + "2/change/",
    "record-failed": RECORDS + "5/change/",
    "forget": RECORDS + "4/forget/",
    "rerun": RECORDS + "2/rerun/",
    "follow-ups": "/admin/django_dlock/followup/",
    "follow-up": "/admin/django_dlock/followup/2/change/",
    "events": EVENTS,
    "event": EVENTS + "1/change/",
    "statistics": STATISTICS + "?range=day",
    "object": "/admin/shop/order/1/change/",
    "object-free": "/admin/shop/order/2/change/",
    "object-release": "/admin/shop/order/1/locks/release/",
}
IN_THE_DOCUMENTATION = {
    *(
        (name, look)
        for name in ("held-locks", "release", "records", "events", "statistics")
        for look in LOOKS
    ),
    *(
        (name, look)
        for name in ("outage", "object", "why", "blocking")
        for look in ("light", "dark")
    ),
}
MOST_SHOWN = {"statistics": 1900}
"""How much of a high page a picture of the documentation shows, in pixels."""


@pytest.fixture(scope="module", params=THEMES)
def theme(request):
    for app in THEMES[request.param]:
        if importlib.util.find_spec(app) is None:
            missing(f"django-{app} is not installed")
    return request.param


@pytest.fixture(scope="module")
def site(theme):
    with ThemedSite(theme) as site:
        yield site


@pytest.fixture(scope="module")
def troubled_site(theme):
    with ThemedSite(theme, outage=True) as site:
        yield site


def visit(browser, site, path, width=1280, colours="light"):
    """Open a page as a user who is logged in, with this screen width and these colours."""
    if site.theme == "grappelli" and width < 600:
        pytest.skip("django-grappelli has no layout for phones")
    show(browser, width, colours)
    browser.get(site.url + path)
    if "/login/" in browser.current_url:
        browser.find_element("name", "username").send_keys(USER)
        browser.find_element("name", "password").send_keys(PASSWORD)
        browser.find_element("css selector", "[type=submit]").click()
        browser.get(site.url + path)
    wait_for(browser, "document.readyState === 'complete'")


def look_at(browser, site, path, name, look):
    """Open a page in one style; it must fit, and obey the policy."""
    width, colours = LOOKS[look]
    # Only for this page, not for the login page.
    visit(browser, site, path, width, colours)
    complaints(browser)
    browser.refresh()
    wait_for(browser, "document.readyState === 'complete'")
    assert complaints(browser) == []
    # The page itself never scrolls sideways; a wide table scrolls inside its frame.
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    folder = os.environ.get("DLOCK_PICTURES")
    if folder and site.theme == "stock" and (name, look) in IN_THE_DOCUMENTATION:
        height = browser.execute_script("return document.documentElement.scrollHeight")
        most = 800 if look == "phone" else MOST_SHOWN.get(name, 1200)
        show(browser, width, colours, min(height, most))
        picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        Path(folder, f"{name}-{look}.png").write_bytes(b64decode(picture["data"]))


def boxes(browser, selector):
    """The position of each element: left, right, top, bottom, width and height."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((e) => "
        "e.getBoundingClientRect().toJSON())",
        selector,
    )


def style(browser, selector, name):
    return browser.execute_script(
        "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]",
        selector,
        name,
    )


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_obeys_the_policy(browser, site, name, look):
    look_at(browser, site, PAGES[name], name, look)


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_is_complete_if_an_alias_does_not_answer(browser, troubled_site, look):
    look_at(browser, troubled_site, LOCKS, "outage", look)
    assert "Alias “billing” did not answer" in text_of(browser)
    assert "invoice:2281" in text_of(browser)
    problem, table = boxes(browser, ".dlock-problem, #result_list")
    assert problem["bottom"] <= table["top"]
    # It must not overlap the frame of the search either.
    search = boxes(browser, "#searchbar, #grp-changelist-search")[0]
    assert problem["top"] >= search["bottom"]


def test_an_outage_is_not_shown_as_no_locks(browser, troubled_site):
    visit(browser, troubled_site, LOCKS + "?alias=billing")
    assert "The number of held locks is not known." in text_of(browser)
    assert "0 held locks" not in text_of(browser)


@pytest.mark.parametrize("width", [1280, 390])
def test_release_is_visible_without_scrolling_sideways(browser, site, width):
    visit(browser, site, LOCKS, width)
    links = boxes(browser, ".field-release_link a")
    assert len(links) == 6
    assert all(link["left"] >= 0 and link["right"] <= width for link in links)
    hidden = browser.execute_script(
        "return [...document.querySelectorAll('.field-release_link a')].filter((link) => {"
        " link.scrollIntoView({block: 'center', inline: 'nearest', behavior: 'instant'});"
        " const box = link.getBoundingClientRect();"
        " const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];"
        " return document.elementFromPoint(x, y) !== link; }).length"
    )
    assert hidden == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_the_release_column_is_not_transparent(browser, site, width):
    visit(browser, site, LOCKS, width)
    wait_for(browser, "!document.getElementById('dlock-refresh').hidden")
    browser.execute_script("document.querySelector('.action-select').click()")
    # A sticky column needs a background of its own, also in ticked rows.
    see_through = browser.execute_script(
        "return [...document.querySelectorAll('td.field-release_link')].filter((cell) => {"
        " const style = getComputedStyle(cell);"
        " return style.position === 'sticky' && !/rgb\\(|oklab\\(|oklch\\(|color\\(srgb/"
        ".test(style.backgroundImage + style.backgroundColor); }).length"
    )
    assert see_through == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_a_name_wraps_between_its_words(browser, site, width):
    visit(browser, site, LOCKS, width)
    broken = browser.execute_script(
        "const lines = (node) => { const range = document.createRange(); "
        " range.selectNodeContents(node); return range.getClientRects().length; };"
        "return [...document.querySelectorAll('.field-lock_name a, .dlock-lines > div')]"
        ".flatMap((element) => [...element.childNodes])"
        ".filter((node) => node.nodeType === Node.TEXT_NODE && !node.data.includes('-'))"
        ".filter((node) => lines(node) > 1).map((node) => node.data)"
    )
    assert broken == []
    cut = browser.execute_script(
        "return [...document.querySelectorAll('td.field-holder')]"
        ".filter((cell) => cell.scrollHeight > cell.clientHeight + 1).length"
    )
    assert cut == 0


@pytest.mark.parametrize("name", ["record", "records", "forget", "event", "events"])
def test_times_have_seconds(browser, site, name):
    visit(browser, site, PAGES[name])
    times = boxes(browser, ".dlock-time")
    assert times
    # A date does not break at its hyphens.
    assert len({round(time["height"]) for time in times if time["height"]}) <= 1
    assert "p.m." not in text_of(browser)
    assert "a.m." not in text_of(browser)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_buttons_of_a_confirmation_look_like_buttons(browser, site, width):
    visit(browser, site, PAGES["release"], width)
    yes, no = boxes(browser, "form.card input[type=submit], form.card .cancel-link")
    assert yes["height"] == pytest.approx(no["height"], abs=1)
    assert yes["height"] > 30
    assert yes["right"] < no["left"] or yes["bottom"] < no["top"]
    assert max(yes["right"], no["right"]) <= width
    assert style(browser, "form.card input[type=submit]", "backgroundColor") != "rgba(0, 0, 0, 0)"
    assert style(browser, "form.card input[type=submit]", "textTransform") == "none"


def test_a_lock_is_released_from_its_own_page(browser, site):
    visit(browser, site, PAGES["lock"])
    (tool,) = boxes(browser, ".dlock-tool a[href*='/release/']")
    assert tool["height"] > 15
    browser.find_element("css selector", ".dlock-tool a[href*='/release/']").click()
    wait_for(browser, "document.querySelector('.dlock-confirmation')")
    assert "Release the lock “import:1207” of alias “default”?" in text_of(browser)


def test_all_locks_of_an_object_are_listed_before_they_are_released(browser, site):
    visit(browser, site, PAGES["object"])
    browser.execute_script("document.querySelector('.dlock-release-all').click()")
    wait_for(browser, "document.querySelector('.dlock-confirmation')")
    text = text_of(browser)
    assert "Release these 3 locks?" in text
    assert all(name in text for name in ("order:5519", "invoice:2281", "stock:7"))
    # A theme's footer may be in front of the link.
    browser.execute_script("document.querySelector('.cancel-link').click()")
    wait_for(browser, "document.querySelector('.dlock-panel')")


def test_the_small_form_keeps_the_other_filters(browser, site):
    visit(browser, site, LOCKS + "?kind=held&q=o")
    browser.execute_script(
        "const field = document.querySelector('[name=prefix]');"
        "field.value = 'rep'; field.form.requestSubmit()"
    )
    wait_for(browser, "location.search.includes('prefix=rep')")
    wait_for(browser, "document.readyState === 'complete'")
    search = browser.execute_script("return location.search")
    assert "kind=held" in search
    assert "q=o" in search
    assert "report:daily" in text_of(browser)
    assert "import:1207" not in text_of(browser)
