"""Messages of ``django.contrib.messages`` beside a stored answer: whose are repeated, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.test import Client
from django.urls import path
from django.utils.translation import gettext_lazy

from django_dlock import BodyField, idempotent_view
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = [pytest.mark.urls(__name__), pytest.mark.django_db(transaction=True)]

STORAGES = ["cookie.CookieStorage", "session.SessionStorage", "fallback.FallbackStorage"]


@pytest.fixture(autouse=True, params=STORAGES)
def storage(request: pytest.FixtureRequest, settings: Any) -> Iterator[str]:
    settings.MESSAGE_STORAGE = f"django.contrib.messages.storage.{request.param}"
    with local_locks():
        yield request.param


def of_team(request: HttpRequest) -> str:
    """Colleagues share their keys."""
    return "team"


@idempotent_view(key=BodyField(), client=of_team)
def pay(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(order_number=1, by="view")
    messages.success(request, gettext_lazy("Paid."), extra_tags=gettext_lazy("done"))
    return redirect("/shown/")


def greet(request: HttpRequest) -> HttpResponse:
    messages.info(request, gettext_lazy("Hello %s.") % request.user)
    return HttpResponse()


def warn(get_response: Any) -> Any:
    """A middleware that adds a message to each request that pays."""

    def middleware(request: HttpRequest) -> HttpResponse:
        if request.path == "/pay/":
            messages.warning(request, gettext_lazy("Old browser."))
        return get_response(request)

    return middleware


def shown(request: HttpRequest) -> HttpResponse:
    return HttpResponse(" ".join(str(message) for message in messages.get_messages(request)))


urlpatterns = [path("pay/", pay), path("greet/", greet), path("shown/", shown)]


def customer(name: str) -> Client:
    client = Client()
    client.force_login(User.objects.create_user(name))
    return client


def test_a_lazily_translated_message_is_shown() -> None:
    client = customer("ada")
    for _ in range(2):
        assert client.post("/pay/", {"idempotency_key": "t"}).status_code == 302
    assert client.get("/shown/").text == "Paid."
    assert Effect.objects.count() == 1


def test_so_is_one_that_a_middleware_has_added_before(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.warn"]
    client = customer("ada")
    for _ in range(2):
        assert client.post("/pay/", {"idempotency_key": "t"}).status_code == 302
    assert set(client.get("/shown/").text.split(". ")) >= {"Old browser"}


def test_messages_of_earlier_pages_are_not_repeated_to_others(storage: str) -> None:
    """They wait for the next page of the one user whom they are for."""
    ada, bob = customer("ada"), customer("bob")
    ada.get("/greet/")
    for client in (ada, bob):
        assert client.post("/pay/", {"idempotency_key": "t"}).status_code == 302
    assert ada.get("/shown/").text == "Hello ada. Paid."
    assert "ada" not in bob.get("/shown/").text
