"""Whose keys they are: ``client`` of ``idempotent_view``, and requests in which it has no value."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.views import APIView

from django_dlock import idempotent_view, keyed_digest
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


def pay(request: HttpRequest) -> HttpResponse:
    return HttpResponse("paid", status=201)


def plain(client: Any) -> Any:
    return idempotent_view(client=client)(pay)


def as_async(client: Any) -> Any:
    async def apay(request: HttpRequest) -> HttpResponse:
        return await sync_to_async(pay)(request)

    guarded = idempotent_view(client=client)(apay)
    return lambda request: asyncio.run(guarded(request))


def as_class(client: Any) -> Any:
    class Pay(View):
        def post(self, request: HttpRequest) -> HttpResponse:
            return pay(request)

    return idempotent_view(client=client)(Pay).as_view()


def as_rest(client: Any) -> Any:
    class Pay(APIView):
        authentication_classes = ()
        permission_classes = ()

        @method_decorator(idempotent_view(client=client))
        def post(self, request: Any) -> HttpResponse:
            return pay(request)

    return Pay.as_view()


each_kind = pytest.mark.parametrize(
    "make", [plain, as_async, as_class, as_rest], ids=["sync", "async", "class", "REST framework"]
)


def post(user: Any = None, **headers: str) -> HttpRequest:
    given = {"accept": "application/json", "idempotency-key": "k1", **headers}
    request = RequestFactory().post("/pay/", headers=given)
    request.user = AnonymousUser() if user is None else user
    return request


def of_user(request: Any, **_: Any) -> str:
    name: str = User.objects.get(username=request.headers.get("x-name")).username
    return name


def of_keyed_digest(request: Any, **_: Any) -> str:
    return keyed_digest(request.headers.get("x-name"))


MISSING = {
    "header": "{request.headers[X-Name]}",
    "META": "{request.META[HTTP_X_NAME]}",
    "query": "{request.GET[name]}",
    "attribute": "{request.no_such}",
    "KeyError": lambda request, **_: request.headers["X-Name"],
    "None": lambda request, **_: request.headers.get("X-Name"),
    "empty": lambda request, **_: "",
    "no row": of_user,
    "keyed_digest": of_keyed_digest,
    "attribute of None": lambda request, **_: request.META.get("nobody").name,
}


@each_kind
@pytest.mark.parametrize("client", MISSING.values(), ids=MISSING)
def test_a_client_that_is_not_known_is_refused(make: Any, client: Any) -> None:
    answer = make(client)(post())
    assert answer.status_code == 401
    assert answer["Content-Type"] == "application/problem+json"
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.parametrize("client", ["{request.headers[X-Name]}", of_keyed_digest])
def test_an_empty_value_is_no_client(client: Any) -> None:
    assert plain(client)(post(**{"x-name": ""})).status_code == 401
    assert plain(client)(post(**{"x-name": "a"})).status_code == 201


def test_a_user_without_the_value_is_refused() -> None:
    """A login, which the visitor has, would not help."""
    assert plain("{request.user.account.pk}")(post(User(pk=1))).status_code == 401
    assert plain("{request.user.pk}")(post(User())).status_code == 401


def test_an_anonymous_visitor_of_a_client_that_is_a_user_has_to_log_in() -> None:
    assert plain("{request.user.pk}")(post(accept="text/html")).status_code == 302


def test_a_client_that_prefers_html_gets_a_page() -> None:
    answer = plain("{request.GET[name]}")(post(accept="text/html"))
    assert (answer.status_code, answer["Content-Type"]) == (401, "text/html; charset=utf-8")


def test_an_operator_reads_why_a_client_was_not_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "django_dlock"):
        plain(MISSING["attribute of None"])(post())
    assert "'NoneType' object has no attribute 'name'" in caplog.text
    assert "test_idempotent_clients.pay" in caplog.text


def test_an_operator_reads_no_credential(caplog: pytest.LogCaptureFixture) -> None:
    accounts: dict[str, str] = {}
    with caplog.at_level("INFO", "django_dlock"):
        plain(lambda request, **_: accounts["Bearer s3cret"])(post())
    assert "KeyError" in caplog.text
    assert "s3cret" not in caplog.text


@each_kind
def test_a_refusal_of_the_projects_own_is_not_ours(make: Any) -> None:
    def forbid(request: Any, **_: Any) -> str:
        raise PermissionDenied

    view = make(forbid)
    if make is as_rest:
        assert view(post()).status_code == 403
    else:
        with pytest.raises(PermissionDenied):
            view(post())
