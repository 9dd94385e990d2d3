"""A form of ``idempotent_view`` in a real browser: a double click, and the pages of refusals.

With ``DLOCK_PICTURES`` set to a folder, pictures of the pages are written to it.
"""

from __future__ import annotations

import json
import os
import threading
from base64 import b64decode
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from django.conf import settings as django_settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.shortcuts import redirect
from django.template import RequestContext, Template
from django.test import Client
from django.urls import path
from django.views.decorators.cache import never_cache

from django_dlock import BodyField, idempotent_view
from django_dlock.testing import local_locks
from django_dlock.views import refusals
from testproject.shop.models import Effect
from tests.browser.test_accessibility import axe, faults_in_both_colours  # noqa: F401
from tests.browser.test_looks import boxes
from tests.support.screen import complaints, restyle, show, text_of, wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.django_db(transaction=True)]

FORM = """<!DOCTYPE html><html lang="en"><title>Pay</title>
{% load dlock %}{% for message in messages %}<p>{{ message }}</p>{% endfor %}
<form method="post" action="/pay/">{% csrf_token %}{% idempotency_key %}
<input name="amount" value="5" aria-label="Amount">{{ error }}<button>Pay</button></form></html>"""


class Clicks:
    """What the server has received."""

    def __init__(self):
        self.lock, self.count = threading.Lock(), 0
        self.first, self.second = threading.Event(), threading.Event()

    def add(self):
        with self.lock:
            self.count += 1
            (self.first if self.count == 1 else self.second).set()


clicks = Clicks()


def counted(view):
    """Outermost, so that a click counts before it waits."""

    def respond(request):
        if request.method == "POST":
            clicks.add()
        return view(request)

    return respond


def shown(request, error=""):
    return HttpResponse(Template(FORM).render(RequestContext(request, {"error": error})))


@counted
@idempotent_view(key=BodyField(), if_contended="wait", wait=30, done_if="redirect")
def pay(request):
    if request.method != "POST":
        return shown(request)
    if not request.POST["amount"].isdecimal():
        return shown(request, "Not a number")
    assert clicks.second.wait(30)
    Effect.objects.create(order_number=int(request.POST["amount"]), by="form")
    messages.success(request, "Your order is paid.")
    return redirect("/thanks/")


def thanks(request):
    return shown(request)


def refused(request):
    make, *args = PAGES[request.GET["page"]]
    return make(request, *args)


PAGES = {
    "in-progress": (refusals.in_progress, None),
    "contended": (refusals.contended, 409, None),
    "other-request": (refusals.other_request,),
    "answer-is-gone": (refusals.answer_is_gone,),
    "without-key": (
        refusals.without_key,
        "This request needs the field idempotency_key with 1 to 200 visible characters.",
    ),
    "unavailable": (refusals.unavailable,),
}

urlpatterns = [
    path("pay/", pay),
    path("pay/again/", never_cache(pay)),
    path("thanks/", thanks),
    path("refused/", refused),
]


@pytest.fixture
def customer(browser, live_server, settings):
    """The browser, logged in as a customer of a site with the form."""
    settings.ROOT_URLCONF = __name__
    clicks.__init__()
    client = Client()
    client.force_login(User.objects.create_user("ada"))
    show(browser, 1280)
    name = django_settings.SESSION_COOKIE_NAME
    browser.execute_cdp_cmd(
        "Network.setCookie",
        {"name": name, "value": client.cookies[name].value, "url": live_server.url},
    )
    complaints(browser)
    with local_locks():
        yield browser
        browser.get("about:blank")
    browser.execute_cdp_cmd("Network.clearBrowserCookies", {})


def test_g12_a_double_click_pays_once_and_shows_the_success_page(customer, live_server):
    customer.get(f"{live_server.url}/pay/")
    (button,) = boxes(customer, "button")
    with closing(Mouse(customer)) as mouse:
        mouse.press(button, clicks=1)
        # Faster, the browser would not even send the first request.
        assert clicks.first.wait(30)
        mouse.press(button, clicks=2)
        assert clicks.second.wait(30)
    wait_for(customer, "location.pathname === '/thanks/' && document.readyState === 'complete'")
    assert clicks.count == 2
    assert Effect.objects.count() == 1
    # The first answer had the message in a cookie, and the browser has dropped that answer.
    assert "Your order is paid." in text_of(customer)


class Mouse:
    """Clicks beside WebDriver, which would wait for the page that follows the first click."""

    def __init__(self, page):
        # A part of selenium.
        from websocket import create_connection

        address = page.capabilities["goog:chromeOptions"]["debuggerAddress"]
        with urlopen(f"http://{address}/json") as answer:
            tabs = json.load(answer)
        (tab,) = [tab for tab in tabs if tab["url"] == page.current_url]
        self.socket = create_connection(tab["webSocketDebuggerUrl"], suppress_origin=True)

    def press(self, box, clicks):
        place = {"x": box["left"] + box["width"] / 2, "y": box["top"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "button": "left", "clickCount": clicks, **place}
            order = {"id": clicks, "method": "Input.dispatchMouseEvent", "params": event}
            self.socket.send(json.dumps(order))

    def close(self):
        self.socket.close()


def test_a_form_with_errors_is_corrected_and_sent_also_after_back(customer, live_server):
    clicks.second.set()
    customer.get(f"{live_server.url}/pay/")
    send(customer, "five")
    wait_for(customer, "document.body.innerText.includes('Not a number')")
    customer.back()
    wait_for(customer, "!document.body.innerText.includes('Not a number')")
    send(customer, "7")
    wait_for(customer, "location.pathname === '/thanks/'")
    assert list(Effect.objects.values_list("order_number", flat=True)) == [7]


def test_the_form_of_a_page_that_is_never_cached_has_a_new_token_after_back(customer, live_server):
    clicks.second.set()
    customer.get(f"{live_server.url}/pay/again/")
    for amount in ("7", "8"):
        send(customer, amount)
        wait_for(customer, "location.pathname === '/thanks/'")
        customer.back()
        wait_for(customer, "location.pathname === '/pay/again/'")
    assert sorted(Effect.objects.values_list("order_number", flat=True)) == [7, 8]


def send(page, amount):
    page.execute_script(
        "const field = document.querySelector('[name=amount]');"
        "field.value = arguments[0]; field.form.requestSubmit()",
        amount,
    )


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_refusal_fits_and_has_no_fault(customer, live_server, axe, name):  # noqa: F811
    customer.get(f"{live_server.url}/refused/?page={name}")
    for width, colours in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        restyle(customer, width, colours)
        scrolled = customer.execute_script("return document.documentElement.scrollWidth")
        assert scrolled <= width
        if folder := os.environ.get("DLOCK_PICTURES"):
            picture = customer.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            file = Path(folder, f"refused-{name}-{width}-{colours}.png")
            file.write_bytes(b64decode(picture["data"]))
    # The style sheet was loaded, under the strict policy.
    card = "getComputedStyle(document.querySelector('main')).borderRadius"
    assert customer.execute_script(f"return {card}") != "0px"
    restyle(customer, 1280, "light")
    assert faults_in_both_colours(customer, axe) == []
    # The status of the page itself is in the log, too.
    assert [it for it in complaints(customer) if "/refused/?page=" not in it] == []
