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
from tests.support.screen import complaints, restyle, show, text_of, wait_for
from tests.support.themed_site import THEMES

pytestmark = pytest.mark.timeout(180)

LOOKS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light")}
LOCKS, RECORDS, EVENTS, STATISTICS = (
    f"/admin/django_dlock/{model}/"
    for model in ("heldlock", "idempotencyrecord", "lockevent", "lockstatistics")
)
ODD = quote(quote_id("default/" + "<b>&\"'</b>/../שלום 👾 " + "long" * 50))
PAGES = {
    "held-locks": LOCKS,
    "release": LOCKS + "default_2Freport_3Adaily/release/",
    "why": LOCKS + "default_2Fimport_3A1207/change/",
    "why-chain": LOCKS + "default_2Freport_3Adaily/change/",
    "why-deadlock": LOCKS + "default_2Finvoice_3A2281/change/",
    "why-not-held": LOCKS + "default_2Forder_3A5482/change/",
    "why-odd-name": LOCKS + ODD + "/change/",
    "blocking": LOCKS + "blocking/",
    "records": RECORDS,
    "record": RECORDS + "2/change/",
    "record-failed": RECORDS + "5/change/",
    "record-interrupted": RECORDS + "7/change/",
    "forget": RECORDS + "4/forget/",
    "rerun": RECORDS + "2/rerun/",
    "rerun-interrupted": RECORDS + "7/rerun/",
    "why-interrupted": LOCKS + "default_2Fstock_3A7/change/",
    "follow-ups": "/admin/django_dlock/followup/",
    "follow-up": "/admin/django_dlock/followup/2/change/",
    "events": EVENTS,
    "event": EVENTS + "1/change/",
    "statistics": STATISTICS + "?range=day",
    "object": "/admin/shop/order/1/change/",
    "object-free": "/admin/shop/order/2/change/",
    "object-release": "/admin/shop/order/1/locks/release/",
}
ONE_OF_EACH = (
    "held-locks",
    "records",
    "record",
    "release",
    "why-deadlock",
    "blocking",
    "statistics",
    "object",
)
"""The pages to look at in a theme, whose templates are the same for all pages of a kind."""

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


@pytest.fixture(params=THEMES)
def theme(request):
    for app in THEMES[request.param]:
        if importlib.util.find_spec(app) is None:
            missing(f"django-{app} is not installed")
    return request.param


@pytest.fixture
def site(theme, site_of):
    return site_of(theme)


def visit(browser, url, look="light"):
    show(browser, *LOOKS[look])
    browser.get(url)


def looks_of(theme, name):
    """The styles in which to look at a page: all of Django's own, what can differ of a theme."""
    left_out = set()
    if theme == "grappelli":
        # It has no layout for phones.
        left_out.add("phone")
    if theme != "stock" and name != "held-locks":
        # Dark, only the list has colours of its own: those of its counts.
        left_out.add("dark")
    return [look for look in LOOKS if look not in left_out]


def look_at(browser, theme, url, name):
    """Show a page in each style, and check it; yields the style's width, for further checks."""
    folder = os.environ.get("DLOCK_PICTURES")
    # On a loaded page, the list would be older in each picture.
    reloads = theme != "stock" or folder
    complaints(browser)
    for look in looks_of(theme, name):
        width, colours = LOOKS[look]
        # A theme's scripts may choose colours and layout only while they load. Django's page
        # follows its style sheets.
        if look == "light" or reloads:
            show(browser, width, colours)
            browser.get(url)
        else:
            restyle(browser, width, colours)
        if folder and theme == "stock" and (name, look) in IN_THE_DOCUMENTATION:
            take_picture(browser, Path(folder, f"{name}-{look}.png"), name, look)
        # The page itself never scrolls sideways; a wide table scrolls inside its frame.
        scrolled = browser.execute_script("return document.documentElement.scrollWidth")
        assert scrolled <= width, look
        yield width
        assert complaints(browser) == [], look


def take_picture(browser, file, name, look):
    width, colours = LOOKS[look]
    height = browser.execute_script("return document.documentElement.scrollHeight")
    most = 800 if look == "phone" else MOST_SHOWN.get(name, 1200)
    show(browser, width, colours, min(height, most))
    picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    file.write_bytes(b64decode(picture["data"]))


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


# -- what else is checked on a page, in each of its styles --------------------------------------


def every_column_is_whole(browser, width):
    (table,) = boxes(browser, "#result_list")
    (frame,) = boxes(browser, ":has(> #result_list)")
    assert table["left"] >= frame["left"] - 1
    assert table["right"] <= frame["right"] + 1
    assert len(boxes(browser, ".field-release_link a")) == 6
    hidden = browser.execute_script(
        "return [...document.querySelectorAll('.field-release_link a')].filter((link) => {"
        " link.scrollIntoView({block: 'center', inline: 'nearest', behavior: 'instant'});"
        " const box = link.getBoundingClientRect();"
        " const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];"
        " return document.elementFromPoint(x, y) !== link; }).length"
    )
    assert hidden == 0


def nothing_runs_into_anything(browser, width):
    parts = browser.execute_script(
        "return [...document.querySelectorAll('#result_list tbody tr')].map((row) =>"
        " [...row.querySelectorAll('a, .dlock-badge, .dlock-label, .dlock-cell > div')]"
        " .filter((part) => part.offsetWidth && !part.querySelector('a, .dlock-badge'))"
        " .filter((part) => !part.parentElement.closest('.dlock-cell > div'))"
        " .map((part) => { const range = document.createRange(); range.selectNodeContents(part);"
        "  return [part.textContent, range.getBoundingClientRect().toJSON()]; }))"
    )
    assert len(parts) == 6
    for row in parts:
        for number, (one, a) in enumerate(row):
            for other, b in row[number + 1 :]:
                apart = (
                    a["right"] <= b["left"] + 0.5
                    or b["right"] <= a["left"] + 0.5
                    or a["bottom"] <= b["top"] + 4
                    or b["bottom"] <= a["top"] + 4
                )
                assert apart, (one, other, width)


def a_card_names_its_facts_in_django_itself(browser, width):
    is_card = browser.execute_script(
        "return getComputedStyle(document.querySelector('#result_list')).display === 'block'"
        " && !document.documentElement.hasAttribute('x-data')"
    )
    labels = boxes(browser, "tbody tr:first-child .dlock-label")
    assert len([label for label in labels if label["width"]]) == (3 if is_card else 0)
    if not is_card:
        return
    ages, names = boxes(browser, "td.field-age"), boxes(browser, ".field-lock_name")
    assert all(name["bottom"] <= age["top"] for name, age in zip(names, ages, strict=True))


def the_counts_are_seen_at_first_sight(browser, width):
    tiles, (table,) = boxes(browser, ".dlock-tile"), boxes(browser, "#result_list")
    assert len(tiles) == 5
    assert all(tile["left"] >= 0 and tile["right"] <= width for tile in tiles)
    assert all(tile["bottom"] <= table["top"] for tile in tiles)
    (search,) = boxes(browser, "#searchbar, #grp-changelist-search")
    assert all(tile["top"] >= search["bottom"] for tile in tiles)
    assert tiles[0]["top"] < 600


def a_name_wraps_between_its_words(browser, width):
    broken = browser.execute_script(
        "const lines = (node) => { const range = document.createRange(); "
        " range.selectNodeContents(node); return range.getClientRects().length; };"
        "const ours = '.field-lock_name a, .field-lock_name a *,"
        " .dlock-lines > div, .dlock-lines > div *';"
        "return [...document.querySelectorAll(ours)]"
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


def times_have_seconds(browser, width):
    times = boxes(browser, ".dlock-time")
    assert times
    # A date does not break at its hyphens.
    assert len({round(time["height"]) for time in times if time["height"]}) <= 1
    assert "p.m." not in text_of(browser)
    assert "a.m." not in text_of(browser)


def the_buttons_look_like_buttons(browser, width):
    yes, no = boxes(browser, "form.card input[type=submit], form.card .cancel-link")
    assert yes["height"] == pytest.approx(no["height"], abs=1)
    assert yes["height"] > 30
    assert yes["right"] < no["left"] or yes["bottom"] < no["top"]
    assert max(yes["right"], no["right"]) <= width
    assert style(browser, "form.card input[type=submit]", "backgroundColor") != "rgba(0, 0, 0, 0)"
    assert style(browser, "form.card input[type=submit]", "textTransform") == "none"


CHECKS = {
    "held-locks": (
        the_counts_are_seen_at_first_sight,
        every_column_is_whole,
        nothing_runs_into_anything,
        a_card_names_its_facts_in_django_itself,
        a_name_wraps_between_its_words,
    ),
    "release": (the_buttons_look_like_buttons,),
    **dict.fromkeys(("records", "record", "forget", "events", "event"), (times_have_seconds,)),
}


@pytest.mark.parametrize(
    ("theme", "name"),
    [
        pytest.param(theme, name, id=f"{theme}-{name}")
        for theme in THEMES
        for name in (PAGES if theme == "stock" else ONE_OF_EACH)
    ],
    indirect=["theme"],
)
def test_a_page_fits_obeys_the_policy_and_can_be_used(browser, site, name):
    for width in look_at(browser, site.theme, site.url + PAGES[name], name):
        for check in CHECKS.get(name, ()):
            check(browser, width)


@pytest.mark.usefixtures("outage")
def test_the_page_is_complete_if_an_alias_does_not_answer(browser, site):
    for _ in look_at(browser, site.theme, site.url + LOCKS, "outage"):
        assert "Alias “billing” did not answer" in text_of(browser)
        assert "invoice:2281" in text_of(browser)
        # The digits of "at least 6" are as large as those of an exact count.
        sizes = browser.execute_script(
            "return [...document.querySelectorAll('.dlock-tile')].map((tile) => tile.firstChild)"
            ".filter((count) => /\\d/.test(count.textContent)).map((count) =>"
            " [getComputedStyle(count).fontSize, count.querySelector('small') !== null])"
        )
        assert any(is_least for _size, is_least in sizes)
        assert len({size for size, _is_least in sizes}) == 1
        problem, table = boxes(browser, ".dlock-problem, #result_list")
        assert problem["bottom"] <= table["top"]
        # It must not overlap the frame of the search either.
        search = boxes(browser, "#searchbar, #grp-changelist-search")[0]
        assert problem["top"] >= search["bottom"]


@pytest.mark.usefixtures("off")
def test_what_switches_the_statistics_on_can_be_taken_with_one_click(browser, site):
    for _ in look_at(browser, site.theme, site.url + STATISTICS, "statistics-off"):
        # A click on what an earlier look has selected would begin to drag it.
        browser.execute_script("getSelection().removeAllRanges()")
        browser.find_element("css selector", ".dlock-setup pre").click()
        taken = browser.execute_script("return getSelection().toString()")
        assert taken.strip().startswith("DLOCK_METRICS = {")
        assert taken.strip().endswith("}")


@pytest.mark.usefixtures("outage")
def test_an_outage_is_not_shown_as_no_locks(browser, site):
    visit(browser, site.url + LOCKS + "?alias=billing")
    assert "The number of held locks is not known." in text_of(browser)
    assert "0 held locks" not in text_of(browser)


def test_a_lock_is_released_from_its_own_page(browser, site):
    visit(browser, site.url + PAGES["why"])
    (step,) = boxes(browser, ".dlock-steps a[href*='/release/']")
    assert step["height"] > 10
    browser.execute_script("document.querySelector('.dlock-steps a[href*=\"/release/\"]').click()")
    wait_for(browser, "document.querySelector('.dlock-confirmation')")
    assert "Release the lock “import:1207” of alias “default”?" in text_of(browser)


def test_all_locks_of_an_object_are_listed_before_they_are_released(browser, site):
    visit(browser, site.url + PAGES["object"])
    browser.execute_script("document.querySelector('.dlock-release-all').click()")
    wait_for(browser, "document.querySelector('.dlock-confirmation')")
    text = text_of(browser)
    assert "Release these 3 locks?" in text
    assert all(name in text for name in ("order:5519", "invoice:2281", "stock:7"))
    # A theme's footer may be in front of the link.
    browser.execute_script("document.querySelector('.cancel-link').click()")
    wait_for(browser, "document.querySelector('.dlock-panel')")


def test_the_small_form_keeps_the_other_filters(browser, site):
    visit(browser, site.url + LOCKS + "?kind=held&q=o")
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
