"""A streamed response holds the lock until it is closed, whichever thread sends it."""

from __future__ import annotations

import asyncio
import gc
import io
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.views import APIView

from django_dlock import BackendUnavailable, Lock, locked_view, locks, signals
from testproject.servers import RedisServer
from tests.support.aliases import LONG, alias, configured
from tests.support.serving import serving

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


# -- a client that does not read -------------------------------------------------------------


@contextmanager
def lost_reasons() -> Iterator[tuple[threading.Event, list[str]]]:
    """Tells when a lock is lost, and why."""
    told, reasons = threading.Event(), list[str]()

    def receive(sender: object, reason: str, **_: Any) -> None:
        reasons.append(reason)
        told.set()

    signals.lost.connect(receive)
    try:
        yield told, reasons
    finally:
        signals.lost.disconnect(receive)


def large() -> Iterator[bytes]:
    for _ in range(256):
        yield b"x" * 65536


async def alarge() -> AsyncIterator[bytes]:
    for chunk in large():
        yield chunk


def answer_slowly(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(large())


async def aanswer_slowly(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(alarge())


short = locked_view("stream", using="local", stream_max_hold=0.1)


class ShortRest(APIView):
    authentication_classes = permission_classes = ()

    @method_decorator(short)
    def get(self, request: Any) -> StreamingHttpResponse:
        return answer_slowly(request)


@short
class ShortClass(View):
    def get(self, request: HttpRequest) -> StreamingHttpResponse:
        return answer_slowly(request)


SHORT: dict[str, Any] = {
    "sync": short(answer_slowly),
    "async": short(aanswer_slowly),
    "class": ShortClass.as_view(),
    "rest": ShortRest.as_view(),
}
urlpatterns += [path(f"short/{kind}/", view) for kind, view in SHORT.items()]


@pytest.mark.parametrize("kind", ["sync", "class", "rest"])
def test_g6_a_client_that_does_not_read_loses_the_lock_and_gets_its_answer(
    kind: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.MIDDLEWARE = []
    with (
        serving() as address,
        lost_reasons() as (lost, reasons),
        socket.create_connection(address, timeout=30) as client,
    ):
        client.sendall(f"GET /short/{kind}/ HTTP/1.0\r\nHost: testserver\r\n\r\n".encode())
        assert client.recv(1)
        # The answer is larger than what the system keeps for a client that does not read.
        assert lost.wait(10)
        with Lock("stream", using="local", wait=10):
            pass
        size = sum(map(len, iter(lambda: client.recv(65536), b"")))
    assert reasons == ["max_hold"]
    assert size > 256 * 65536
    assert "max_hold" in caplog.text


async def test_g6_a_client_that_does_not_read_loses_the_lock_under_asgi() -> None:
    with lost_reasons() as (lost, reasons):
        response: Any = await AsyncClient().get("/short/async/")
        assert await asyncio.to_thread(lost.wait, 10)
        async with Lock("stream", using="local", wait=10):
            pass
        assert sum([len(chunk) async for chunk in response]) == 256 * 65536
    assert reasons == ["max_hold"]


@pytest.mark.parametrize("entry", [{}, {"STREAM_MAX_HOLD": 0.1}], ids=["default", "set"])
def test_the_alias_limits_the_hold_of_a_stream(entry: dict[str, float]) -> None:
    """By default five minutes, whatever the alias's MAX_HOLD."""
    local = {"BACKEND": "django_dlock.backends.local.LocalBackend", "TTL": 600.0, **entry}
    with configured({"default": local}):
        response = locked_view("stream")(answer_slowly)(RequestFactory().get("/"))
        limit = entry.get("STREAM_MAX_HOLD", 300.0)
        found = locks["default"].get("stream")
        assert found is None or limit - 30 < (found.ttl or 0.0) <= limit
        response.close()


def test_the_lease_of_a_stream_is_cut_on_a_server(own_redis: RedisServer) -> None:
    with configured({"default": alias(own_redis.url, TTL=LONG)}):
        view = locked_view("stream", stream_max_hold=20)(answer_slowly)
        response = view(RequestFactory().get("/"))
        found = locks["default"].get("stream")
        assert found is not None
        assert 0 < (found.ttl or 0.0) <= 20.1
        response.close()


def test_the_work_of_the_view_itself_is_not_limited() -> None:
    def view(request: HttpRequest) -> StreamingHttpResponse:
        found = locks["local"].get("stream")
        assert found is not None
        assert (found.ttl or 0.0) > 1
        return StreamingHttpResponse(chunks())

    response = short(view)(RequestFactory().get("/"))
    found = locks["local"].get("stream")
    assert found is None or (found.ttl or 0.0) <= 0.1
    response.close()


def test_a_stream_whose_lock_cannot_be_cut_is_sent_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def renew(*args: Any, **kwargs: Any) -> Any:
        raise BackendUnavailable("No answer", "stream", "local")

    monkeypatch.setattr(locks["local"], "renew", renew)
    response = short(lambda request: StreamingHttpResponse(chunks()))(RequestFactory().get("/"))
    assert response.status_code == 200
    response.close()
    assert "It ends in the store with its TTL" in caplog.text


def test_a_lock_that_another_holder_has_entered_is_not_cut() -> None:
    options = {"using": "local", "reentrant": True}
    with Lock("stream", ttl=30, **options) as outer:  # type: ignore[arg-type]
        view = locked_view("stream", stream_max_hold=0.1, **options)(  # type: ignore[arg-type]
            lambda request: StreamingHttpResponse(chunks())
        )
        response = view(RequestFactory().get("/"))
        assert outer.remaining > 10
        response.close()


@pytest.mark.parametrize("wrong", [0, -1, None, "5"])
def test_a_wrong_limit_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="stream_max_hold"):
        locked_view("stream", stream_max_hold=wrong)
