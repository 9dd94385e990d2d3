"""A request's body is read before the lock is taken, so that a slow client holds nothing."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.exceptions import RequestDataTooBig
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http import HttpRequest, HttpResponse
from django.http.request import UnreadablePostError
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.views import APIView

from django_dlock import Lock, idempotent_view, locked_view, locks
from django_dlock.testing import local_locks
from tests.support.serving import serving

pytestmark = [pytest.mark.urls(__name__), pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


def held() -> bool:
    return bool(locks["default"].list())


class Body(io.BytesIO):
    """What a server reads from a client; records whether a lock is held at each read."""

    def __init__(self, content: bytes, error: Exception | None = None) -> None:
        super().__init__(content)
        self.held_at: list[bool] = []
        self.error = error

    def read(self, size: int | None = -1, /) -> bytes:
        self.held_at.append(held())
        if self.error is not None:
            raise self.error
        return super().read(size)


def post(body: Body, content_type: str = "application/json", **meta: Any) -> HttpRequest:
    request = RequestFactory().post(
        "/", content_type=content_type, headers={"idempotency-key": "k1"}
    )
    length = len(body.getvalue())
    request.environ.update(  # type: ignore[attr-defined]
        {"wsgi.input": body, "CONTENT_LENGTH": str(length), **meta}
    )
    # Django makes the request with the environment of the server.
    again: HttpRequest = type(request)(request.environ)  # type: ignore[attr-defined, call-arg]
    again.user = User(pk=1)
    return again


def show(request: Any) -> HttpResponse:
    """Answers what a view can read, and whether a lock is held."""
    return HttpResponse(b"%s:%d" % (getattr(request, "_request", request).body, held()))


def plain(decorate: Any, view: Any = show) -> Any:
    return decorate(view)


def as_async(decorate: Any, view: Any = show) -> Any:
    async def aview(request: HttpRequest) -> HttpResponse:
        response: HttpResponse = await sync_to_async(view)(request)
        return response

    guarded = decorate(aview)
    return lambda request: asyncio.run(guarded(request))


def as_class(decorate: Any, view: Any = show) -> Any:
    class Show(View):
        def post(self, request: HttpRequest) -> HttpResponse:
            response: HttpResponse = view(request)
            return response

    return decorate(Show).as_view()


def as_rest(decorate: Any, view: Any = show) -> Any:
    class Show(APIView):
        authentication_classes = permission_classes = ()

        @method_decorator(decorate)
        def post(self, request: Any) -> HttpResponse:
            response: HttpResponse = view(request)
            return response

    return Show.as_view()


KINDS = {"sync": plain, "async": as_async, "class": as_class, "REST framework": as_rest}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
DECORATORS = {"locked": locked_view("it"), "idempotent": idempotent_view(client="all")}
each_decorator = pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS)


@each_decorator
@each_kind
def test_g6_the_body_is_read_before_the_lock_is_taken(make: Any, decorate: Any) -> None:
    body = Body(b'{"amount": 5}')
    assert make(decorate)(post(body)).content == b'{"amount": 5}:1'
    assert body.held_at
    assert not any(body.held_at)


@each_decorator
@each_kind
def test_g6_a_client_that_breaks_off_holds_nothing(make: Any, decorate: Any) -> None:
    body = Body(b"{}", OSError("gone"))
    with pytest.raises(UnreadablePostError):
        make(decorate)(post(body))
    assert not any(body.held_at)
    assert not held()


@each_kind
def test_g6_a_body_that_is_too_large_holds_nothing(make: Any) -> None:
    body = Body(b"x" * 101)
    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=100), pytest.raises(RequestDataTooBig):
        make(idempotent_view(client="all"))(post(body))
    assert not any(body.held_at)
    assert not held()


def test_the_answer_to_a_body_that_is_too_large_is_djangos(settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE, settings.MIDDLEWARE = 100, []
    headers = {"idempotency-key": "k1"}
    answer = Client().post(
        "/idempotent/", b"x" * 101, content_type="application/json", headers=headers
    )
    # 413 in newer versions.
    assert answer.status_code in (400, 413)
    assert not held()


@pytest.mark.parametrize(
    ("content_type", "size"),
    [("multipart/form-data; boundary=it", 90), ("application/octet-stream", 101)],
)
def test_a_locked_view_reads_uploads_itself(content_type: str, size: int) -> None:
    """Its upload handlers can be set only before; and a large body is read as a stream."""
    body = Body(b"x" * size)

    def view(request: HttpRequest) -> HttpResponse:
        assert not body.held_at
        request.upload_handlers = [MemoryFileUploadHandler(request)]
        return HttpResponse(str(len(request.read())))

    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=100):
        answer = locked_view("it")(view)(post(body, content_type))
    assert answer.content == str(size).encode()


def test_without_a_limit_of_the_project_a_large_body_is_read_by_the_view() -> None:
    body = Body(b"x" * 3_000_000)

    def view(request: HttpRequest) -> HttpResponse:
        assert not body.held_at
        return HttpResponse(str(len(request.body)))

    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=None):
        assert locked_view("it")(view)(post(body)).content == b"3000000"


def test_a_body_that_was_read_as_a_stream_before_is_not_read_again() -> None:
    request = post(Body(b"{}"))
    request.read()
    assert locked_view("it")(lambda request: HttpResponse("locked"))(request).content == b"locked"


def test_the_body_of_a_request_that_needs_no_lock_is_the_views() -> None:
    body = Body(b"{}")

    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(str(bool(body.held_at)))

    assert locked_view("it", methods=["PUT"])(view)(post(body)).content == b"False"


def test_a_view_below_may_still_read_the_body_as_a_stream() -> None:
    view = locked_view("it")(lambda request: HttpResponse(request.read(3)))
    assert view(post(Body(b"abcdef"))).content == b"abc"


def test_a_file_reaches_a_locked_view() -> None:
    request = RequestFactory().post("/", {"file": SimpleUploadedFile("a.txt", b"content")})
    view = locked_view("it")(lambda request: HttpResponse(request.FILES["file"].read()))
    assert view(request).content == b"content"


# -- with a socket -------------------------------------------------------------------------


urlpatterns = [
    path("locked/", locked_view("slow")(show)),
    path("idempotent/", idempotent_view(client="all")(show)),
]


@pytest.mark.parametrize("kind", ["locked", "idempotent"])
def test_g6_a_client_that_sends_a_byte_at_a_time_holds_nothing(kind: str, settings: Any) -> None:
    settings.MIDDLEWARE = []
    reading = threading.Event()
    body = b'{"a": 1}'
    head = (
        f"POST /{kind}/ HTTP/1.0\r\nHost: testserver\r\nIdempotency-Key: k1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with serving(reading) as address, socket.create_connection(address, timeout=30) as client:
        client.sendall(head.encode())
        for byte in body[:-1]:
            client.sendall(bytes([byte]))
            assert reading.wait(10)
            assert not held()
        with Lock("slow", bound=False, wait=0):
            assert held()
        client.sendall(body[-1:])
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.endswith(b'{"a": 1}:1')
    assert not held()
