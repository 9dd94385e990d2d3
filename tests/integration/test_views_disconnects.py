"""A client that goes away: the work of an asynchronous view goes on, under its lock, to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_dlock import idempotent_view, locked_view, locks
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = [pytest.mark.urls(__name__), pytest.mark.django_db(transaction=True)]

LONG = 20
"""Seconds after which a test fails, where an event did not come."""


class Stage:
    """What the views of one test do, and when."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def work(self) -> HttpResponse:
        """On a thread: it can be cancelled by nobody."""
        self.begun.set()
        assert self.goes_on.wait(LONG)
        Effect.objects.create(order_number=1, by="view")
        self.log.append("held" if locks["default"].list() else "free")
        return HttpResponse("paid")


stage = Stage()


@pytest.fixture(autouse=True)
def fresh(settings: Any) -> Iterator[None]:
    settings.MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware"]
    stage.__init__()  # type: ignore[misc]
    with local_locks():
        yield
        assert locks["default"].list() == []


async def work(request: HttpRequest) -> HttpResponse:
    response: HttpResponse = await sync_to_async(stage.work)()
    stage.log.append("answered")
    return response


class Pay(View):
    @method_decorator(locked_view("pay"))
    async def post(self, request: HttpRequest) -> HttpResponse:
        return await work(request)


@locked_view("pay")
class PayAll(View):
    async def post(self, request: HttpRequest) -> HttpResponse:
        return await work(request)


@locked_view("pay")
async def stream(request: HttpRequest) -> StreamingHttpResponse:
    await sync_to_async(stage.work)()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0)

    return StreamingHttpResponse(endless())


@locked_view("pay")
async def failing(request: HttpRequest) -> HttpResponse:
    await sync_to_async(stage.work)()
    raise LookupError("card reader")


anyone = idempotent_view(client=lambda request: "shop")
urlpatterns = [
    path("locked/", locked_view("pay")(work)),
    path("method/", Pay.as_view()),
    path("class/", PayAll.as_view()),
    path("idempotent/", anyone(work)),
    path("both/", locked_view("pay")(anyone(work))),
    path("stream/", stream),
    path("failing/", failing),
    path("cancel/", locked_view("pay", on_disconnect="cancel")(work)),
]


def connect(url: str) -> ApplicationCommunicator:
    headers = [
        (b"host", b"testserver"),
        (b"idempotency-key", b"k1"),
        (b"accept", b"application/json"),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": url,
        "query_string": b"",
        "headers": headers,
    }
    return ApplicationCommunicator(ASGIHandler(), scope)


async def begin(url: str) -> ApplicationCommunicator:
    """A request whose view is at work."""
    server = connect(url)
    await server.send_input({"type": "http.request", "body": b""})
    assert await asyncio.to_thread(stage.begun.wait, LONG)
    return server


async def leave(server: ApplicationCommunicator) -> None:
    """The client disconnects, and Django has noticed it."""
    await server.send_input({"type": "http.disconnect"})
    for _ in range(20):
        await asyncio.sleep(0)


async def answer(url: str) -> tuple[int, bytes]:
    server = connect(url)
    await server.send_input({"type": "http.request", "body": b""})
    start, body = await server.receive_output(LONG), await server.receive_output(LONG)
    await server.wait(LONG)
    return start["status"], body["body"]


KINDS = ["locked", "method", "class", "idempotent", "both"]


@pytest.mark.parametrize("kind", KINDS)
async def test_g1_a_view_whose_client_goes_away_keeps_its_lock_to_the_end(kind: str) -> None:
    first = await begin(f"/{kind}/")
    await leave(first)
    status, _ = await answer(f"/{kind}/")
    assert status == 409
    stage.goes_on.set()
    await first.wait(LONG)
    assert stage.log == ["held", "answered"]


@pytest.mark.parametrize("kind", ["idempotent", "both"])
async def test_g12_a_client_that_goes_away_and_repeats_gets_the_answer_of_one_run(
    kind: str,
) -> None:
    first = await begin(f"/{kind}/")
    await leave(first)
    stage.goes_on.set()
    await first.wait(LONG)
    assert await answer(f"/{kind}/") == (200, b"paid")
    assert await Effect.objects.acount() == 1
    assert stage.log == ["held", "answered"]
