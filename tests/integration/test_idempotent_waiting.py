"""``idempotent_view(if_contended="wait")``: a second request gets the answer of the first."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.test import RequestFactory

from django_dlock import BodyField, idempotent_view, locks
from django_dlock.testing import local_locks
from testproject.servers import RedisServer
from testproject.shop.models import Effect
from tests.support.aliases import alias, configured

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True, params=["local", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "local":
        with local_locks():
            yield
        return
    server: RedisServer = request.getfixturevalue("own_redis")
    with configured({"default": alias(server.url, TTL=30.0, OPTIONS={"command_timeout": 5.0})}):
        yield


def click() -> HttpRequest:
    headers = {"accept": "text/html"}
    request = RequestFactory().post("/pay/", {"idempotency_key": "t"}, headers=headers)
    request.user = User(pk=1)
    return request


def waiting() -> int:
    return sum(held.waiting for held in locks["default"].list())


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_thread(view: Callable[..., Any]) -> Any:
    try:
        return view(click())
    finally:
        connection.close()


def test_g12_a_double_click_gets_the_first_answer_twice() -> None:
    @idempotent_view(key=BodyField(), if_contended="wait", wait=30)
    def pay(request: HttpRequest) -> HttpResponse:
        until(lambda: waiting() == 1)
        Effect.objects.create(order_number=1, by="view")
        return redirect("/thanks/")

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(in_thread, [pay, pay]))
    assert [answer["Location"] for answer in answers] == ["/thanks/"] * 2
    assert sum("Idempotent-Replayed" in answer for answer in answers) == 1
    assert Effect.objects.count() == 1


def test_g12_a_request_that_waited_runs_if_the_first_one_failed() -> None:
    statuses = iter([500, 200])

    @idempotent_view(key=BodyField(), if_contended="wait", wait=30)
    def pay(request: HttpRequest) -> HttpResponse:
        status = next(statuses)
        if status == 500:
            until(lambda: waiting() == 1)
        Effect.objects.create(order_number=1, by="view")
        return HttpResponse(status=status)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(in_thread, [pay, pay]))
    assert sorted(answer.status_code for answer in answers) == [200, 500]
    assert Effect.objects.count() == 1


def test_a_request_waits_no_longer_than_it_may() -> None:
    refused: list[HttpResponse] = []

    @idempotent_view(key=BodyField(), if_contended="wait", wait=0.01)
    def pay(request: HttpRequest) -> HttpResponse:
        other = threading.Thread(target=lambda: refused.append(in_thread(pay)))
        other.start()
        other.join()
        return HttpResponse()

    assert pay(click()).status_code == 200
    assert [answer.status_code for answer in refused] == [409]
    assert int(refused[0]["Retry-After"]) >= 1
    assert "Your request is in progress" in refused[0].text


def test_g12_coroutines_wait_without_a_thread_each() -> None:
    """A waiting request that kept its thread would leave none for the first one."""
    crowd, threads = 50, threading.active_count()

    @idempotent_view(key=BodyField(), if_contended="wait", wait=30)
    async def pay(request: HttpRequest) -> HttpResponse:
        while waiting() < crowd:  # noqa: ASYNC110 - a backend tells no event
            await asyncio.sleep(0.01)
        assert threading.active_count() < threads + crowd / 2
        await sync_to_async(Effect.objects.create)(order_number=1, by="view")
        return redirect("/thanks/")

    async def clicks() -> list[Any]:
        return await asyncio.gather(*(pay(click()) for _ in range(crowd + 1)))

    answers = asyncio.run(asyncio.wait_for(clicks(), 60))
    assert {answer["Location"] for answer in answers} == {"/thanks/"}
    assert sum("Idempotent-Replayed" in answer for answer in answers) == crowd
    assert Effect.objects.count() == 1


def test_a_coroutine_waits_no_longer_than_it_may() -> None:
    refused: list[HttpResponse] = []

    @idempotent_view(key=BodyField(), if_contended="wait", wait=0.01)
    async def pay(request: HttpRequest) -> HttpResponse:
        refused.append(await pay(click()))
        return HttpResponse()

    assert asyncio.run(pay(click())).status_code == 200
    assert [answer.status_code for answer in refused] == [409]
