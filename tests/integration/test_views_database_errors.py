"""What views with a lock or a record answer while a database is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.db import OperationalError, connections
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from pytest_django import DjangoDbBlocker

from django_dlock import idempotent_view, locked_view
from django_dlock.databases.errors import TablesMissing
from django_dlock.testing import local_locks
from testproject.shop.models import Effect
from tests.support.databases import added
from tests.support.workers import sqlite

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

AWAY, EMPTY, FILE = "views-away", "views-empty", "views-file"


@pytest.fixture(autouse=True, scope="module")
def _databases(
    tmp_path_factory: pytest.TempPathFactory,
    django_db_setup: None,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[None]:
    place = tmp_path_factory.mktemp("views")
    with ExitStack() as stack:
        for alias in (AWAY, EMPTY, FILE):
            stack.enter_context(added(alias, sqlite(place / alias)))
        with django_db_blocker.unblock():
            call_command("migrate", database=FILE, verbosity=0)
        yield


@pytest.fixture(autouse=True)
def _away(transactional_db: None) -> Iterator[None]:
    file = Path(connections[AWAY].settings_dict["NAME"])
    connections[AWAY].close()
    file.unlink(missing_ok=True)
    file.mkdir()
    with local_locks():
        yield
    for alias in (AWAY, EMPTY, FILE):
        connections[alias].close()
    # Django empties all databases after a test.
    file.rmdir()


def pay(request: HttpRequest) -> HttpResponse:
    return HttpResponse("paid", status=201)


async def apay(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(pay)(request)


def client(request: HttpRequest) -> str:
    """Whose key it is, as a row says."""
    return str(Effect.objects.using(AWAY).count())


Post = Callable[..., HttpResponse]


@pytest.fixture(params=[pay, apay], ids=["sync", "async"])
def post(request: pytest.FixtureRequest) -> Post:
    """Decorate the view, and post to it."""

    def post(decorate: Callable[[Any], Any]) -> HttpResponse:
        headers = {"Idempotency-Key": "1", "Accept": "application/json"}
        sent = RequestFactory().post("/pay", headers=headers)
        answer = decorate(request.param)(sent)
        return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer

    return post


GUARDS = {
    "record": lambda **options: idempotent_view(
        client=lambda request: "me", idempotency_using=AWAY, **options
    ),
    "client": lambda **options: idempotent_view(client=client, **options),
    "idempotency key": lambda **options: idempotent_view(
        key=client, client=lambda request: "me", **options
    ),
    "payload": lambda **options: idempotent_view(
        payload=client, client=lambda request: "me", **options
    ),
    "key": lambda **options: locked_view(client, **options),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_g13_a_request_while_the_database_is_away_is_refused_if_asked_for(post, guard):
    answer = post(GUARDS[guard](if_unavailable=503))
    assert (answer.status_code, answer["Retry-After"]) == (503, "5")


@pytest.mark.parametrize("guard", GUARDS)
def test_otherwise_the_error_of_the_database_is_raised(post, guard):
    with pytest.raises(OperationalError, match="unable to open"):
        post(GUARDS[guard]())


@pytest.mark.parametrize("guard", sorted(GUARDS.keys() - {"record"}))
def test_an_error_of_a_key_that_is_no_outage_is_raised(post, guard, monkeypatch):
    monkeypatch.setattr(f"{__name__}.AWAY", EMPTY)
    with pytest.raises(OperationalError, match="no such table: shop_effect"):
        post(GUARDS[guard](if_unavailable=503))


def test_g13_a_view_without_our_tables_says_what_to_run(post):
    def view(**options: Any) -> Any:
        return idempotent_view(client=lambda request: "me", idempotency_using=EMPTY, **options)

    with pytest.raises(TablesMissing, match=f"migrate django_dlock --database {EMPTY}"):
        post(view())
    assert post(view(if_unavailable=503)).status_code == 503


def test_g12_a_connection_that_breaks_under_an_async_view_repeats_nothing():
    """It has no transaction; only the statement that stores the answer was lost."""
    paid: list[str] = []

    def lose() -> None:
        connections[FILE].connection.close()

    def close() -> None:
        # Of the thread whose connection it is.
        connections[FILE].close()

    @idempotent_view(client=lambda request: "me", idempotency_using=FILE)
    async def view(request: HttpRequest) -> HttpResponse:
        paid.append(request.path)
        await sync_to_async(lose)()
        return HttpResponse("paid", status=201)

    async def twice() -> list[int]:
        headers = {"Idempotency-Key": "1", "Accept": "application/json"}
        sent = [RequestFactory().post("/pay", headers=headers) for _ in range(2)]
        codes = [(await view(each)).status_code for each in sent]
        await sync_to_async(close)()
        return codes

    assert asyncio.run(twice()) == [201, 201]
    assert len(paid) == 1
