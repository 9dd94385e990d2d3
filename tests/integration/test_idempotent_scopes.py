"""The scope of an idempotent view's records is the name of that view, and of no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.response import Response

from django_dlock import idempotent_view, locked_view
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks

pytestmark = pytest.mark.django_db(transaction=True)

once = idempotent_view(client="all")


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


class Answer(View):
    """Answers with the name of its class."""

    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(type(self).__name__)


class Pay(Answer):
    pass


class Refund(Answer):
    pass


@idempotent_view(client="all")
class DecoratedPay(Answer):
    pass


@idempotent_view(client="all")
class DecoratedRefund(Answer):
    pass


class OnMethod(View):
    @method_decorator(idempotent_view(client="all"))
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(type(self).__name__)

    @method_decorator(idempotent_view(client="all"))
    def put(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(type(self).__name__)


class MethodPay(OnMethod):
    pass


class MethodRefund(OnMethod):
    pass


@api_view(["POST"])
def framework_pay(request: Any) -> Response:
    return Response("Pay")


@api_view(["POST"])
def framework_refund(request: Any) -> Response:
    return Response("Refund")


def post(method: str = "POST") -> HttpRequest:
    request = RequestFactory().generic(method, "/", "", headers={"idempotency-key": "order-7"})
    request.user = User(pk=1, username="ada")
    request._dont_enforce_csrf_checks = True  # type: ignore[attr-defined]
    return request


PLACES = {
    "a class": (DecoratedPay.as_view(), DecoratedRefund.as_view()),
    "around as_view()": (once(Pay.as_view()), once(Refund.as_view())),
    "an inherited method": (MethodPay.as_view(), MethodRefund.as_view()),
    "above api_view": (once(framework_pay), once(framework_refund)),
}


@pytest.mark.parametrize("place", PLACES)
def test_g12_two_classes_do_not_share_their_keys(place: str) -> None:
    pay, refund = PLACES[place]
    assert "Idempotent-Replayed" not in pay(post())
    assert "Idempotent-Replayed" not in refund(post())
    assert "Idempotent-Replayed" in refund(post())
    assert len(set(scopes())) == 2


def scopes() -> list[str]:
    return list(IdempotencyRecord.objects.order_by("pk").values_list("scope", flat=True))


def test_a_class_has_one_name_however_it_is_decorated() -> None:
    DecoratedPay.as_view()(post())
    once(Pay.as_view())(post())
    once(framework_pay)(post())
    assert scopes() == [f"{__name__}.{name}" for name in ("DecoratedPay", "Pay", "framework_pay")]


def test_a_method_has_a_name_of_its_own() -> None:
    view = MethodPay.as_view()
    view(post())
    view(post("PUT"))
    assert scopes() == [f"{__name__}.MethodPay.post", f"{__name__}.MethodPay.put"]


def test_two_views_above_api_view_do_not_share_the_lock_of_a_list() -> None:
    guard = locked_view(["request.user.pk"])
    inner = guard(framework_refund)

    @guard
    @api_view(["POST"])
    def outer(request: Any) -> Response:
        return Response(status=inner(post()).status_code)

    assert outer(post()).status_code == 200
