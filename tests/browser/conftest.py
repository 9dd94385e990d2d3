"""A headless Chromium, if the machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from django.test import Client

from django_dlock import locks
from tests.conftest import missing
from tests.support.screen import show
from tests.support.themed_site import ThemedSite

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


# Not for the session: the last page would be drawn again every second while other tests run.
@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One browser for the tests of this folder, with a separate profile."""
    try:
        from selenium import webdriver
    except ImportError:
        missing("selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        missing("no Chromium, or no chromedriver (Debian: chromium, chromium-driver)")
    profile: Path = tmp_path_factory.mktemp("chromium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    # A click returns before the next page is there: each search for an element waits for it.
    started.implicitly_wait(30)
    yield started
    started.quit()


@pytest.fixture(scope="package")
def site_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ThemedSite]]:
    """The site of a theme, which runs from its first use on; all have one database."""
    database = tmp_path_factory.mktemp("sites") / "db.sqlite3"
    with ExitStack() as running:
        yield cache(lambda theme: running.enter_context(ThemedSite(theme, database)))


@pytest.fixture
def outage(browser, site):
    """The test's site has another alias, which does not answer."""
    yield from _with_cookie(browser, site, "outage")


@pytest.fixture
def off(browser, site):
    """The test's site counts nothing for the lock statistics."""
    yield from _with_cookie(browser, site, "off")


def _with_cookie(browser, site, name):
    cookie = {"name": name, "url": site.url}
    browser.execute_cdp_cmd("Network.setCookie", {**cookie, "value": "now"})
    yield
    browser.execute_cdp_cmd("Network.deleteCookies", cookie)


@pytest.fixture
def posed_alias(settings):
    """The alias ``default`` has posed locks."""
    settings.DLOCKS = {"default": {"BACKEND": "tests.support.posed.PictureBackend"}}
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def page(browser, live_server, posed_alias):
    """The browser, logged in as an operator."""
    from django.contrib.auth.models import User

    # Without a password, whose hash would take longer than the rest.
    operator = User.objects.create_superuser("operator")
    client = Client()
    client.force_login(operator)
    show(browser, 1280)
    name = django_settings.SESSION_COOKIE_NAME
    browser.execute_cdp_cmd(
        "Network.setCookie",
        {"name": name, "value": client.cookies[name].value, "url": live_server.url},
    )
    browser.get_log("browser")
    yield browser
    # A list would go on asking while the tables are emptied.
    browser.get("about:blank")
    browser.execute_cdp_cmd("Network.clearBrowserCookies", {})
