"""No page of ours has a fault that axe-core finds, in light and in dark.

``axe.min.js`` is looked for in ``node_modules``, where ``npm install axe-core`` puts it, and where
``AXE_CORE`` says.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser.test_looks import LOCKS, PAGES
from tests.conftest import missing
from tests.support.screen import restyle, show, wait_for

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

OF_COLOURS = ["color-contrast", "link-in-text-block"]
"""The rules of which another scheme of colours can break one."""

RUN = """
const [ofDjango, rules, done] = arguments;
const isOurs = (rule, node) =>
    !(rule in ofDjango && document.querySelector(node.target[0]).matches(ofDjango[rule]));
axe.run(document, rules ? {runOnly: rules} : {}).then(
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


@pytest.fixture
def site(site_of):
    return site_of("stock")


def faults_in_both_colours(browser, axe, width=1280):
    """What is wrong with the open page in light; in dark, what is wrong with its colours."""
    browser.set_script_timeout(60)
    browser.execute_script(axe)
    found = browser.execute_async_script(RUN, OF_DJANGO, None)
    restyle(browser, width, "dark")
    return found + browser.execute_async_script(RUN, OF_DJANGO, OF_COLOURS)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_fault(browser, axe, site, name):
    show(browser, 1280)
    browser.get(site.url + PAGES[name])
    assert browser.execute_script("return document.querySelector('main, #content') !== null")
    assert faults_in_both_colours(browser, axe) == []


@pytest.mark.usefixtures("off")
def test_the_statistics_have_no_fault_while_they_are_off(browser, axe, site):
    show(browser, 390)
    browser.get(site.url + PAGES["statistics"])
    wait_for(browser, "document.querySelector('.dlock-setup')")
    assert faults_in_both_colours(browser, axe, 390) == []


@pytest.mark.usefixtures("outage")
def test_the_list_has_no_fault_in_an_outage_with_filters_and_ticked_rows(browser, axe, site):
    show(browser, 1280)
    browser.get(site.url + LOCKS + "?prefix=i&older_than=0")
    wait_for(browser, "!document.getElementById('dlock-refresh').hidden")
    browser.execute_script("document.querySelector('.action-select').click()")
    assert faults_in_both_colours(browser, axe) == []


def test_the_empty_list_has_no_fault_on_a_phone(browser, axe, site):
    show(browser, 390)
    browser.get(site.url + LOCKS + "?prefix=nothing")
    assert faults_in_both_colours(browser, axe, 390) == []
