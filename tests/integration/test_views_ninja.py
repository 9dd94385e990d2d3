"""Guarded views below the decorators of django-ninja: arguments, answers, errors, streams."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from ninja import NinjaAPI, Schema, Status
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.streaming import JSONL

from django_dlock import Lock, idempotent_view, locked_view, locks
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


class Order(Schema):
    number: int
    amount: int


class Paid(Schema):
    paid: int


@pytest.fixture
def api(settings: Any) -> Iterator[NinjaAPI]:
    made = NinjaAPI(urls_namespace="of-a-test")
    settings.ROOT_URLCONF = ModuleType("urls_of_a_test")
    with local_locks():
        yield made


@pytest.fixture
def post(api: NinjaAPI, settings: Any) -> Any:
    def post(amount: object = 1, key: str = "k1") -> Any:
        if not hasattr(settings.ROOT_URLCONF, "urlpatterns"):
            settings.ROOT_URLCONF.urlpatterns = [path("", api.urls)]
        return Client(raise_request_exception=False).post(
            "/pay",
            {"number": 7, "amount": amount},
            content_type="application/json",
            headers={"idempotency-key": key, "accept": "application/json"},
        )

    return post


guard = idempotent_view(client="all")


@pytest.fixture(params=[False, True], ids=["", "atomic"])
def atomic_requests(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's transaction is then the outer one, and ninja makes answers of errors inside it."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)


def effect() -> None:
    Effect.objects.create(order_number=7, by="ninja")


def test_a_key_may_use_the_parsed_arguments(api: NinjaAPI, post: Any) -> None:
    @api.post("/pay")
    @locked_view("order:{order.number}")
    def pay(request: HttpRequest, order: Order) -> dict[str, bool]:
        return {"locked": Lock(f"order:{order.number}").locked()}

    assert post().json() == {"locked": True}
    with Lock("order:7", bound=False):
        assert post().status_code == 409


def test_a_misspelt_argument_is_refused_at_import(api: NinjaAPI) -> None:
    def pay(request: HttpRequest, order: Order) -> None: ...

    with pytest.raises(ValueError, match="oder"):
        locked_view("order:{oder.number}")(pay)


def test_the_schema_of_the_api_is_that_of_the_bare_view(api: NinjaAPI) -> None:
    bare = NinjaAPI(urls_namespace="bare")

    def pay(request: HttpRequest, order: Order, part: str = "all") -> Any:
        """Pay an order."""

    api.post("/pay", response=Paid)(locked_view("all")(guard(pay)))
    bare.post("/pay", response=Paid)(pay)
    schemas = [each.get_openapi_schema(path_prefix="/") for each in (bare, api)]
    assert schemas[0] == schemas[1]
    assert "Order" in schemas[0]["components"]["schemas"]


@pytest.mark.usefixtures("atomic_requests")
def test_headers_cookies_and_status_of_the_view_are_stored(api: NinjaAPI, post: Any) -> None:
    @api.post("/pay", response={201: Paid, 204: None})
    @idempotent_view(client="all", store_cookies=True)
    def pay(request: HttpRequest, order: Order, response: HttpResponse) -> Status[Any]:
        effect()
        response["Location"] = "/orders/7"
        response.set_cookie("seen", "1")
        return Status(201, Paid(paid=order.amount)) if order.amount else Status(204, None)

    first, again = post(), post()
    for answer in first, again:
        assert (answer.status_code, answer.json()) == (201, {"paid": 1})
        assert (answer["Location"], answer.cookies["seen"].value) == ("/orders/7", "1")
    assert [post(0, "k2").status_code for _ in range(2)] == [204, 204]
    assert Effect.objects.count() == 2


@pytest.mark.parametrize("amount", ["much", None])
def test_what_ninja_refuses_does_not_use_the_key(api: NinjaAPI, post: Any, amount: object) -> None:
    @api.post("/pay")
    @guard
    def pay(request: HttpRequest, order: Order) -> dict[str, int]:
        effect()
        return {"paid": order.amount}

    assert post(amount).status_code == 422
    assert post(1).json() == {"paid": 1}
    assert Effect.objects.count() == 1


@pytest.mark.usefixtures("atomic_requests")
def test_g12_an_error_of_ninja_rolls_back_and_may_be_tried_again(api: NinjaAPI, post: Any) -> None:
    errors = [HttpError(402, "no money"), HttpError(503, "closed")]

    @api.post("/pay")
    @guard
    def pay(request: HttpRequest, order: Order) -> dict[str, int]:
        effect()
        if errors:
            raise errors.pop(0)
        return {"paid": order.amount}

    assert [post().status_code for _ in range(4)] == [402, 503, 200, 200]
    assert Effect.objects.count() == 1


@pytest.mark.usefixtures("atomic_requests")
def test_g12_what_the_response_model_refuses_leaves_no_effect(api: NinjaAPI, post: Any) -> None:
    results = [{"wrong": 1}, {"paid": 1}]

    @api.post("/pay", response=Paid)
    @guard
    def pay(request: HttpRequest, order: Order) -> Any:
        effect()
        return results.pop(0)

    assert post().status_code == 500
    assert Effect.objects.count() == 0
    assert [post().json() for _ in range(2)] == [{"paid": 1}] * 2
    assert Effect.objects.count() == 1


@pytest.mark.usefixtures("atomic_requests")
def test_an_answer_that_may_change_is_rolled_back(api: NinjaAPI, post: Any) -> None:
    @api.post("/pay", response={409: Paid})
    @guard
    def pay(request: HttpRequest, order: Order) -> Status[Any]:
        effect()
        return Status(409, {"paid": 0})

    assert [post().status_code for _ in range(2)] == [409, 409]
    assert Effect.objects.count() == 0


def test_both_guards_on_an_async_view(api: NinjaAPI, post: Any) -> None:
    @api.post("/pay", response={201: Paid})
    @locked_view("order:{order.number}")
    @guard
    async def pay(request: HttpRequest, order: Order, response: HttpResponse) -> Status[Any]:
        await sync_to_async(effect)()
        response["Location"] = "/orders/7"
        return Status(201, {"paid": order.amount})

    answers = [post() for _ in range(2)]
    assert [(each.status_code, each.json(), each["Location"]) for each in answers] == [
        (201, {"paid": 1}, "/orders/7")
    ] * 2
    assert Effect.objects.count() == 1


@pytest.mark.parametrize("decorator", [locked_view("all"), guard])
def test_a_stream_is_refused_at_import(api: NinjaAPI, decorator: Any) -> None:
    def lines(request: HttpRequest) -> Iterator[dict[str, int]]:
        yield {"paid": 1}

    with pytest.raises(TypeError, match=r"lines.*decorate_view\(locked_view\(\.\.\.\)\)"):
        api.get("/lines", response=JSONL[Paid])(decorator(lines))


def test_a_lock_around_the_operation_is_held_until_a_stream_is_sent(
    api: NinjaAPI, settings: Any
) -> None:
    @api.get("/lines", response=JSONL[Paid])
    @decorate_view(locked_view("lines"))
    def lines(request: HttpRequest) -> Iterator[dict[str, int]]:
        yield {"paid": int(Lock("lines").locked())}

    settings.ROOT_URLCONF.urlpatterns = [path("", api.urls)]
    answer: Any = Client().get("/lines")
    assert b"".join(answer.streaming_content).strip() == b'{"paid": 1}'
    answer.close()
    assert not Lock("lines").locked()


def test_a_decorator_that_hides_the_operation_is_named(api: NinjaAPI) -> None:
    def careless(run: Any) -> Any:
        def without_wraps(request: HttpRequest, **kwargs: Any) -> Any:
            return run(request, **kwargs)

        return without_wraps

    def pay(request: HttpRequest) -> None: ...

    with pytest.raises(TypeError, match=r"pay.*functools\.wraps"):
        api.post("/pay")(guard(decorate_view(careless)(pay)))


def test_around_operations_a_list_gives_each_its_own_lock(api: NinjaAPI, settings: Any) -> None:
    """What is decorated there is a method of django-ninja, the same for all operations."""
    seen = []

    def pay(request: HttpRequest) -> None:
        seen.extend(lease.name for lease in locks["default"].list())

    def refund(request: HttpRequest) -> None:
        pay(request)

    for view in pay, refund:
        guarded = decorate_view(locked_view(["request.method"]))(view)
        api.post(f"/{view.__name__}")(guarded)
    settings.ROOT_URLCONF.urlpatterns = [path("", api.urls)]
    assert [Client().post(each).status_code for each in ("/pay", "/refund")] == [200, 200]
    assert len(set(seen)) == 2
    assert ".pay:" in seen[0]
