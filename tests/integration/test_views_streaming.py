"""A streamed response holds the lock until it is closed, whichever thread sends it."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from rest_framework.views import APIView

from django_dlock import Lock, locked_view, locks, signals

# Closing a response checks the connections that earlier tests have opened.
pytestmark = [pytest.mark.urls(__name__), pytest.mark.django_db]

on_stream = locked_view("stream", using="local")


def held() -> bool:
    return Lock("stream", using="local").locked()


@pytest.fixture(autouse=True)
def _free_at_the_end() -> Iterator[None]:
    locks.reset()
    yield
    assert not held()


def chunks() -> Iterator[bytes]:
    for _ in range(3):
        yield b"held " if held() else b"free "


async def achunks() -> AsyncIterator[bytes]:
    for chunk in chunks():
        await asyncio.sleep(0)
        yield chunk


async def endless() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0)
        yield b"x"


class Watched(io.BytesIO):
    """A file that records whether the lock was held at its last read."""

    held_at: list[bool] = []

    def read(self, size: int | None = -1, /) -> bytes:
        self.held_at.append(held())
        return super().read(size)


@on_stream
def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(chunks())


@on_stream
def file(request: HttpRequest) -> FileResponse:
    return FileResponse(Watched(b"content"))


@on_stream
async def astream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(achunks())


@on_stream
async def astream_endless(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(endless())


@on_stream
def tagged(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(chunks(), headers={"ETag": '"tagged"'})


@on_stream
async def atagged(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(achunks(), headers={"ETag": '"atagged"'})


class Rest(APIView):
    authentication_classes = permission_classes = ()

    @method_decorator(on_stream)
    def get(self, request: Any) -> StreamingHttpResponse:
        return tagged.__wrapped__(request)  # type: ignore[attr-defined, no-any-return]


urlpatterns = [
    path("tagged/", tagged),
    path("atagged/", atagged),
    path("rest/", Rest.as_view()),
    path("stream/", stream),
    path("file/", file),
    path("astream/", astream),
    path("endless/", astream_endless),
]


def body(response: Any) -> bytes:
    return b"".join(response.streaming_content)


def test_a_stream_holds_the_lock_until_its_end_under_wsgi() -> None:
    response = Client().get("/stream/")
    assert held()
    assert Client().get("/stream/").status_code == 409
    assert body(response) == b"held held held "
    assert not held()


def test_a_file_holds_the_lock_until_its_end() -> None:
    Watched.held_at.clear()
    assert body(Client().get("/file/")) == b"content"
    assert Watched.held_at
    assert all(Watched.held_at)


def test_a_stream_that_is_closed_early_releases() -> None:
    response = stream(RequestFactory().get("/"))
    assert next(iter(response)) == b"held "
    response.close()
    assert not held()


@pytest.mark.parametrize("kind", ["stream", "astream"])
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
async def test_a_stream_holds_the_lock_until_its_end_under_asgi(kind: str) -> None:
    response: Any = await AsyncClient().get(f"/{kind}/")
    assert held()
    assert b"".join([chunk async for chunk in response]) == b"held held held "
    assert not held()


def test_a_stream_is_renewed_after_the_thread_that_acquired_has_ended() -> None:
    renewed = threading.Event()

    def told(sender: object, **_: Any) -> None:
        renewed.set()

    signals.renewed.connect(told)
    view = locked_view("stream", using="local", ttl=3)(
        lambda request: StreamingHttpResponse(chunks())
    )
    responses: list[StreamingHttpResponse] = []
    acquirer = threading.Thread(target=lambda: responses.append(view(RequestFactory().get("/"))))
    acquirer.start()
    acquirer.join()
    assert renewed.wait(20)
    assert body(responses[0]) == b"held held held "
    responses[0].close()


async def test_a_client_that_disconnects_causes_a_release() -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": "/endless/",
        "query_string": b"",
        "headers": [(b"host", b"testserver")],
    }
    server = ApplicationCommunicator(ASGIHandler(), scope)
    await server.send_input({"type": "http.request", "body": b""})
    assert (await server.receive_output(5))["status"] == 200
    assert (await server.receive_output(5))["body"] == b"x"
    assert held()
    await server.send_input({"type": "http.disconnect"})
    await server.wait(5)
    assert not held()


def test_the_lock_of_a_response_that_nobody_closes_is_not_renewed_forever() -> None:
    view = locked_view("stream", using="local", ttl=3)(
        lambda request: StreamingHttpResponse(chunks())
    )
    response = view(RequestFactory().get("/"))
    assert held()
    del response
    gc.collect()
    while held():
        threading.Event().wait(0.1)


def test_a_loss_after_the_response_began_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    response = stream(RequestFactory().get("/"))
    found = locks["local"].get("stream")
    assert found is not None
    locks["local"].break_("stream", owner=found.owner)
    response.close()
    assert "After a streamed response" in caplog.text


def fresh(kind: str) -> dict[str, str]:
    """Headers of a client that already has the response of this ``kind`` of view."""
    return {"If-None-Match": f'"{kind}"'}


class Failing:
    """A middleware that returns its own response instead of the view's."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        self.get_response(request)
        return HttpResponse("another")


@pytest.mark.parametrize("kind", ["tagged", "atagged"])
@pytest.mark.parametrize(
    "middleware", ["django.middleware.http.ConditionalGetMiddleware", f"{__name__}.Failing"]
)
def test_a_stream_that_a_middleware_replaces_releases(
    kind: str, middleware: str, settings: Any
) -> None:
    """Django never closes a response that it does not send, as with 304 (Not Modified)."""
    settings.MIDDLEWARE = [middleware]
    response = Client().get(f"/{kind}/", headers=fresh(kind))
    assert response.status_code in (200, 304)
    assert not response.streaming
    assert not held()


async def test_a_stream_that_a_middleware_replaces_releases_under_asgi(settings: Any) -> None:
    settings.MIDDLEWARE = ["django.middleware.http.ConditionalGetMiddleware"]
    response = await AsyncClient().get("/atagged/", headers=fresh("atagged"))
    assert response.status_code == 304
    assert not held()


def test_a_stream_of_a_rest_framework_view_that_is_replaced_releases(settings: Any) -> None:
    """Its request is not Django's own one, which the server closes."""
    settings.MIDDLEWARE = ["django.middleware.http.ConditionalGetMiddleware"]
    assert Client().get("/rest/", headers=fresh("tagged")).status_code == 304
    assert not held()
