"""Stored answers and results that are damaged: told once and clearly, and nothing runs again."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from celery import Celery
from django.contrib.auth.models import User
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory
from hypothesis import example, given
from hypothesis import strategies as some

from django_dlock import idempotent_view
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks
from testproject.shop.models import Effect
from tests.support.deliveries import effects, in_memory, recorded, work
from tests.support.fuzzing import examples, json_values, texts

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@idempotent_view(store_cookies=True)
def pay(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(order_number=1, by="view")
    return JsonResponse({"paid": True}, status=201)


@idempotent_view(store_cookies=True)
async def apay(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(pay.__wrapped__)(request)  # type: ignore[attr-defined]


def ask(view: Any, accept: str = "application/json") -> HttpResponse:
    headers = {"idempotency-key": "k", "accept": accept}
    request = RequestFactory().post("/pay/", "{}", "application/json", headers=headers)
    request.user = User(pk=1)
    response: HttpResponse = asyncio.run(view(request)) if view is apay else view(request)
    return response


def stored(text: str) -> None:
    """The answer of the key, as somebody else has written it."""
    if not IdempotencyRecord.objects.filter(state="succeeded").exists():
        IdempotencyRecord.objects.all().delete()
        Effect.objects.all().delete()
        for view in (pay, apay):
            assert ask(view).status_code == 201
    IdempotencyRecord.objects.update(result=text)


def storable(text: str) -> bool:
    """Whether SQLite stores it as it is."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


GOOD = {
    "status": 201,
    "reason": "Created",
    "headers": [["Content-Type", "application/json"]],
    "cookies": [],
    "body": base64.b64encode(b"{}").decode(),
}
some_parts = some.dictionaries(some.sampled_from([*GOOD, "other"]), json_values(), max_size=6)
damages = some.one_of(
    texts(60),
    json_values().map(json.dumps),
    # Like one of ours, but for some parts.
    some_parts.map(lambda parts: json.dumps({**GOOD, **parts})),
    some.lists(some.tuples(texts(10), texts(10)), max_size=3).map(
        lambda headers: json.dumps({**GOOD, "headers": headers})
    ),
    some.lists(texts(20), max_size=3).map(lambda texts: json.dumps({**GOOD, "cookies": texts})),
    texts(10).map(lambda reason: json.dumps({**GOOD, "reason": reason})),
    some.integers(-1, 1000).map(lambda status: json.dumps({**GOOD, "status": status})),
).filter(storable)


@examples(120)
@given(damages, some.sampled_from([pay, apay]))
@example("", pay)
@example("not JSON", pay)
@example("not JSON", apay)
@example(deep(100_000), pay)
@example("NaN", pay)
@example("1" * 5_000, pay)
@example(json.dumps({**GOOD, "status": 99}), pay)
@example(json.dumps({**GOOD, "status": True}), pay)
@example(json.dumps({**GOOD, "status": 10**400}), pay)
@example(json.dumps({**GOOD, "reason": "OK\r\nSet-Cookie: a=b"}), pay)
@example(json.dumps({**GOOD, "headers": [["X", "1\r\nSet-Cookie: a=b"]]}), pay)
@example(json.dumps({**GOOD, "headers": [["X\r\nSet-Cookie", "1"]]}), pay)
@example(json.dumps({**GOOD, "headers": [["X: Y", "1"]]}), pay)
@example(json.dumps({**GOOD, "headers": [["X", "\ud800"]]}), pay)
@example(json.dumps({**GOOD, "cookies": ["a=b\x00"]}), pay)
@example(json.dumps({**GOOD, "cookies": [None]}), pay)
@example(json.dumps({**GOOD, "cookies": [["a", "b", {"path": "/\x00"}]]}), pay)
@example(json.dumps({**GOOD, "cookies": [["a", "b", {"no such": "x"}]]}), pay)
@example(json.dumps({**GOOD, "cookies": [["a", 1, {}]]}), pay)
@example(json.dumps({**GOOD, "cookies": [[1, "a", {}]]}), pay)
@example(json.dumps({**GOOD, "cookies": [["a", "b", {"expires": 10**400}]]}), pay)
@example(json.dumps({**GOOD, "cookies": [["a b", "b", {}]]}), pay)
@example(json.dumps({**GOOD, "cookies": [["a", "b", ["path"]]]}), pay)
@example(json.dumps({**GOOD, "body": "not base64!"}), pay)
def test_a_damaged_answer_is_a_clear_refusal(text: str, view: Any) -> None:
    stored(text)
    response = ask(view)
    assert response.status_code == 409 or response["Idempotent-Replayed"] == "true"
    for name, value in response.items():
        assert not set("\r\n\0") & set(name + value)
        assert name.isascii()
        value.encode("latin-1")
    assert not set("\r\n\0") & set(response.reason_phrase)
    for morsel in response.cookies.values():
        assert not set("\r\n\0") & set(morsel.OutputString())
    if response.status_code == 409 and "Idempotent-Replayed" not in response:
        assert json.loads(response.content)["status"] == 409
    # Neither runs again.
    assert Effect.objects.count() == 2
    assert ask(view).status_code == response.status_code


@pytest.mark.parametrize("view", [pay, apay])
def test_a_damaged_answer_is_logged_with_its_lock(
    view: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ask(view)
    IdempotencyRecord.objects.update(result='{"secret": "sesame"}')
    with caplog.at_level(logging.ERROR, "django_dlock"):
        response = ask(view, "text/html")
    assert response.status_code == 409
    assert "Retry-After" not in response
    assert b"was carried out" in response.content
    (line,) = caplog.records
    assert "damaged" in line.getMessage()
    assert "sesame" not in caplog.text
    assert vars(line)["lock_name"].startswith("idempotent:")


def test_what_is_not_damaged_is_repeated() -> None:
    stored(json.dumps(GOOD))
    response = ask(pay)
    assert (response.status_code, response.content) == (201, b"{}")
    assert response["Idempotent-Replayed"] == "true"


@examples(60)
@given(some.one_of(texts(60), json_values().map(json.dumps)).filter(storable))
@example("")
@example("not JSON")
@example(deep(100_000))
@example("1" * 5_000)
@example('{"__type__": "datetime", "__value__": "x"}')
@example('{"__type__": [], "__value__": 1}')
def test_a_duplicate_task_with_a_damaged_result_is_skipped(app: Celery, text: str) -> None:
    IdempotencyRecord.objects.all().delete()
    Effect.objects.all().delete()
    made = recorded(app)
    made.delay(1)
    work(app)
    IdempotencyRecord.objects.update(result=text)
    sent = made.delay(1)
    work(app)
    assert sent.state == "SUCCESS"
    assert effects() == 1


def test_a_damaged_result_is_none_and_logged(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    made = recorded(app)
    made.delay(1)
    work(app)
    IdempotencyRecord.objects.update(result="sesame")
    sent = made.delay(1)
    with caplog.at_level(logging.WARNING, "django_dlock"):
        work(app)
    assert (sent.state, sent.result) == ("SUCCESS", None)
    (line,) = [each for each in caplog.records if "damaged" in each.getMessage()]
    assert sent.id in line.getMessage()
    assert "sesame" not in caplog.text
    assert connection.vendor == "sqlite"
