"""Asynchronous views: what runs on a thread, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.asyncio import async_unsafe
from django.utils.functional import SimpleLazyObject

from django_dlock import Lock, locked_view
from django_dlock.views import locked_async
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured


@pytest.fixture(autouse=True)
def dlocks(own_redis: RedisServer) -> Iterator[None]:
    with configured({"default": alias(own_redis.url, TTL=30, OPTIONS={"command_timeout": 5.0})}):
        yield


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that run on a thread."""
    seen: list[str] = []
    hop = locked_async.sync_to_async

    def count(function: Callable[..., Any]) -> Any:
        seen.append(getattr(function, "func", function).__name__)
        return hop(function)

    monkeypatch.setattr(locked_async, "sync_to_async", count)
    return seen


async def view(request: HttpRequest, number: int = 1) -> HttpResponse:
    return HttpResponse("done")


@pytest.mark.parametrize(
    ("key", "name", "hop"),
    [
        ("it:{number}", "it:1", []),
        ("it:{request.path}", "it:/here/", []),
        ("it:{request.method}:{request.GET[q]}", "it:GET:x", []),
        ("it:{request.user.pk}", "it:5", ["lock"]),
        (lambda request, number=1: f"it:{number}", "it:1", ["lock"]),
    ],
)
async def test_a_key_is_computed_on_a_thread_only_if_it_may_query_the_database(
    hops: list[str], key: Any, name: str, hop: list[str]
) -> None:
    guarded = locked_view(key)(view)
    request = AsyncRequestFactory().get("/here/?q=x", headers={"accept": "application/json"})
    request.user = User(pk=5)
    assert (await guarded(request)).status_code == 200
    async with Lock(name):
        assert (await guarded(request)).status_code == 409
    assert hops == 2 * hop


async def test_the_page_of_a_refusal_is_rendered_on_a_thread(hops: list[str]) -> None:
    async with Lock("it"):
        refused = await locked_view("it")(view)(RequestFactory().get("/"))
    assert refused.status_code == 409
    assert b"html" in refused.content
    assert hops == ["without_lock"]


async def test_a_refusal_for_lack_of_a_value_is_made_on_a_thread(
    hops: list[str], settings: Any, tmp_path: Path
) -> None:
    page = tmp_path / "django_dlock" / "refused.html"
    page.parent.mkdir()
    page.write_text("{{ request.who.pk }} {{ problem.detail }}")
    options = {"context_processors": ["django.template.context_processors.request"]}
    engine = {"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": options}
    settings.TEMPLATES = [{**engine, "DIRS": [tmp_path]}]

    @async_unsafe
    def load() -> User:
        return User(pk=5)

    guarded = locked_view("it:{request.GET[q]}")(view)
    request = AsyncRequestFactory().get("/here/")
    request.who = SimpleLazyObject(load)
    refused = await guarded(request)
    assert refused.status_code == 400
    assert refused.content.startswith(b"5 This request lacks")
    assert hops == ["key_failed"]
