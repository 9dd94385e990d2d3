"""Answers that cannot be stored: the work is done once, and repeats are told so."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import DatabaseError, connection
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory

from django_dlock import idempotent_view, locks
from django_dlock.models import IdempotencyRecord
from django_dlock.records import idempotency
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


def post() -> HttpRequest:
    headers = {"accept": "application/json", "idempotency-key": "k1"}
    request = RequestFactory().post("/pay/", {}, headers=headers)
    request.user = User(pk=1)
    return request


def plain(answer: Callable[[], HttpResponse]) -> Any:
    @idempotent_view
    def view(request: HttpRequest) -> HttpResponse:
        Effect.objects.create(order_number=1, by="view")
        return answer()

    return view


def as_async(answer: Callable[[], HttpResponse], **options: Any) -> Any:
    @idempotent_view(**options)
    async def view(request: HttpRequest) -> HttpResponse:
        await sync_to_async(Effect.objects.create)(order_number=1, by="view")
        return answer()

    return lambda request: asyncio.run(view(request))


each_kind = pytest.mark.parametrize(
    "make",
    [plain, as_async, lambda answer: as_async(answer, on_disconnect="cancel")],
    ids=["sync", "async", "cancelled"],
)


class Unreadable(HttpResponse):
    @property
    def content(self) -> bytes:
        raise OSError("gone")

    @content.setter
    def content(self, value: object) -> None:
        pass


ANSWERS: dict[str, Callable[[], Any]] = {
    "stream": lambda: StreamingHttpResponse(iter([b"a"])),
    "file": lambda: FileResponse(io.BytesIO(b"a")),
    "large": lambda: HttpResponse(b"x" * 1_000_001),
    "unreadable": Unreadable,
}


def assert_done_without_answer(repeated: HttpResponse) -> None:
    assert repeated.status_code == 409
    assert "Retry-After" not in repeated
    assert repeated["Content-Type"] == "application/problem+json"
    assert json.loads(repeated.content)["detail"].endswith("but its answer was not kept.")
    assert Effect.objects.count() == 1
    assert IdempotencyRecord.objects.get().state == "succeeded"
    assert locks["default"].list() == []


def broken_page() -> TemplateResponse:
    template = engines["django"].from_string("{{ price }}")
    return TemplateResponse(RequestFactory().get("/"), template, {"price": lambda: 1 / 0})


def undecided(response: HttpResponse) -> bool:
    raise ZeroDivisionError


def of_another_database() -> TemplateResponse:
    def price() -> None:
        raise DatabaseError("away")

    page = broken_page()
    page.context_data = {"price": price}
    return page


@pytest.mark.parametrize("on_disconnect", ["finish", "cancel"])
@pytest.mark.parametrize(
    ("answer", "done_if", "error"),
    [
        (broken_page, None, ZeroDivisionError),
        (of_another_database, None, DatabaseError),
        (lambda: HttpResponse("paid"), undecided, ZeroDivisionError),
        (lambda: {"paid": 1}, None, TypeError),
    ],
    ids=["page", "database", "done_if", "no-response"],
)
def test_g12_an_async_view_whose_answer_cannot_be_made_is_done_once(
    answer: Any, done_if: Any, error: type[Exception], on_disconnect: Any
) -> None:
    """It has returned, and has no transaction that could be rolled back."""
    view = as_async(answer, done_if=done_if, on_disconnect=on_disconnect)
    with pytest.raises(error):
        view(post())
    assert_done_without_answer(view(post()))


@each_kind
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_g12_an_answer_that_cannot_be_stored_is_sent_once_and_the_work_done_once(
    make: Any, answer: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    view = make(answer)
    first = view(post())
    assert type(first) is type(answer())
    if first.streaming:
        assert b"".join(first.streaming_content) == b"a"
    assert "/pay/: the answer cannot be repeated" in caplog.text
    caplog.clear()
    for _ in range(2):
        assert_done_without_answer(view(post()))
    # What is no fault is no error each time.
    assert "damaged" not in caplog.text


@each_kind
def test_an_answer_that_is_not_final_lets_the_key_be_tried_again_also_as_a_stream(
    make: Any,
) -> None:
    view = make(lambda: StreamingHttpResponse(iter([b"a"]), status=503))
    assert view(post()).status_code == 503
    assert IdempotencyRecord.objects.get().state == "failed"


class FailingUpdates:
    """Lets the statements that end a record fail."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("UPDATE") and "finished_at" in sql and self.left:
            self.left -= 1
            raise DatabaseError("value too long")
        return execute(sql, *args)


def store_fails(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    failing, complete = FailingUpdates(times), idempotency.complete

    def complete_or_fail(*args: Any, **kwargs: Any) -> None:
        # On the thread of the view, whose connection is its own.
        with connection.execute_wrapper(failing):
            complete(*args, **kwargs)

    monkeypatch.setattr(idempotency, "complete", complete_or_fail)


def test_g12_an_answer_that_the_store_refuses_is_done_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    view = as_async(lambda: HttpResponse("paid"))
    with monkeypatch.context() as patch:
        store_fails(patch, 1)
        assert view(post()).content == b"paid"
    assert "the answer was not stored: value too long" in caplog.text
    assert_done_without_answer(view(post()))


def test_g12_a_record_that_cannot_be_written_keeps_its_lock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    view = as_async(lambda: HttpResponse("paid"))
    with monkeypatch.context() as patch:
        store_fails(patch, 2)
        assert view(post()).content == b"paid"
    assert "its record could not be written (value too long)" in caplog.text
    repeated = view(post())
    assert (repeated.status_code, "Retry-After" in repeated) == (409, True)
    assert Effect.objects.count() == 1


def test_g12_a_store_error_of_a_sync_view_undoes_its_effects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = plain(lambda: HttpResponse("paid"))  # type: ignore[arg-type, return-value]
    with monkeypatch.context() as patch:
        store_fails(patch, 1)
        with pytest.raises(DatabaseError):
            view(post())
    assert Effect.objects.count() == 0
    assert view(post()).content == b"paid"
    assert Effect.objects.count() == 1
