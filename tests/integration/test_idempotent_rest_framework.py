"""``idempotent_view`` on the views of Django REST framework."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, JsonResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from django_dlock import idempotent_view
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


class TokenOfFirstUser(BaseAuthentication):
    def authenticate(self, request: Any) -> tuple[User, str]:
        return User(pk=1), "token"


def charge(request: Any, order_number: int) -> Response:
    if "amount" not in request.data:
        raise ValidationError({"amount": "missing"})
    Effect.objects.create(order_number=order_number, by="view")
    return Response({"charge": Effect.objects.count()}, status=201, headers={"Location": "/1/"})


class OnMethod(APIView):
    authentication_classes = [TokenOfFirstUser]

    @method_decorator(idempotent_view)
    def post(self, request: Any, order_number: int) -> Response:
        return charge(request, order_number)


class InEnvelope(OnMethod):
    def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(response, Response):
            response.data = {"order": kwargs["order_number"], "data": response.data}
            response = Response(response.data, response.status_code, headers=dict(response.items()))
        return super().finalize_response(request, response, *args, **kwargs)


class Plain(APIView):
    def post(self, request: Any, order_number: int) -> Response:
        return charge(request, order_number)


VIEWS = {
    "method": OnMethod.as_view(),
    "own finalize_response": InEnvelope.as_view(),
    "below api_view": api_view(["POST"])(
        authentication_classes([TokenOfFirstUser])(idempotent_view(charge))
    ),
    "as_view()": idempotent_view(client="all")(Plain.as_view()),
}


class AsPlainResponse(OnMethod):
    def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        response = super().finalize_response(request, response, *args, **kwargs)
        return JsonResponse(response.data) if isinstance(response, Response) else response


def post(body: str = '{"amount": 1}', method: str = "POST") -> HttpRequest:
    headers = {"accept": "application/json", "idempotency-key": "k1"}
    return RequestFactory().generic(
        method, "/pay/", body, content_type="application/json", headers=headers
    )


@pytest.mark.parametrize("kind", VIEWS)
def test_g12_the_answer_of_a_rest_framework_view_is_repeated(kind: str) -> None:
    first, second = (VIEWS[kind](post(), order_number=7) for _ in range(2))
    expected = b'{"charge":1}'
    if kind == "own finalize_response":
        expected = b'{"order":7,"data":{"charge":1}}'
    for answer in first, second:
        assert (answer.status_code, answer.content) == (201, expected)
        assert (answer["Content-Type"], answer["Location"]) == ("application/json", "/1/")
        assert answer["Vary"] == "Accept"
    assert ("Idempotent-Replayed" in first, second["Idempotent-Replayed"]) == (False, "true")
    assert Effect.objects.count() == 1


def test_g12_a_method_of_its_own_has_keys() -> None:
    @api_view(["MOVE"])
    @idempotent_view(client="all")
    def move(request: Any) -> Response:
        return charge(request, 7)

    answers = [move(post(method="MOVE")).content for _ in range(2)]
    assert [json.loads(answer) for answer in answers] == [{"charge": 1}] * 2


def test_finalize_response_may_return_a_plain_response() -> None:
    view = AsPlainResponse.as_view()
    assert [json.loads(view(post(), order_number=7).content) for _ in range(2)] == [
        {"charge": 1}
    ] * 2


class Vote(APIView):
    @method_decorator(idempotent_view(client="all"))
    def post(self, request: Any, **arguments: int) -> Response:
        return Response(arguments)


@pytest.mark.parametrize("name", ["answer", "finalized", "view"])
def test_arguments_of_the_url_may_have_any_name(name: str) -> None:
    answers = [Vote.as_view()(post(), **{name: 7}).content for _ in range(2)]
    assert [json.loads(answer) for answer in answers] == [{name: 7}] * 2


@pytest.mark.parametrize("kind", VIEWS)
def test_an_exception_of_rest_framework_is_its_answer(kind: str) -> None:
    answer = VIEWS[kind](post("{}"), order_number=7).render()
    assert answer.status_code == 400
    assert b"missing" in answer.content
    assert Effect.objects.count() == 0
