"""Helpers for pages in a browser."""

from __future__ import annotations

import time

REFRESH_OFTEN = (
    "document.getElementById('dlock-refresh').dataset.seconds = '0.1';"
    "document.dispatchEvent(new Event('visibilitychange'));"
)
"""JavaScript: refresh the list now, as when its tab comes back, and then every 0.1 seconds."""


def show(browser, width, colours="light", height=600):
    """Lay the page out for a screen of this width, in these colours."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": colours}]},
    )


def restyle(browser, width, colours):
    """``show`` for an open page: wait until it has changed, which colours do in steps."""
    show(browser, width, colours)
    wait_for(browser, f"matchMedia('(width: {width}px)').matches")
    wait_for(browser, f"matchMedia('(prefers-color-scheme: {colours})').matches")
    wait_for(browser, "!document.getAnimations().some((one) => one instanceof CSSTransition)")


def wait_for(page, condition, timeout=30.0):
    """Wait until a JavaScript expression is true in the page."""
    ends = time.monotonic() + timeout
    while not page.execute_script(f"return {condition}"):
        assert time.monotonic() < ends, f"never true: {condition}"
        time.sleep(0.05)


def text_of(page):
    return page.execute_script("return document.body.innerText")


def complaints(page):
    """What the browser refused, such as an inline script under the strict policy."""
    # A theme's scripts may also log that they were loaded.
    entries = (entry for entry in page.get_log("browser") if entry["level"] != "INFO")
    messages = [entry["message"] for entry in entries]
    return [message for message in messages if "/favicon.ico" not in message]
