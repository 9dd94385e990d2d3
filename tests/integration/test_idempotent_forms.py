"""``idempotent_view`` for HTML forms: a key in a hidden field, and what a browser shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django import forms
from django.contrib import messages
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connections
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import redirect
from django.template import Context, Template, engines
from django.test import Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.generic import FormView
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.views import APIView

from django_dlock import BodyField, idempotent_view
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

HTML = {"accept": "text/html"}
JSON = {"accept": "application/json"}


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


def post(data: Any, *, user: User | None = None, path: str = "/pay/", **extra: Any) -> HttpRequest:
    request = RequestFactory().post(path, data, **{"headers": JSON, **extra})
    request.user = User(pk=1) if user is None else user
    return request


def post_json(data: Any, **extra: Any) -> HttpRequest:
    return post(data, content_type="application/json", **extra)


def charge(request: HttpRequest, **_: Any) -> HttpResponse:
    Effect.objects.create(order_number=1, by="view")
    return JsonResponse({"charge": Effect.objects.count()}, status=201)


def effects() -> int:
    return Effect.objects.count()


# -- the key ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_of",
    [
        post,  # multipart, which RequestFactory sends
        lambda data: post(
            "&".join(f"{name}={value}" for name, value in data.items()),
            content_type="application/x-www-form-urlencoded",
        ),
        post_json,
        lambda data: post(json.dumps(data), content_type="text/plain"),
        lambda data: post({**data, "file": SimpleUploadedFile("a.txt", b"content")}),
    ],
    ids=["multipart", "urlencoded", "json", "text", "upload"],
)
def test_g12_a_field_of_the_body_is_the_key(request_of: Callable[[Any], HttpRequest]) -> None:
    view = idempotent_view(key=BodyField())(charge)
    form = {"idempotency_key": "t1", "amount": "5"}
    assert view(request_of(form)).content == b'{"charge": 1}'
    assert view(request_of(form))["Idempotent-Replayed"] == "true"
    assert effects() == 1
    assert view(request_of({**form, "idempotency_key": "t2"})).content == b'{"charge": 2}'
    assert view(request_of({**form, "amount": "6"})).status_code == 422


def test_the_upload_can_be_read_by_the_view() -> None:
    @idempotent_view(key=BodyField("number"))
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(request.FILES["file"].read())  # type: ignore[union-attr]

    content = SimpleUploadedFile("a.txt", b"content")
    assert view(post({"number": "7", "file": content})).content == b"content"


def test_a_key_of_a_field_belongs_to_the_user() -> None:
    view = idempotent_view(key=BodyField())(charge)
    form = {"idempotency_key": "t1"}
    view(post(form, user=User(pk=1)))
    assert view(post(form, user=User(pk=2))).content == b'{"charge": 2}'


@pytest.mark.parametrize("sent", [{}, {"idempotency_key": ""}, {"idempotency_key": "x" * 201}])
def test_a_form_without_a_valid_key_is_400_and_says_what_it_lacks(sent: dict[str, str]) -> None:
    view = idempotent_view(key=BodyField())(charge)
    refused = view(post(sent))
    assert refused.status_code == 400
    assert "the field idempotency_key" in json.loads(refused.content)["detail"]
    page = view(post(sent, headers=HTML)).text
    assert "open the page that it was sent from anew" in page
    assert effects() == 0


@pytest.mark.parametrize("body", ["{", "[]", "7", '{"idempotency_key": null}', "[" * 10_000])
def test_a_body_that_has_no_fields_has_no_key(body: str) -> None:
    assert idempotent_view(key=BodyField())(charge)(post_json(body)).status_code == 400
    assert (
        idempotent_view(key=BodyField(), required=False)(charge)(post_json(body)).status_code == 201
    )


@pytest.mark.parametrize("sent", [["t1"], [], {"t": 1}, 1.5, float("nan"), True, "\ud800", 10**250])
def test_a_value_that_is_no_text_and_no_whole_number_is_no_key(sent: Any) -> None:
    """Not the last one of a list either, as it is in a form that has a field twice."""
    view = idempotent_view(key=BodyField(), required=False)(charge)
    assert view(post_json({"idempotency_key": sent})).status_code == 400


def test_the_id_of_an_event_may_be_anywhere_in_a_json_object() -> None:
    view = idempotent_view(key=BodyField("events.0.id"))(charge)
    view(post_json({"events": [{"id": 5}]}))
    assert view(post_json({"events": [{"id": 5}]}))["Idempotent-Replayed"] == "true"
    # A name with a dot of its own comes first.
    view(post_json({"events.0.id": 6, "events": [{"id": 5}]}))
    assert sorted(IdempotencyRecord.objects.values_list("key", flat=True)) == ["1/5", "1/6"]


@pytest.mark.parametrize(
    "key",
    [
        "invoice:{number}",
        ["number"],
        lambda request, number: f"invoice {number}",
        "{request.GET[invoice]}",
    ],
    ids=["template", "list", "callable", "query"],
)
def test_g12_the_key_may_be_made_from_request_and_url(key: Any) -> None:
    view = idempotent_view(key=key)(charge)

    def click(number: int) -> Any:
        return view(post({}, path=f"/pay/?invoice={number}"), number=number)

    click(7)
    assert click(7)["Idempotent-Replayed"] == "true"
    assert click(8).content == b'{"charge": 2}'


def test_a_key_without_a_value_is_400_or_runs_as_usual() -> None:
    of_query = "{request.GET[invoice]}"
    assert idempotent_view(key=of_query)(charge)(post({})).status_code == 400
    assert idempotent_view(key=of_query, required=False)(charge)(post({})).status_code == 201
    assert idempotent_view(key=lambda request: None)(charge)(post({})).status_code == 400
    assert (
        idempotent_view(key=lambda request: request.POST["x"])(charge)(post({})).status_code == 400
    )


def test_a_header_of_another_name_may_be_the_key() -> None:
    view = idempotent_view(header="X-GitHub-Delivery", required=True)(charge)
    view(post_json({}, headers={**JSON, "x-github-delivery": "d1"}))
    again = view(post_json({}, headers={**JSON, "x-github-delivery": "d1"}))
    assert again["Idempotent-Replayed"] == "true"
    refused = view(post_json({}, headers={**JSON, "idempotency-key": "d1"}))
    assert refused.status_code == 400
    assert "X-GitHub-Delivery header" in json.loads(refused.content)["detail"]


def method_view(key: Any) -> Any:
    class Pay(View):
        def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            return charge(request)

    return idempotent_view(key=key)(Pay).as_view()


def test_a_class_based_view_has_keys_of_fields_and_arguments() -> None:
    for key in (BodyField(), "{number}"):
        view = method_view(key)
        before = effects()
        view(post({"idempotency_key": "7"}), number=7)
        view(post({"idempotency_key": "7"}), number=7)
        assert effects() == before + 1
        IdempotencyRecord.objects.all().delete()


# -- what is compared ------------------------------------------------------------------------


def test_g14_only_the_named_fields_are_compared() -> None:
    view = idempotent_view(key=BodyField("id"), payload=["data.amount", "shop"])(charge)
    event = {"id": "e1", "shop": 1, "data": {"amount": 5}, "delivery": 1}
    view(post_json(event, path="/pay/?try=1"))
    again = view(post_json({**event, "delivery": 2}, path="/pay/?try=2"))
    assert again["Idempotent-Replayed"] == "true"
    for other in ({"shop": 2}, {"shop": "1"}, {"data": {"amount": 6}}, {"data": {}}):
        assert view(post_json({**event, **other})).status_code == 422
    assert view(post_json(event, path="/refund/")).status_code == 422
    assert effects() == 1


def test_the_fields_of_a_form_are_compared_with_all_their_values_and_files() -> None:
    view = idempotent_view(key=BodyField(), payload=["size", "file"])(charge)

    def form(*sizes: str, content: bytes = b"x", note: str = "") -> HttpRequest:
        file = SimpleUploadedFile("a.txt", content)
        return post({"idempotency_key": "t", "size": sizes, "file": file, "note": note})

    view(form("1", "2"))
    assert view(form("1", "2", note="other"))["Idempotent-Replayed"] == "true"
    assert view(form("2", "1")).status_code == 422
    assert view(form("1")).status_code == 422
    assert view(form("1", "2", content=b"y")).status_code == 422


def test_an_empty_list_compares_method_and_path_only() -> None:
    view = idempotent_view(header="X-Event", payload=[])(charge)
    view(post_json({"try": 1}, headers={**JSON, "x-event": "1"}))
    assert "Idempotent-Replayed" in view(post_json({"try": 2}, headers={**JSON, "x-event": "1"}))
    other = post_json({}, headers={**JSON, "x-event": "1"}, path="/refund/")
    assert view(other).status_code == 422


@pytest.mark.parametrize("body", ["{", "7", '{"other": 1}'])
def test_a_body_without_any_of_the_fields_is_compared_whole(body: str) -> None:
    view = idempotent_view(payload=["amount"])(charge)
    headers = {**JSON, "idempotency-key": "k"}
    view(post_json(body, headers=headers))
    assert "Idempotent-Replayed" in view(post_json(body, headers=headers))
    assert view(post_json(body + " ", headers=headers)).status_code == 422


def test_a_callable_says_what_is_compared() -> None:
    view = idempotent_view(
        key="{number}", payload=lambda request, number: {"amount": request.POST["amount"]}
    )(charge)
    view(post({"amount": "5", "note": "a"}), number=7)
    assert "Idempotent-Replayed" in view(post({"amount": "5", "note": "b"}), number=7)
    assert view(post({"amount": "6"}), number=7).status_code == 422


@pytest.mark.parametrize("value", [None, object(), {1: object()}])
def test_a_callable_that_returns_nothing_to_compare_is_an_error(value: Any) -> None:
    view = idempotent_view(key="{number}", payload=lambda request, number: value)(charge)
    with pytest.raises(TypeError, match="no stable form"):
        view(post({}), number=7)
    assert effects() == 0


# -- a form that is shown again --------------------------------------------------------------


class Amount(forms.Form):
    amount = forms.IntegerField(max_value=100)


@idempotent_view(key=BodyField(), if_contended="wait", done_if="redirect")
class Pay(FormView):
    form_class, success_url = Amount, "/thanks/"

    def render_to_response(self, context: Any, **_: Any) -> HttpResponse:
        page = "{% load dlock %}{% idempotency_key %}{{ form.errors }}"
        return HttpResponse(Template(page).render(Context(context)))

    def form_valid(self, form: Amount) -> HttpResponse:
        Effect.objects.create(order_number=form.cleaned_data["amount"], by="form")
        messages.success(self.request, "Paid <b>.")
        return super().form_valid(form)

    def form_invalid(self, form: Amount) -> HttpResponse:
        Effect.objects.create(order_number=0, by="attempt")
        return super().form_invalid(form)


def thanks(request: HttpRequest) -> HttpResponse:
    return HttpResponse("; ".join(str(message) for message in messages.get_messages(request)))


class OnMethod(View):
    @method_decorator(idempotent_view(key=BodyField(), done_if="redirect"))
    def post(self, request: HttpRequest) -> HttpResponse:
        Effect.objects.create(order_number=1, by="method")
        return redirect("/thanks/") if request.POST["amount"] == "5" else HttpResponse("wrong")


class ReadsTheBody(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return bool(request.data)


class OfFramework(APIView):
    authentication_classes = [SessionAuthentication]
    permission_classes = [ReadsTheBody]

    @method_decorator(idempotent_view(key=BodyField("event.id"), payload=["event.amount"]))
    def post(self, request: Any) -> Response:
        Effect.objects.create(order_number=request.data["event"]["amount"], by="framework")
        return Response({"try": request.data["try"]})


urlpatterns = [
    path("pay/", Pay.as_view()),
    path("method/", OnMethod.as_view()),
    path("framework/", OfFramework.as_view()),
    path("thanks/", thanks),
]


@pytest.fixture
def customer(settings: Any) -> Client:
    settings.ROOT_URLCONF = __name__
    client = Client(enforce_csrf_checks=False)
    client.force_login(User.objects.create_user("ada"))
    return client


def token_in(page: Any) -> str:
    found = re.search(r'name="idempotency_key" value="(\w+)"', page.text)
    assert found
    return found[1]


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "same"])
def test_g13_a_form_that_was_corrected_can_be_sent_again(customer: Client, fresh: bool) -> None:
    """With the token of the page that shows the errors, or, after Back, with the first one."""
    token = token_in(customer.get("/pay/"))
    wrong = customer.post("/pay/", {"idempotency_key": token, "amount": 500})
    assert wrong.status_code == 200
    assert "less than or equal to 100" in wrong.text
    assert IdempotencyRecord.objects.count() == 0
    assert effects() == 0
    corrected = {"idempotency_key": token_in(wrong) if fresh else token, "amount": 50}
    for _ in range(2):
        assert customer.post("/pay/", corrected)["Location"] == "/thanks/"
    assert effects() == 1
    # Now it is done, so other values are another request.
    assert customer.post("/pay/", {**corrected, "amount": 60}).status_code == 422


def test_g13_on_a_method_in_a_transaction_of_the_request_a_form_can_be_corrected_too(
    customer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    assert customer.post("/method/", {"idempotency_key": "t", "amount": 4}).text == "wrong"
    assert (IdempotencyRecord.objects.count(), effects()) == (0, 0)
    for _ in range(2):
        assert customer.post("/method/", {"idempotency_key": "t", "amount": 5}).status_code == 302
    assert effects() == 1


def test_a_field_is_found_below_rest_framework(customer: Client) -> None:
    answers = [
        customer.post(
            "/framework/",
            {"event": {"id": "e1", "amount": amount}, "try": number},
            content_type="application/json",
        )
        for number, amount in enumerate([5, 5, 6])
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert answers[1].json() == {"try": 0}
    assert effects() == 1


def test_every_page_has_a_new_token(customer: Client) -> None:
    assert token_in(customer.get("/pay/")) != token_in(customer.get("/pay/"))


def test_a_message_is_shown_although_the_browser_has_dropped_the_first_answer(
    customer: Client,
) -> None:
    form = {"idempotency_key": token_in(customer.get("/pay/")), "amount": 5}
    customer.post("/pay/", form)
    # The message was in its cookie.
    customer.cookies.pop("messages")
    assert customer.post("/pay/", form)["Idempotent-Replayed"] == "true"
    assert customer.get("/thanks/").text == "Paid <b>."
    # It is not shown twice.
    customer.post("/pay/", form)
    customer.post("/pay/", form)
    assert customer.get("/thanks/").text == "Paid <b>."


def test_messages_in_the_session_are_left_there(customer: Client, settings: Any) -> None:
    settings.MESSAGE_STORAGE = "django.contrib.messages.storage.session.SessionStorage"
    form = {"idempotency_key": "t", "amount": 5}
    for _ in range(2):
        customer.post("/pay/", form)
    assert customer.get("/thanks/").text == "Paid <b>."


@pytest.mark.parametrize("changed", [False, True], ids=["read", "changed"])
def test_a_repeated_answer_keeps_what_the_first_request_wrote_into_the_session(
    changed: bool,
) -> None:
    """The second request has read the session before, with its user."""

    @idempotent_view(key=BodyField())
    def view(request: HttpRequest) -> HttpResponse:
        request.session["paid"] = 7
        return redirect("/thanks/")

    session = SessionStore()
    session.create()
    requests = []
    for _ in range(2):
        request = post({"idempotency_key": "t"})
        request.session = SessionStore(session.session_key)
        assert request.session.get("paid") is None
        requests.append(request)
    if changed:
        requests[1].session["seen"] = 1
    for request in requests:
        assert view(request).status_code == 302
        assert request.session.accessed
        # As the middleware does with SESSION_SAVE_EVERY_REQUEST.
        request.session.save()
    stored = SessionStore(session.session_key)
    # What this request has written itself is not lost either.
    assert (stored.get("paid"), stored.get("seen")) == ((None, 1) if changed else (7, None))


def test_a_callable_says_which_answers_mean_done() -> None:
    answers = iter([HttpResponse("again"), HttpResponse("done")])

    @idempotent_view(key=BodyField(), done_if=lambda response: response.content == b"done")
    def view(request: HttpRequest) -> HttpResponse:
        return next(answers)

    form = {"idempotency_key": "t"}
    assert [view(post(form)).text for _ in range(3)] == ["again", "done", "done"]


async def test_an_async_form_that_was_corrected_can_be_sent_again() -> None:
    answers = iter([HttpResponse("again"), HttpResponseRedirect("/thanks/")])

    @idempotent_view(key=BodyField(), done_if="redirect", if_contended="wait")
    async def view(request: HttpRequest) -> HttpResponse:
        return next(answers)

    form = {"idempotency_key": "t"}
    assert (await view(post({**form, "amount": 1}))).status_code == 200
    for _ in range(2):
        assert (await view(post({**form, "amount": 2}))).status_code == 302


def test_messages_of_a_stored_answer_that_somebody_has_changed_are_left_out(
    customer: Client,
) -> None:
    form = {"idempotency_key": "t", "amount": 5}
    customer.post("/pay/", form)
    customer.cookies.pop("messages")
    record = IdempotencyRecord.objects.get()
    stored = json.loads(record.result)
    stored["messages"] = [["high", 5], stored["messages"][0], None]
    IdempotencyRecord.objects.update(result=json.dumps(stored))
    assert customer.post("/pay/", form).status_code == 302
    assert customer.get("/thanks/").text == "Paid <b>."


# -- the page of a refusal -------------------------------------------------------------------


def test_a_project_may_have_its_own_page(settings: Any) -> None:
    settings.TEMPLATES = [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "OPTIONS": {
                "loaders": [
                    (
                        "django.template.loaders.locmem.Loader",
                        {"django_dlock/refused.html": "{{ page.heading }}|{{ problem.status }}"},
                    )
                ]
            },
        }
    ]
    assert engines.all()
    view = idempotent_view(key=BodyField())(charge)
    assert view(post({}, headers=HTML)).text == "This request is incomplete|400"


def test_a_visitor_who_is_not_known_reads_what_to_do() -> None:
    view = idempotent_view(key=BodyField(), client=lambda request: None)(charge)
    sent = {"idempotency_key": "t1"}
    answer = view(post(sent, headers=HTML))
    assert answer.status_code == 401
    assert "not carried out" in answer.text
    assert "log in" in answer.text
    assert "Unauthorized" not in answer.text
    detail = json.loads(view(post(sent, headers=JSON)).content)
    assert (detail["title"], detail["detail"]) == ("Unauthorized", "Authentication is required.")


def test_the_page_needs_no_static_files(settings: Any) -> None:
    view = idempotent_view(key=BodyField())(charge)
    settings.STORAGES = {
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.ManifestStaticFilesStorage"}
    }
    refused = view(post({}, headers=HTML))
    assert refused.status_code == 400
    assert "stylesheet" not in refused.text


def test_the_page_tells_people_not_to_send_again() -> None:
    view = idempotent_view(key=BodyField())(lambda request: redirect("/thanks/"))
    view(post({"idempotency_key": "t", "amount": 1}, headers=HTML))
    refused = view(post({"idempotency_key": "t", "amount": 2}, headers=HTML))
    assert refused.status_code == 422
    assert "<h1>This form was sent before</h1>" in refused.text
    assert "Please do not send it again" in refused.text
    IdempotencyRecord.objects.update(result="")
    refused = view(post({"idempotency_key": "t", "amount": 1}, headers=HTML))
    assert refused.status_code == 409
    assert "Please do not send it again: it is done." in refused.text
