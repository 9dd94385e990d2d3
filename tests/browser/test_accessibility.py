"""No page of ours has a fault that axe-core finds, in light and in dark.

``axe.min.js`` is looked for in ``node_modules``, where ``npm install axe-core`` puts it, and where
``AXE_CORE`` says.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser.test_looks import LOCKS, PAGES, visit
from tests.conftest import missing
from tests.support.screen import wait_for
from tests.support.themed_site import ThemedSite

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
OF_DJANGO = {
    # Links without underlines: Django's breadcrumbs, and its "Show all" beside the search.
    "link-in-text-block": ".breadcrumbs > a, #toolbar .small > a",
    # Django's label of the search is a picture; its alternative text is not counted.
    "label-title-only": "#searchbar",
    # Django's table of related objects has a first and a last column without a heading.
    "empty-table-header": ".inline-group thead th",
}
"""Rule → the elements that Django's own templates and style sheets make so."""

RUN = """
const [ofDjango, done] = arguments;
const isOurs = (rule, node) =>
    !(rule in ofDjango && document.querySelector(node.target[0]).matches(ofDjango[rule]));
axe.run(document).then(
    (found) => done(found.violations.flatMap((one) => one.nodes
        .filter((node) => isOurs(one.id, node))
        .map((node) => `${one.id}: ${node.target} ${node.html} ${node.failureSummary}`))),
    (error) => done([String(error)]));
"""


@pytest.fixture(scope="module")
def axe():
    """The source of axe-core."""
    folder = os.environ.get("AXE_CORE") or ROOT / "node_modules" / "axe-core"
    file = Path(folder, "axe.min.js")
    if not file.exists():
        missing(f"no {file} (npm install --no-save axe-core)")
    return file.read_text()


@pytest.fixture(scope="module")
def site():
    with ThemedSite("stock") as site:
        yield site


@pytest.fixture(scope="module")
def troubled_site():
    with ThemedSite("stock", outage=True) as site:
        yield site


def faults(browser, axe):
    browser.set_script_timeout(60)
    browser.execute_script(axe)
    return browser.execute_async_script(RUN, OF_DJANGO)


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_fault(browser, axe, site, name, colours):
    visit(browser, site, PAGES[name], 1280, colours)
    assert browser.execute_script("return document.querySelector('main, #content') !== null")
    assert faults(browser, axe) == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_list_has_no_fault_in_an_outage_with_filters_and_ticked_rows(
    browser, axe, troubled_site, colours
):
    visit(browser, troubled_site, LOCKS + "?prefix=i&older_than=0", 1280, colours)
    wait_for(browser, "!document.getElementById('dlock-refresh').hidden")
    browser.execute_script("document.querySelector('.action-select').click()")
    assert faults(browser, axe) == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_empty_list_has_no_fault_on_a_phone(browser, axe, site, colours):
    visit(browser, site, LOCKS + "?prefix=nothing", 390, colours)
    assert faults(browser, axe) == []
