"""``idempotent_view``: one run and one answer for each ``Idempotency-Key`` of a client."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import DatabaseError, connection, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.request import RawPostDataException
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory, override_settings
from django.test.client import MULTIPART_CONTENT, encode_multipart
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache

from django_dlock import BackendUnavailable, Lock, idempotent_view, locked_view, locks
from django_dlock.models import IdempotencyRecord
from django_dlock.operators.inspection import break_lease
from django_dlock.records import idempotency, retention
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

JSON = {"accept": "application/json"}


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


def post(
    key: str | None = "k1",
    *,
    user: Any = None,
    body: str = "{}",
    path: str = "/pay/",
    method: str = "POST",
    **meta: Any,
) -> HttpRequest:
    headers = JSON if key is None else {**JSON, "idempotency-key": key}
    request = RequestFactory().generic(
        method, path, body, content_type="application/json", headers=headers, **meta
    )
    request.user = User(pk=1) if user is None else user
    return request


def charge(request: HttpRequest, status: int = 201) -> HttpResponse:
    Effect.objects.create(order_number=1, by="view")
    response = JsonResponse({"charge": Effect.objects.count()}, status=status)
    response["Location"] = "/charges/1/"
    return response


def effects() -> int:
    return Effect.objects.count()


def states() -> list[str]:
    return list(IdempotencyRecord.objects.values_list("state", flat=True))


def as_async(view: Any, **options: Any) -> Any:
    async def aview(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        from asgiref.sync import sync_to_async

        return await sync_to_async(view)(request, *args, **kwargs)

    guarded = idempotent_view(**options)(aview)
    return lambda *args, **kwargs: asyncio.run(guarded(*args, **kwargs))


def as_sync(view: Any, **options: Any) -> Any:
    return idempotent_view(**options)(view)


each_kind = pytest.mark.parametrize("make", [as_sync, as_async], ids=["sync", "async"])


@each_kind
def test_g12_the_first_answer_is_repeated_with_status_and_headers(make: Any) -> None:
    view = make(charge)
    first, second = view(post()), view(post())
    assert (first.status_code, first.content) == (201, b'{"charge": 1}')
    assert (second.status_code, second.content) == (201, b'{"charge": 1}')
    assert second["Location"] == "/charges/1/"
    assert second["Content-Type"] == "application/json"
    assert ("Idempotent-Replayed" in first, second["Idempotent-Replayed"]) == (False, "true")
    assert effects() == 1
    assert states() == ["succeeded"]
    assert locks["default"].list() == []


@each_kind
def test_arguments_of_the_url_may_have_any_name(make: Any) -> None:
    view = make(lambda request, response: HttpResponse(response))
    assert view(post(), response="7").content == b"7"


def test_keys_belong_to_a_client() -> None:
    view = idempotent_view(charge)
    assert view(post(user=User(pk=1))).content == b'{"charge": 1}'
    assert view(post(user=User(pk=2))).content == b'{"charge": 2}'
    # Not a sum of strings: client 1 with key "2/x" is not client "1/2" with key "x".
    by_client = idempotent_view(client=lambda request: request.user.username)(charge)
    by_client(post("2/x", user=User(username="1")))
    by_client(post("x", user=User(username="1/2")))
    assert effects() == 4


def test_a_key_with_and_without_quotes_is_the_same() -> None:
    view = idempotent_view(charge)
    view(post("k1"))
    view(post('"k1"'))
    assert effects() == 1


@each_kind
@pytest.mark.parametrize(
    "other",
    [{"body": '{"amount": 2}'}, {"path": "/refund/"}, {"path": "/pay/?amount=2"}],
    ids=["body", "path", "query"],
)
def test_g14_the_same_key_with_another_request_is_422(make: Any, other: dict[str, Any]) -> None:
    view = make(charge)
    view(post())
    refused = view(post(**other))
    assert refused.status_code == 422
    assert refused["Content-Type"] == "application/problem+json"
    assert effects() == 1


def test_a_key_in_progress_is_409() -> None:
    answers: list[HttpResponse] = []

    def click() -> None:
        answers.append(guarded(post()))
        connection.close()

    def view(request: HttpRequest) -> HttpResponse:
        other = threading.Thread(target=click)
        other.start()
        other.join()
        return charge(request)

    guarded = idempotent_view(view)
    assert guarded(post()).status_code == 201
    assert [answer.status_code for answer in answers] == [409]
    assert int(answers[0]["Retry-After"]) >= 1
    assert effects() == 1


def test_a_key_in_progress_is_409_for_coroutines() -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    @idempotent_view
    async def view(request: HttpRequest) -> HttpResponse:
        begun.set()
        await goes_on.wait()
        return HttpResponse("done")

    async def click_twice() -> list[int]:
        first = asyncio.create_task(view(post()))
        await begun.wait()
        second = await view(post())
        goes_on.set()
        return [(await first).status_code, second.status_code, (await view(post())).status_code]

    assert asyncio.run(click_twice()) == [200, 409, 200]


@pytest.mark.parametrize("key", ["", "a b", "ä", "x" * 201, '"', '"a'])
def test_a_malformed_key_is_400(key: str) -> None:
    request = post(None)
    request.META["HTTP_IDEMPOTENCY_KEY"] = key
    assert idempotent_view(charge)(request).status_code == 400
    assert effects() == 0


def test_a_missing_key_is_400_only_where_it_is_required() -> None:
    assert idempotent_view(required=True)(charge)(post(None)).status_code == 400
    assert idempotent_view(charge)(post(None)).status_code == 201
    assert effects() == 1
    assert states() == []


@each_kind
@pytest.mark.parametrize("method", ["PUT", "MOVE", "QUERY", "FOO"])
def test_g12_every_method_that_is_not_known_to_be_safe_has_keys(make: Any, method: str) -> None:
    view = make(charge)
    assert view(post(method=method)).content == b'{"charge": 1}'
    assert view(post(method=method)).content == b'{"charge": 1}'
    assert effects() == 1


def test_g12_a_class_based_view_with_a_method_of_its_own_has_keys() -> None:
    @idempotent_view(required=True)
    class Pay(View):
        http_method_names = ["get", "move"]

        def move(self, request: HttpRequest) -> HttpResponse:
            return charge(request)

    view: Any = Pay.as_view()
    assert view(post(None, method="MOVE")).status_code == 400
    view(post(method="MOVE"))
    view(post(method="MOVE"))
    assert effects() == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
def test_safe_methods_have_no_key(method: str) -> None:
    view = idempotent_view(required=True)(lambda request: HttpResponse("page"))
    assert view(post(None, method=method)).content == b"page"


def test_methods_that_are_not_named_have_no_key() -> None:
    only_put = idempotent_view(methods=["PUT"])(charge)
    only_put(post())
    only_put(post())
    assert effects() == 2


@each_kind
@pytest.mark.parametrize("status", [500, 503, 429, 409, 401])
def test_g13_an_answer_that_is_not_final_is_not_stored(make: Any, status: int) -> None:
    given = iter([status, 201])
    view = make(lambda request: charge(request, next(given)))
    assert view(post()).status_code == status
    assert states() == ["failed"]
    assert view(post()).status_code == 201
    assert states() == ["succeeded"]
    # What the first one wrote was rolled back; an async view has no transaction.
    assert effects() == (1 if make is as_sync else 2)


@pytest.mark.parametrize("status", [200, 400])
def test_g13_an_answer_whose_transaction_the_view_has_rolled_back_is_not_stored(
    status: int,
) -> None:
    statuses = iter([status, 201])

    def view(request: HttpRequest) -> HttpResponse:
        response = charge(request, next(statuses))
        # As the exceptions of REST framework do with ATOMIC_REQUESTS.
        transaction.set_rollback(response.status_code == status)
        return response

    guarded = idempotent_view(view)
    assert guarded(post()).status_code == status
    assert (effects(), states()) == (0, ["failed"])
    assert guarded(post()).status_code == 201
    assert (effects(), states()) == (1, ["succeeded"])


def test_a_client_error_is_an_answer() -> None:
    view = idempotent_view(lambda request: HttpResponse("no such card", status=400))
    view(post())
    again = view(post())
    assert (again.status_code, again.content) == (400, b"no such card")


@each_kind
def test_g13_an_exception_lets_the_key_be_tried_again(make: Any) -> None:
    fails = [True]

    def view(request: HttpRequest) -> HttpResponse:
        response = charge(request)
        if fails.pop() if fails else False:
            raise ValueError("card reader")
        return response

    guarded = make(view)
    with pytest.raises(ValueError, match="card reader"):
        guarded(post())
    assert "card reader" in IdempotencyRecord.objects.get().error
    assert guarded(post()).status_code == 201
    assert effects() == (1 if make is as_sync else 2)
    assert locks["default"].list() == []


def test_g13_a_request_that_is_cancelled_while_it_claims_the_key_leaves_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claimed, go_on, claim = threading.Event(), threading.Event(), idempotency.claim

    def slow(*args: Any, **kwargs: Any) -> Any:
        answer = claim(*args, **kwargs)
        claimed.set()
        assert go_on.wait(20)
        return answer

    @idempotent_view(on_disconnect="cancel")
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("ok")

    async def client_disconnects() -> None:
        running = asyncio.create_task(view(post()))
        assert await asyncio.to_thread(claimed.wait, 20)
        running.cancel()
        # Let the task notice, while the thread is still at work.
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    with monkeypatch.context() as patched:
        patched.setattr(idempotency, "claim", slow)
        asyncio.run(client_disconnects())
    assert states() == ["failed"]
    assert locks["default"].list() == []
    assert asyncio.run(view(post())).content == b"ok"
    assert IdempotencyRecord.objects.get().deaths == 0


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("no file \udc80"), r"OSError: no file \udc80"),
        (ValueError("a\0b"), r"ValueError: a\x00b"),
        (_Unprintable(), "_Unprintable"),
    ],
    ids=["surrogate", "nul", "unprintable"],
)
def test_g13_an_error_whose_text_no_database_stores_is_raised_and_recorded(
    error: Exception, text: str
) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        raise error

    with pytest.raises(type(error)) as caught:
        idempotent_view(view)(post())
    assert caught.value is error
    record = IdempotencyRecord.objects.get()
    assert (record.state, record.error) == ("failed", text)


def test_g12_a_lost_lease_turns_no_committed_answer_into_a_failure() -> None:
    def view(request: HttpRequest) -> HttpResponse:
        (info,) = locks["default"].list()
        assert break_lease(info, reason="operator")
        return charge(request)

    guarded = idempotent_view(view)
    assert guarded(post()).status_code == 201
    assert guarded(post()).content == b'{"charge": 1}'
    assert effects() == 1


def test_g12_a_run_that_was_overtaken_is_rolled_back() -> None:
    inner = [True]

    def view(request: HttpRequest) -> HttpResponse:
        response = charge(request)
        if inner.pop() if inner else False:
            (info,) = locks["default"].list()
            assert break_lease(info, reason="operator")
            # As another process would, now that the lease is free.
            IdempotencyRecord.objects.update(attempt=2)
        return response

    guarded = idempotent_view(view)
    assert guarded(post()).status_code == 409
    assert effects() == 0


def test_g12_an_unanswered_commit_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = type(connections["default"])
    commit = wrapper._commit

    def unanswered(self: Any) -> Any:
        done = commit(self)
        if states() == ["succeeded"]:
            raise DatabaseError("connection lost")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "_commit", unanswered)
        assert idempotent_view(charge)(post()).status_code == 201
    assert effects() == 1
    assert states() == ["succeeded"]


@each_kind
def test_an_anonymous_client_has_to_log_in(make: Any) -> None:
    assert make(charge)(post(user=AnonymousUser())).status_code == 403
    assert effects() == 0


@pytest.mark.parametrize("of_alias", ["raise", "local", "skip"])
@pytest.mark.parametrize("status", ["raise", 503])
def test_g14_a_backend_that_does_not_answer(
    status: Any, of_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of this process only would let two processes run the same request."""

    def acquire(*args: Any, **kwargs: Any) -> Any:
        raise BackendUnavailable("No answer", "it", "default")

    monkeypatch.setattr(locks["default"], "acquire", acquire)
    options = dataclasses.replace(locks["default"].options, if_unavailable=of_alias)
    monkeypatch.setattr(locks["default"], "options", options)
    view = idempotent_view(if_unavailable=status)(charge)
    if status == "raise":
        with pytest.raises(BackendUnavailable):
            view(post())
    else:
        assert view(post()).status_code == 503
    assert effects() == 0


@each_kind
@pytest.mark.parametrize("status", ["raise", 503])
def test_g14_a_backend_that_no_longer_answers_when_the_key_is_claimed(
    make: Any, status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about the run that the record names, when the lock is held already."""

    def holds(*args: Any) -> bool:
        raise BackendUnavailable("No answer", "it", "default")

    guarded = make(charge, if_unavailable=status)
    guarded(post())
    IdempotencyRecord.objects.update(state="running")
    monkeypatch.setattr(retention, "holds", holds)
    if status == "raise":
        with pytest.raises(BackendUnavailable):
            guarded(post())
    else:
        assert guarded(post()).status_code == 503
    assert effects() == 1


def test_a_template_is_rendered_before_it_is_stored() -> None:
    template = engines["django"].from_string("{{ count }}")
    view = idempotent_view(lambda request: TemplateResponse(request, template, {"count": 7}))
    view(post())
    assert view(post()).content == b"7"


@pytest.mark.parametrize("read_before", [False, True])
def test_a_form_is_compared_by_its_fields_and_the_contents_of_its_files(read_before: bool) -> None:
    def upload(content: bytes, name: str = "a") -> HttpRequest:
        boundary = f"b{next(boundaries)}"
        form = {"name": name, "file": SimpleUploadedFile("a.txt", content)}
        request = RequestFactory().generic(
            "POST",
            "/pay/",
            encode_multipart(boundary, form),
            content_type=f"multipart/form-data; boundary={boundary}",
            headers={"idempotency-key": "k1"},
        )
        request.user = User(pk=1)
        if read_before:
            # As the CSRF middleware does.
            assert request.POST["name"] == name
        return request

    boundaries = itertools.count()
    read: list[bytes] = []

    def view(request: HttpRequest) -> HttpResponse:
        read.append(request.FILES["file"].read())
        return HttpResponse("stored")

    guarded = idempotent_view(view)
    assert guarded(upload(b"one")).status_code == 200
    # A client that repeats a form chooses another boundary.
    assert guarded(upload(b"one")).status_code == 200
    assert guarded(upload(b"two")).status_code == 422
    assert guarded(upload(b"one", "b")).status_code == 422
    assert read == [b"one"]


def test_a_file_may_be_larger_than_what_is_read_into_memory() -> None:
    request = RequestFactory().post(
        "/pay/",
        {"file": SimpleUploadedFile("a.txt", b"x" * 2000)},
        headers={"idempotency-key": "k1"},
    )
    request.user = User(pk=1)
    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=1000):
        response = idempotent_view(lambda request: HttpResponse(request.FILES["file"].read()))(
            request
        )
    assert response.content == b"x" * 2000


@pytest.mark.parametrize("kind", ["json", "x-www-form-urlencoded", "form-data"])
def test_g14_a_body_that_was_read_as_a_stream_is_not_taken_for_an_empty_one(kind: str) -> None:
    request = post(body='{"amount": 5}')
    if kind != "json":
        data = {"amount": "5"} if kind == "form-data" else "amount=5"
        content_type = MULTIPART_CONTENT if kind == "form-data" else f"application/{kind}"
        headers = {"idempotency-key": "k1"}
        request = RequestFactory().post("/pay/", data, content_type=content_type, headers=headers)
        request.user = User(pk=1)
    request.read()
    with pytest.raises(RawPostDataException, match="@idempotent_view compares"):
        idempotent_view(charge)(request)
    assert effects() == 0


def test_class_based_views() -> None:
    @idempotent_view
    class Pay(View):
        def post(self, request: HttpRequest) -> HttpResponse:
            return charge(request)

    @method_decorator(idempotent_view(required=True), name="dispatch")
    class Refund(View):
        pass

    for view in (Pay.as_view(), idempotent_view(View.as_view())):
        view(post("c"))
    Pay.as_view()(post("c"))
    assert effects() == 1
    assert Refund.as_view()(post(None)).status_code == 400


def test_a_method_below_another_decorator_is_idempotent() -> None:
    class Pay(View):
        @method_decorator([idempotent_view, never_cache])
        def post(self, request: HttpRequest) -> HttpResponse:
            return charge(request)

    for _ in range(2):
        assert Pay.as_view()(post()).status_code == 201
    assert effects() == 1


@each_kind
def test_a_view_that_returns_no_response_is_an_error_as_in_django(make: Any) -> None:
    def view(request: HttpRequest) -> None:
        Effect.objects.create(order_number=1, by="view")

    with pytest.raises(ValueError, match=r"The view .*view didn't return .* returned None instead"):
        make(view)(post())
    # The effects of an asynchronous view are committed.
    assert (states(), effects()) == ((["failed"], 0) if make is as_sync else (["succeeded"], 1))


def test_with_atomic_requests_the_record_is_in_the_transaction_of_the_view() -> None:
    seen: list[bool] = []

    def view(request: HttpRequest) -> HttpResponse:
        seen.append(connection.in_atomic_block)
        return charge(request)

    guarded = idempotent_view(view)
    # Django opens no transaction around it, because that would end after the release.
    assert "default" in guarded._non_atomic_requests  # type: ignore[attr-defined]
    with _atomic_requests():
        guarded(post())
        guarded(post(None))
    assert seen == [True, True]


class _atomic_requests:
    def __enter__(self) -> None:
        connection.settings_dict["ATOMIC_REQUESTS"] = True

    def __exit__(self, *_: object) -> None:
        connection.settings_dict["ATOMIC_REQUESTS"] = False


def test_checks_of_access_may_go_above() -> None:
    """Inside, their redirect to the login page would be the stored answer."""
    view = login_required(idempotent_view(client=lambda request: "shop")(charge))
    with _atomic_requests():
        assert "default" in view._non_atomic_requests  # type: ignore[attr-defined]
        assert view(post(user=AnonymousUser())).status_code == 302
        assert view(post()).status_code == 201
    assert effects() == 1


def test_a_locked_view_goes_above() -> None:
    with pytest.raises(TypeError, match="put @locked_view above @idempotent_view"):
        idempotent_view(locked_view("order:1")(charge))
    view = locked_view("order:1")(idempotent_view(charge))
    view(post())
    view(post())
    assert effects() == 1
    with Lock("order:1", bound=False):
        assert view(post()).status_code == 409


def test_records_have_a_scope_and_a_retention() -> None:
    view = idempotent_view(idempotency_scope="payments", idempotency_ttl=60)(charge)
    view(post())
    record = IdempotencyRecord.objects.get()
    assert record.scope == "payments"
    assert record.finished_at is not None
    kept = record.expires_at - record.finished_at
    assert abs(kept - dt.timedelta(seconds=60)) < dt.timedelta(seconds=1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"if_unavailable": "pass"}, "takes 'raise' or 503"),
        ({"idempotency_ttl": 0}, "more than 0 and at most [0-9]+ seconds"),
        ({"idempotency_ttl": "7d"}, "idempotency_ttl is '7d'; it takes seconds"),
        ({"idempotency_using": "nope"}, "'nope', which DATABASES does not define: 'default'"),
        ({"idempotency_scope": 5}, "idempotency_scope is 5; it takes a string"),
        ({"idempotency_scope": "s" * 256}, "at most 255 characters"),
        ({"required": "yes"}, "required is 'yes'; it takes True or False"),
        ({"methods": "post"}, "names in capitals"),
        ({"client": ""}, "client of @idempotent_view"),
        ({"client": 7}, "client of @idempotent_view"),
        ({"hold_until": "commit"}, "takes neither hold_until nor reentrant"),
        ({"on_disconnect": "stop"}, "@idempotent_view takes 'finish' or 'cancel'"),
        ({"wait": 3}, "wait is 3, but if_contended='reject' never waits"),
    ],
)
def test_wrong_options_are_refused_at_decoration(options: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        idempotent_view(**options)(charge)
