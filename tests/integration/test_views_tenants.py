"""Views of several tenants: each has its locks, its records and its stored answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import RequestFactory

from django_dlock import Lock, idempotent_view, locked_view, locks
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks
from testproject.shop.models import Effect
from tests.support.tenants import active, scoped

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def tenants() -> Iterator[None]:
    with local_locks(), scoped():
        yield


def post() -> HttpRequest:
    request = RequestFactory().post("/pay/", headers={"idempotency-key": "k1", "accept": "*/json"})
    request.user = User(pk=1)
    return request


def plain(view: Callable[..., HttpResponse], decorator: Any) -> Any:
    return decorator(view)


def as_async(view: Callable[..., HttpResponse], decorator: Any) -> Any:
    async def aview(request: HttpRequest) -> HttpResponse:
        return await sync_to_async(view)(request)

    guarded = decorator(aview)
    return lambda *args: asyncio.run(guarded(*args))


each_kind = pytest.mark.parametrize("make", [plain, as_async], ids=["sync", "async"])


@each_kind
def test_g12_a_stored_answer_is_repeated_for_its_tenant_only(make: Any) -> None:
    def pay(request: HttpRequest) -> HttpResponse:
        Effect.objects.create(order_number=1, by="view")
        return JsonResponse({"charge": Effect.objects.count()})

    view = make(pay, idempotent_view)
    answers = {}
    for who in ("a", "b", ""):
        with active(who):
            answers[who] = view(post()).content
            again = view(post())
            assert (again.content, again["Idempotent-Replayed"]) == (answers[who], "true")
    assert list(answers.values()) == [b'{"charge": 1}', b'{"charge": 2}', b'{"charge": 3}']
    beginnings = {name.partition(":")[0] for name in held_by_records()}
    assert beginnings == {"[a]idempotent", "[b]idempotent", "idempotent"}


def held_by_records() -> list[str]:
    return list(IdempotencyRecord.objects.values_list("lock_name", flat=True))


@each_kind
def test_g1_a_request_meets_those_of_its_tenant_only(make: Any) -> None:
    seen: list[str] = []

    def edit(request: HttpRequest) -> HttpResponse:
        seen.extend(info.name for info in locks["default"].list())
        return HttpResponse("edited")

    view = make(edit, locked_view("cart:{request.user.pk}"))
    cart = Lock("cart:1", bound=False)
    with active("a"):
        assert cart.acquire()
        assert view(post()).status_code == 409
    with active("b"):
        assert view(post()).status_code == 200
    cart.release()
    assert sorted(seen) == ["[a]cart:1", "[b]cart:1"]


@each_kind
@pytest.mark.parametrize("decorator", [idempotent_view, locked_view("cart")])
def test_an_error_of_the_function_is_an_error_of_the_request(make: Any, decorator: Any) -> None:
    view = make(lambda request: HttpResponse("never"), decorator)
    with active(LookupError("no tenant")), pytest.raises(LookupError):
        view(post())
    assert IdempotencyRecord.objects.count() == 0
