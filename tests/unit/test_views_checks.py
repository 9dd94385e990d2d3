"""System checks of guarded views: keys that a visitor chooses."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.http import HttpRequest, HttpResponse
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.decorators import api_view

from django_dlock import BodyField, idempotent_view, locked_view
from django_dlock.checks import check_views
from django_dlock.views import noted


@pytest.fixture(autouse=True)
def _no_other_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have decorated views that are no good examples."""
    monkeypatch.setattr(noted, "notes", {})
    monkeypatch.setattr("django_dlock.views.checks.notes", noted.notes)


def found(settings: Any, *patterns: Any) -> list[CheckMessage]:
    urls = ModuleType("urls")
    urls.urlpatterns = list(patterns)  # type: ignore[attr-defined]
    settings.ROOT_URLCONF = urls
    return check_views()


def ids(messages: list[CheckMessage]) -> list[str]:
    return [str(message.id).removeprefix("django_dlock.") for message in messages]


def view(request: HttpRequest, **_: Any) -> HttpResponse:
    return HttpResponse()


def of_two(request: HttpRequest, a: str, b: str) -> HttpResponse:
    return HttpResponse()


# -- W017: the whole name -------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "{slug}",
        "{slug}:report",
        "{request.GET[name]}",
        "{request.headers[X-Name]}",
        "{request.META[HTTP_X_NAME]}:x",
        "{request.path}",
        "{request._request.POST[name]}",
    ],
)
def test_w017_a_key_that_begins_with_what_a_visitor_chooses(key: str, settings: Any) -> None:
    locked_view(key)(view)
    (message,) = found(settings)
    assert message.id == "django_dlock.W017"
    assert f"The key of @locked_view on {__name__}.view: {key!r} begins with" in message.msg
    assert "a list of names" in (message.hint or "")


@pytest.mark.parametrize(
    "key",
    [
        "report:{slug}",
        "{request.user.pk}:report",
        "{request.META[REMOTE_USER]}",
        "report",
        ["slug"],
        lambda request, slug: slug,
    ],
)
def test_w017_other_keys_are_fine(key: Any, settings: Any) -> None:
    locked_view(key)(view)
    assert found(settings) == []


def on_method() -> Any:
    class Report(View):
        @method_decorator(locked_view("{slug}"))
        def get(self, request: HttpRequest, slug: str) -> HttpResponse:
            return HttpResponse()

    return Report.as_view()


def on_dispatch() -> Any:
    @method_decorator([locked_view("{slug}"), never_cache], name="dispatch")
    class Report(View):
        pass

    return Report.as_view()


def on_class() -> Any:
    @locked_view("{slug}")
    class Report(View):
        pass

    return Report.as_view()


def on_as_view() -> Any:
    class Report(View):
        pass

    return locked_view("{slug}")(Report.as_view())


def below_another() -> Any:
    @never_cache
    @locked_view("{slug}")
    def report(request: HttpRequest, slug: str) -> HttpResponse:
        return HttpResponse()

    return report


def below_api_view() -> Any:
    @api_view(["POST"])
    @locked_view("{slug}")
    def report(request: Any, slug: str) -> HttpResponse:
        return HttpResponse()

    return report


@pytest.mark.parametrize(
    "make", [on_method, on_dispatch, on_class, on_as_view, below_another, below_api_view]
)
def test_w017_names_the_view_however_it_is_decorated(
    make: Callable[[], Any], settings: Any
) -> None:
    (message,) = found(settings, path("<slug>/", make()))
    assert message.id == "django_dlock.W017"
    assert "report" in message.msg.lower()
    assert __name__ in message.msg


def test_w017_a_method_without_a_url_is_named_by_its_place(settings: Any) -> None:
    on_method()
    (message,) = found(settings)
    assert f"The key of @locked_view in {__name__}, line " in message.msg


# -- W018: whose keys -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "client",
    [
        "{request.headers[X-Account]}",
        "account:{request.META[HTTP_X_ACCOUNT]}",
        "{request.GET[account]}",
        "{account}",
        ["account"],
        ["request.headers[X-Account]"],
    ],
)
def test_w018_a_client_that_nobody_has_verified(client: Any, settings: Any) -> None:
    idempotent_view(client=client)(view)
    (message,) = found(settings)
    assert message.id == "django_dlock.W018"
    assert f"client of @idempotent_view on {__name__}.view is" in message.msg


@pytest.mark.parametrize(
    "client",
    [
        "{request.user.pk}",
        "{request.user.pk}:{request.headers[X-Device]}",
        "{request.META[REMOTE_USER]}",
        "all",
        ["request.user.pk", "account"],
        lambda request, **_: "it",
    ],
)
def test_w018_other_clients_are_fine(client: Any, settings: Any) -> None:
    idempotent_view(client=client)(view)
    idempotent_view(view)
    assert found(settings) == []


# -- W019: two values that may contain the text between them -------------------------------


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("cart:{a}:{b}", "<a>/<b>/"),
        ("cart:{a}:{b}", "<path:a>/<str:b>/"),
        ("cart:{a}-{b}", "<slug:a>/<slug:b>/"),
        ("cart:{a}/{b}", "<path:a>/<path:b>/"),
        ("cart:{a}:{request.GET[b]}", "<a>/<int:b>/"),
    ],
)
def test_w019_values_that_can_be_divided_in_several_ways(key: str, url: str, settings: Any) -> None:
    guarded = locked_view(key)(of_two)
    (message,) = found(settings, path("shop/", include([path(url, guarded)])))
    assert message.id == "django_dlock.W019"
    assert f"The key of @locked_view on {__name__}.of_two" in message.msg


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("cart:{a}:{b}", "<int:a>/<int:b>/"),
        ("cart:{a}:{b}", "<uuid:a>/<uuid:b>/"),
        ("cart:{a}:{b}", "<slug:a>/<slug:b>/"),
        ("cart:{a}:{b}", "<a>/<int:b>/"),
        ("cart:{a}/{b}", "<a>/<b>/"),
        ("cart:{a}:{request.user.pk}", "<a>/<b>/"),
        ("cart:{a}", "<a>/<b>/"),
        (["a", "b"], "<a>/<b>/"),
    ],
)
def test_w019_is_no_false_alarm(key: Any, url: str, settings: Any) -> None:
    assert found(settings, path(url, locked_view(key)(of_two))) == []
    assert found(settings, re_path(r"^(?P<a>\d+)/(?P<b>\d+)/$", locked_view(key)(of_two))) == []


def test_w019_the_prefix_of_an_include_has_converters_too(settings: Any) -> None:
    guarded = locked_view("cart:{a}:{b}")(of_two)
    assert ids(found(settings, path("<str:a>/", include([path("<b>/", guarded)])))) == ["W019"]


def cart(request: Any, a: str, b: str) -> HttpResponse:
    return HttpResponse()


def test_w019_names_a_view_below_api_view_once_whatever_its_urls(settings: Any) -> None:
    guarded = api_view(["POST"])(locked_view("cart:{a}:{b}")(cart))
    (message,) = found(settings, path("<a>/<b>/", guarded), path("v2/<a>/<b>/", guarded))
    assert f"on {__name__}.cart" in message.msg


# -- the check ------------------------------------------------------------------------------


def test_the_check_is_registered(settings: Any) -> None:
    locked_view("{slug}")(view)
    assert "W017" in ids(run_checks(tags=["urls"]))


@pytest.mark.parametrize("urls", ["no.such.module", None, ""])
def test_urls_that_cannot_be_imported_are_djangos_errors(urls: Any, settings: Any) -> None:
    settings.ROOT_URLCONF = urls
    assert check_views() == []


def test_decorating_in_each_request_does_not_fill_the_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(noted, "MOST", 20, raising=False)
    for number in range(100):
        locked_view(f"order:{number}")(view)
    assert len(noted.notes) == 20


# -- W021: a key that never changes ------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["{request.user.pk}", "order:{request.user.username}", ["request.user.pk"]]
)
def test_w021_a_key_that_is_the_same_in_all_requests_of_a_user(key: Any, settings: Any) -> None:
    idempotent_view(key=key)(view)
    (message,) = found(settings)
    assert message.id == "django_dlock.W021"
    assert f"key of @idempotent_view on {__name__}.view is {key!r}" in message.msg


@pytest.mark.parametrize(
    "key",
    ["{slug}", "{request.user.pk}:{slug}", ["slug"], lambda request, slug: slug, BodyField()],
)
def test_a_key_that_differs_is_no_problem(key: Any, settings: Any) -> None:
    """Nor is one that begins with what a visitor chooses: it belongs to its view and client."""
    idempotent_view(key=key)(view)
    assert found(settings) == []


def test_w019_two_values_of_a_key_that_can_be_divided_in_several_ways(settings: Any) -> None:
    guarded = idempotent_view(key="{a}:{b}")(of_two)
    (message,) = found(settings, path("<str:a>/<str:b>/", guarded))
    assert message.id == "django_dlock.W019"
    assert "can give the same key" in message.msg
