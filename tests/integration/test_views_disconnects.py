"""A client that goes away: the work of an asynchronous view goes on, under its lock, to its end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.core.signals import request_finished
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncRequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_dlock import Lock, idempotent_view, locked_view, locks
from django_dlock.models import IdempotencyRecord
from django_dlock.records import idempotency
from django_dlock.testing import local_locks
from django_dlock.views import run
from testproject.shop.models import Effect

pytestmark = [pytest.mark.urls(__name__), pytest.mark.django_db(transaction=True)]

LONG = 20
"""Seconds after which a test fails, where an event did not come."""


class Stage:
    """What the views of one test do, and when."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.thread = 0
        self.task: asyncio.Task[Any] | None = None
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def work(self) -> HttpResponse:
        """On a thread: it can be cancelled by nobody."""
        self.thread = threading.get_ident()
        self.begun.set()
        assert self.goes_on.wait(LONG)
        Effect.objects.create(order_number=1, by="view")
        self.log.append("held" if locks["default"].list() else "free")
        return HttpResponse("paid")


stage = Stage()


tone: contextvars.ContextVar[str] = contextvars.ContextVar("tone", default="")


def noting(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """A middleware that notes what it sees after the view."""

    async def middleware(request: HttpRequest) -> Any:
        response = await get_response(request)
        thread = await sync_to_async(threading.get_ident)()
        same = thread == stage.thread
        stage.log.append(f"middleware: {response.status_code} {tone.get()} {same}")
        return response

    return middleware


noting.async_capable, noting.sync_capable = True, False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def fresh(settings: Any) -> Iterator[None]:
    settings.MIDDLEWARE = [f"{__name__}.noting"]
    stage.__init__()  # type: ignore[misc]
    with local_locks():
        yield


async def work(request: HttpRequest) -> HttpResponse:
    response: HttpResponse = await sync_to_async(stage.work)()
    tone.set("changed")
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

    async def chunks() -> AsyncIterator[bytes]:
        stage.log.append("streaming")
        yield b"x"

    return StreamingHttpResponse(chunks())


@locked_view("pay")
async def failing(request: HttpRequest) -> HttpResponse:
    await sync_to_async(stage.work)()
    raise LookupError("card reader")


def noting_in_sync(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """The same for a middleware that keeps the request's thread while it waits for the view."""

    def middleware(request: HttpRequest) -> Any:
        response = get_response(request)
        same = threading.get_ident() == stage.thread
        stage.log.append(f"middleware: {response.status_code} {tone.get()} {same}")
        return response

    return middleware


class LeavesPagesAlone:
    """A middleware that could change the page of a view."""

    async_capable = True

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        return response


def page(request: HttpRequest) -> TemplateResponse:
    stage.work()
    return TemplateResponse(request, engines["django"].from_string("paid"))


async def async_page(request: HttpRequest) -> TemplateResponse:
    return await sync_to_async(page)(request)


def of_shop(request: HttpRequest) -> str:
    return "shop"


anyone = idempotent_view(client=of_shop)
urlpatterns = [
    path("locked/", locked_view("pay")(work)),
    path("method/", Pay.as_view()),
    path("class/", PayAll.as_view()),
    path("idempotent/", anyone(work)),
    path("page/", anyone(page)),
    path("async-page/", anyone(async_page)),
    path("both/", locked_view("pay")(anyone(work))),
    path("stream/", stream),
    path("failing/", failing),
    path("cancel/", locked_view("pay", on_disconnect="cancel")(work)),
    path("cancel-idempotent/", idempotent_view(client=of_shop, on_disconnect="cancel")(work)),
    path("waiting/", locked_view("pay", if_contended="wait", wait=LONG)(work)),
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


async def end_of(server: ApplicationCommunicator) -> None:
    """The application has returned."""
    await asyncio.wait_for(asyncio.shield(server.future), LONG)


async def answer(url: str) -> tuple[int, bytes]:
    server = connect(url)
    await server.send_input({"type": "http.request", "body": b""})
    start, body = await server.receive_output(LONG), await server.receive_output(LONG)
    await end_of(server)
    return start["status"], body["body"]


KINDS = ["locked", "method", "class", "idempotent", "both"]
DONE = ["held", "answered", "middleware: 200 changed True"]


async def finished(url: str) -> None:
    """The client leaves in the middle of the view, which then ends."""
    first = await begin(url)
    await leave(first)
    stage.goes_on.set()
    await end_of(first)


@pytest.mark.parametrize("kind", KINDS)
async def test_g1_a_view_whose_client_goes_away_keeps_its_lock_to_the_end(kind: str) -> None:
    first = await begin(f"/{kind}/")
    await leave(first)
    status, _ = await answer(f"/{kind}/")
    assert status == 409
    stage.log.clear()
    stage.goes_on.set()
    await end_of(first)
    assert stage.log == DONE
    assert locks["default"].list() == []


@pytest.mark.parametrize("kind", ["idempotent", "both"])
async def test_g12_a_client_that_goes_away_and_repeats_gets_the_answer_of_one_run(
    kind: str,
) -> None:
    await finished(f"/{kind}/")
    assert await answer(f"/{kind}/") == (200, b"paid")
    assert await Effect.objects.acount() == 1
    assert stage.log[:3] == DONE


async def test_g12_a_page_that_a_middleware_may_change_is_stored_without_its_client(
    settings: Any,
) -> None:
    settings.MIDDLEWARE = [f"{__name__}.LeavesPagesAlone"]
    await finished("/async-page/")
    assert locks["default"].list() == []
    assert await answer("/async-page/") == (200, b"paid")
    assert await Effect.objects.acount() == 1


async def test_g6_the_lock_of_a_page_that_nobody_renders_ends_by_itself(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ASGI, Django drops what a synchronous view returns when its client has gone."""
    settings.MIDDLEWARE = [f"{__name__}.LeavesPagesAlone"]
    monkeypatch.setattr(run, "LONGEST_PAGE", 0.1)

    async def free() -> None:
        while locks["default"].list():  # noqa: ASYNC110 - the watchdog's clock decides
            await asyncio.sleep(0.01)

    await finished("/page/")
    await asyncio.wait_for(free(), LONG)
    status, body = await answer("/page/")
    assert (status, b"was carried out" in body) == (409, True)
    assert await Effect.objects.acount() == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_synchronous_middleware_gets_the_response_without_a_client(
    kind: str, settings: Any
) -> None:
    settings.MIDDLEWARE = [f"{__name__}.noting_in_sync"]
    await finished(f"/{kind}/")
    assert stage.log == DONE


async def test_the_request_ends_after_its_view() -> None:
    """At its end, Django closes connections to the database."""

    def note(sender: object, **_: Any) -> None:
        stage.log.append("request finished")

    request_finished.connect(note)
    try:
        await finished("/locked/")
    finally:
        request_finished.disconnect(note)
    assert stage.log == [*DONE, "request finished"]


async def test_a_view_that_fails_without_its_client_is_reported_as_any_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await finished("/failing/")
    assert "Internal Server Error: /failing/" in caplog.text
    assert "card reader" in caplog.text
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_g6_nothing_is_streamed_to_a_client_that_is_gone() -> None:
    await finished("/stream/")
    assert stage.log == ["held", "middleware: 200  True"]
    assert locks["default"].list() == []


async def test_a_view_may_be_cancelled_with_its_client() -> None:
    first = await begin("/cancel/")
    await leave(first)
    # The thread goes on without the lock.
    assert locks["default"].list() == []
    stage.goes_on.set()
    await end_of(first)
    assert stage.log == ["free"]


async def test_the_key_of_a_view_that_was_cancelled_with_its_client_is_free() -> None:
    await finished("/cancel-idempotent/")
    record = await IdempotencyRecord.objects.aget()
    assert (record.state, record.error) == ("failed", "CancelledError: ")


async def test_g7_a_client_that_goes_away_while_its_request_waits_gets_no_turn() -> None:
    holder = Lock("pay", bound=False)
    await holder.aacquire()
    server = connect("/waiting/")
    await server.send_input({"type": "http.request", "body": b""})
    await asyncio.sleep(0)
    await leave(server)
    await end_of(server)
    await holder.arelease()
    assert not stage.begun.is_set()


# -- without a server ----------------------------------------------------------------------


def request(method: str = "POST") -> HttpRequest:
    made: HttpRequest = AsyncRequestFactory().generic(
        method, "/", headers={"idempotency-key": "k1"}
    )
    return made


async def in_task(request: HttpRequest) -> HttpResponse:
    stage.log.append("same" if asyncio.current_task() is stage.task else "own")
    return HttpResponse("done")


@pytest.mark.parametrize(
    ("view", "where"),
    [
        (locked_view("it")(in_task), "own"),
        (anyone(in_task), "own"),
        (locked_view("it", methods=["PUT"])(in_task), "same"),
        (idempotent_view(methods=["PUT"], client=of_shop)(in_task), "same"),
        (locked_view("it", on_disconnect="cancel")(in_task), "same"),
        (idempotent_view(client=of_shop, on_disconnect="cancel")(in_task), "same"),
    ],
    ids=["locked", "key", "locked-others", "key-others", "locked-cancel", "key-cancel"],
)
async def test_only_guarded_requests_have_a_task_of_their_own(view: Any, where: str) -> None:
    stage.task = asyncio.current_task()
    assert (await view(request())).content == b"done"
    assert stage.log == [where]


async def test_guarded_views_inside_each_other_share_a_task_and_its_locks() -> None:
    inner = locked_view("it", reentrant=True)(in_task)

    @locked_view("it", reentrant=True)
    async def outer(request: HttpRequest) -> HttpResponse:
        stage.task = asyncio.current_task()
        async with Lock("it", reentrant=True, wait=0):
            response: HttpResponse = await inner(request)
            return response

    assert (await outer(request())).content == b"done"
    assert stage.log == ["same"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout is new in Python 3.11")
async def test_a_timeout_around_a_view_lets_it_end_and_leaves_nothing_cancelled() -> None:
    goes_on = asyncio.Event()

    @locked_view("it")
    async def view(request: HttpRequest) -> HttpResponse:
        await goes_on.wait()
        return HttpResponse("done")

    task = asyncio.current_task()
    assert task is not None
    async with asyncio.timeout(0) as timeout:
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        response = await view(request())
    assert timeout.expired()
    assert response.content == b"done"
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_many_cancellations_end_no_view() -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    @locked_view("it")
    async def view(request: HttpRequest) -> HttpResponse:
        begun.set()
        await goes_on.wait()
        return HttpResponse("done")

    running = asyncio.create_task(view(request()))
    await begun.wait()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
    goes_on.set()
    assert (await running).content == b"done"


async def test_a_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    @locked_view("it")
    async def view(request: HttpRequest) -> HttpResponse:
        begun.set()
        await goes_on.wait()
        raise LookupError("card reader")

    waiting = view(request())
    # As a server that gives up a request; by hand, because a task cannot be closed.
    waiting.send(None)
    await begun.wait()
    waiting.close()
    goes_on.set()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others)  # type: ignore[type-var]
    await asyncio.sleep(0)
    del others
    gc.collect()
    assert "A view failed after its client had gone" in caplog.text
    assert "card reader" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_a_view_that_cancels_itself_releases_its_lock() -> None:
    @locked_view("it")
    async def view(request: HttpRequest) -> HttpResponse:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return HttpResponse("done")

    with pytest.raises(asyncio.CancelledError):
        await view(request())
    assert locks["default"].list() == []


async def test_g12_a_view_that_is_cancelled_while_its_answer_is_stored_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete = idempotency.complete

    def slow(*args: Any) -> None:
        stage.work()
        complete(*args)

    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")

    guarded = idempotent_view(client=of_shop, on_disconnect="cancel")(view)
    monkeypatch.setattr(idempotency, "complete", slow)
    running = asyncio.create_task(guarded(request()))
    assert await asyncio.to_thread(stage.begun.wait, LONG)
    running.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    stage.goes_on.set()
    await asyncio.wait([running])
    assert stage.log == ["held"]
    assert (await IdempotencyRecord.objects.aget()).state == "succeeded"


# -- the end of the event loop -------------------------------------------------------------


def ended_in_the_middle(view: Any) -> None:
    """An event loop that ends while the view waits for its thread."""

    async def main() -> None:
        running = asyncio.create_task(view(request()))
        assert await asyncio.to_thread(stage.begun.wait, LONG)
        del running

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the end cannot be told before Python 3.11")
@pytest.mark.parametrize("decorate", [locked_view("pay"), anyone], ids=["locked", "idempotent"])
def test_g1_a_thread_that_outlives_the_event_loop_keeps_its_lock(decorate: Any) -> None:
    ended_in_the_middle(decorate(work))
    stage.goes_on.set()
    while not stage.log:
        threading.Event().wait(0.01)
    gc.collect()
    assert stage.log == ["held"]
    assert len(locks["default"].list()) == 1
    states = list(IdempotencyRecord.objects.values_list("state", flat=True))
    assert states == (["running"] if decorate is anyone else [])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the end cannot be told before Python 3.11")
@pytest.mark.parametrize("on_disconnect", ["finish", "cancel"])
def test_g12_an_answer_that_is_stored_after_the_event_loop_keeps_its_lock(
    monkeypatch: pytest.MonkeyPatch, on_disconnect: Any
) -> None:
    complete = idempotency.complete

    def slow(*args: Any) -> None:
        stage.work()
        complete(*args)
        stage.log.append("stored")

    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("done")

    monkeypatch.setattr(idempotency, "complete", slow)
    ended_in_the_middle(idempotent_view(client=of_shop, on_disconnect=on_disconnect)(view))
    stage.goes_on.set()
    while "stored" not in stage.log:
        threading.Event().wait(0.01)
    assert stage.log == ["held", "stored"]
    assert IdempotencyRecord.objects.get().state == "succeeded"
