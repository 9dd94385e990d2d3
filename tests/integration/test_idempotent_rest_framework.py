"""``idempotent_view`` on the views of Django REST framework."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, JsonResponse
from django.http.request import RawPostDataException
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import (
    action,
    api_view,
    authentication_classes,
    parser_classes,
    permission_classes,
)
from rest_framework.exceptions import ValidationError
from rest_framework.parsers import BaseParser, FormParser, JSONParser, MultiPartParser
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_dlock import BodyField, idempotent_view
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


# -- the body is parsed before the decorator compares it ------------------------------------------


class ReadsData(BasePermission):
    """As permissions do that ask for the owner of what the body names."""

    def has_permission(self, request: Any, view: Any) -> bool:
        return "amount" in request.data


class PlainText(BaseParser):
    media_type = "text/plain"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        return {"amount": stream.read().decode()}


class Binary(PlainText):
    media_type = "application/octet-stream"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        return {"amount": object(), "read": stream.read()}


def amount_of(request: Any) -> Response:
    Effect.objects.create(order_number=7, by="view")
    return Response({"charge": Effect.objects.count()})


class EarlyMethod(APIView):
    permission_classes = [ReadsData]
    parser_classes = [JSONParser, FormParser, MultiPartParser, PlainText, Binary]

    @method_decorator(idempotent_view(client="all"))
    def post(self, request: Any) -> Response:
        return amount_of(request)

    @method_decorator(idempotent_view(client="all"))
    def put(self, request: Any) -> Response:
        return amount_of(request)


class EarlySet(ViewSet):
    permission_classes = [ReadsData]
    parser_classes = EarlyMethod.parser_classes

    @action(detail=False, methods=["post", "put"])
    @method_decorator(idempotent_view(client="all"))
    def pay(self, request: Any) -> Response:
        return amount_of(request)


EARLY = {
    "method": EarlyMethod.as_view(),
    "below api_view": api_view(["POST", "PUT"])(
        permission_classes([ReadsData])(
            parser_classes(EarlyMethod.parser_classes)(idempotent_view(client="all")(amount_of))
        )
    ),
    "action": EarlySet.as_view({"post": "pay", "put": "pay"}),
}

BODIES: dict[str, tuple[Any, str]] = {
    "JSON": ({"amount": 1, "items": [1.5, None, "é"]}, "json"),
    "form": ("amount=1&item=2&item=3", "application/x-www-form-urlencoded"),
    "upload": ({"amount": "1", "item": ["2", "3"], "file": b"receipt"}, "multipart"),
    "own-parser": ("1", "text/plain"),
}
OTHERS: dict[str, Any] = {
    "JSON": {"amount": 1, "items": [1.5, None, "e"]},
    "form": "amount=1&item=3&item=2",
    "upload": {"amount": "1", "item": ["2", "3"], "file": b"another receipt"},
    "own-parser": "2",
}


def early(method: str, body: Any, kind: str) -> HttpRequest:
    """A request whose body is sent as another multipart text each time."""
    factory = APIRequestFactory()
    headers = {"idempotency-key": "k1", "accept": "application/json"}
    if isinstance(body, dict) and "file" in body:
        body = {**body, "file": SimpleUploadedFile("receipt.txt", body["file"])}
    send = getattr(factory, method)
    given = {"format": kind} if "/" not in kind else {"content_type": kind}
    request: HttpRequest = send("/pay/", body, headers=headers, **given)
    return request


@pytest.mark.parametrize("method", ["post", "put"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", EARLY)
def test_g12_a_permission_may_read_the_data_before(kind: str, body: str, method: str) -> None:
    data, content_type = BODIES[body]
    answers = [EARLY[kind](early(method, data, content_type)) for _ in range(2)]
    assert [(each.status_code, each.content) for each in answers] == [(200, b'{"charge":1}')] * 2
    other = EARLY[kind](early(method, OTHERS[body], content_type))
    assert other.status_code == 422
    assert Effect.objects.count() == 1


class KeyInBody(APIView):
    """The key is a field, and only the fields are compared."""

    parser_classes = EarlyMethod.parser_classes

    def pay(self, request: Any) -> Response:
        return amount_of(request)

    post = put = method_decorator(
        idempotent_view(key=BodyField("amount"), payload=["item", "items", "file"], client="all")
    )(pay)


class KeyInReadBody(KeyInBody):
    permission_classes = [ReadsData]


@pytest.mark.parametrize("method", ["post", "put"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", [KeyInBody, KeyInReadBody])
def test_g12_the_key_is_a_field_of_what_rest_framework_parses(
    kind: Any, body: str, method: str
) -> None:
    data, content_type = BODIES[body]
    answers = [kind.as_view()(early(method, data, content_type)) for _ in range(2)]
    assert [(each.status_code, each.content) for each in answers] == [(200, b'{"charge":1}')] * 2
    other = kind.as_view()(early(method, OTHERS[body], content_type))
    # The amount is the whole body of this one, so it has another key.
    assert other.status_code == (200 if body == "own-parser" else 422)


def test_what_has_no_stable_form_is_named_before_the_view_runs() -> None:
    with pytest.raises(RawPostDataException, match=r"a middleware read request\.body first"):
        EARLY["method"](early("post", "1", "application/octet-stream"))
    assert Effect.objects.count() == 0
