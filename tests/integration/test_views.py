"""``locked_view`` with the real handlers and a real Redis: which requests run, and responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from django_dlock import DEFAULT, LeaseLost, Lock, locked_view, locks
from django_dlock.core.options import Seconds
from testproject.servers import RedisServer

pytestmark = pytest.mark.urls(__name__)


@pytest.fixture(autouse=True)
def _redis(redis_server: RedisServer) -> Iterator[None]:
    yield
    assert locks["default"].count(prefix="view:") == 0


def held(name: str) -> bool:
    return Lock(name).locked()


def answer(name: str) -> HttpResponse:
    return HttpResponse(f"{name} {held(name)}")


class Gate:
    """A view that stops in the middle until the test lets it continue."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def pass_(self) -> None:
        self.entered.set()
        assert self.go.wait(20)


gate = Gate()


@locked_view("view:{number}")
def plain(request: HttpRequest, number: int, part: str = "all") -> HttpResponse:
    return answer(f"view:{number}")


@locked_view("view:{number}:{part}")
def with_default(request: HttpRequest, number: int, part: str = "all") -> HttpResponse:
    return answer(f"view:{number}:all")


@locked_view(lambda request, number: f"view:{request.method}:{number}", status=423)
def by_callable(request: HttpRequest, number: int) -> HttpResponse:
    return answer(f"view:GET:{number}")


@locked_view("view:gated")
def gated(request: HttpRequest) -> HttpResponse:
    gate.pass_()
    return HttpResponse()


@locked_view("view:gated", if_contended="wait", wait=20)
def patient(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"waited")


@locked_view("view:short", if_contended="wait", wait=0.01)
def impatient(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@locked_view("view:{number}")
async def asynchronous(request: HttpRequest, number: int) -> HttpResponse:
    await asyncio.sleep(0)
    return await asyncio.to_thread(answer, f"view:{number}")


@locked_view("view:{request.user.pk}")
async def of_user(request: HttpRequest) -> HttpResponse:
    return HttpResponse("mine")


class Base(View):
    def get(self, request: HttpRequest, number: int) -> HttpResponse:
        return answer(f"view:{number}")


@locked_view("view:{number}")
class OnClass(Base):
    pass


@method_decorator(locked_view("view:{number}"), name="dispatch")
class OnDispatch(Base):
    pass


class OnMethod(View):
    @method_decorator(locked_view("view:{number}"))
    def get(self, request: HttpRequest, number: int) -> HttpResponse:
        return answer(f"view:{number}")


class AsyncBase(View):
    async def get(self, request: HttpRequest, number: int) -> HttpResponse:
        await asyncio.sleep(0)
        return await asyncio.to_thread(answer, f"view:{number}")


@locked_view("view:{number}")
class AsyncOnClass(AsyncBase):
    pass


@method_decorator([csrf_exempt, locked_view("view:{number}")], name="dispatch")
class AsyncOnDispatch(AsyncBase):
    pass


@locked_view("view:{number}")
class AsyncTurnedAway(AsyncBase):
    """As Django's ``LoginRequiredMixin``, returns a response from ``dispatch``, not a coroutine."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse(b"turned away")


urlpatterns = [
    path("turned-away/<int:number>/", AsyncTurnedAway.as_view()),
    path("plain/<int:number>/", plain),
    path("default/<int:number>/", with_default),
    path("callable/<int:number>/", by_callable),
    path("gated/", gated),
    path("patient/", patient),
    path("impatient/", impatient),
    path("class/<int:number>/", OnClass.as_view()),
    path("dispatch/<int:number>/", OnDispatch.as_view()),
    path("method/<int:number>/", OnMethod.as_view()),
    path("as-view/<int:number>/", locked_view("view:{number}")(Base.as_view())),
    path("async/<int:number>/", asynchronous),
    path("async-user/", of_user),
    path("async-class/<int:number>/", AsyncOnClass.as_view()),
    path("async-dispatch/<int:number>/", AsyncOnDispatch.as_view()),
    path("async-as-view/<int:number>/", locked_view("view:{number}")(AsyncBase.as_view())),
]


# -- requests that run -----------------------------------------------------------------------------

SYNC = ["plain", "class", "dispatch", "method", "as-view"]
ASYNC = ["async", "async-class", "async-dispatch", "async-as-view"]


@pytest.mark.parametrize("kind", SYNC + ASYNC)
def test_a_view_runs_under_the_lock_of_its_url_under_wsgi(kind: str) -> None:
    response = Client().get(f"/{kind}/7/")
    assert (response.status_code, response.content) == (200, b"view:7 True")
    with Lock("view:7", bound=False):
        assert Client().get(f"/{kind}/7/").status_code == 409
        assert Client().get(f"/{kind}/8/").status_code == 200


@pytest.mark.parametrize("kind", SYNC + ASYNC)
async def test_a_view_runs_under_the_lock_of_its_url_under_asgi(kind: str) -> None:
    response = await AsyncClient().get(f"/{kind}/7/")
    assert (response.status_code, response.content) == (200, b"view:7 True")
    async with Lock("view:7", bound=False):
        assert (await AsyncClient().get(f"/{kind}/7/")).status_code == 409
        assert (await AsyncClient().get(f"/{kind}/8/")).status_code == 200


async def test_an_asynchronous_view_may_return_a_response_without_a_coroutine() -> None:
    assert (await AsyncClient().get("/turned-away/7/")).content == b"turned away"


def test_a_default_of_the_view_is_a_field_of_the_key() -> None:
    assert Client().get("/default/7/").content == b"view:7:all True"


def test_a_callable_key_gets_the_arguments_of_the_view() -> None:
    assert Client().get("/callable/7/").content == b"view:GET:7 True"


def test_of_simultaneous_requests_one_is_refused_and_a_waiting_one_is_served() -> None:
    gate.entered.clear()
    gate.go.clear()
    statuses: list[int] = []

    def get(url: str) -> None:
        statuses.append(Client().get(url).status_code)

    first = threading.Thread(target=get, args=["/gated/"])
    first.start()
    assert gate.entered.wait(20)
    second = threading.Thread(target=get, args=["/gated/"])
    second.start()
    second.join()
    assert statuses == [409]
    third = threading.Thread(target=get, args=["/patient/"])
    third.start()
    while not locks["default"].list(prefix="view:gated")[0].waiting:
        threading.Event().wait(0.01)
    gate.go.set()
    first.join()
    third.join()
    assert statuses == [409, 200, 200]


def test_a_request_that_waited_in_vain_is_refused_in_the_same_way() -> None:
    with Lock("view:short", bound=False):
        response = Client().get("/impatient/")
    assert response.status_code == 409
    assert 1 <= int(response["Retry-After"]) <= 31


@pytest.mark.django_db(transaction=True)
async def test_an_asynchronous_view_may_be_locked_by_the_user_of_the_session() -> None:
    user = await User.objects.acreate_user("ada")
    client = AsyncClient()
    await client.aforce_login(user)
    assert (await client.get("/async-user/")).status_code == 200
    async with Lock(f"view:{user.pk}", bound=False):
        assert (await client.get("/async-user/")).status_code == 409


# -- refused requests ------------------------------------------------------------------------------


def refuse(accept: str = "*/*", **options: Any) -> HttpResponse:
    with Lock("view:7", bound=False):
        response: HttpResponse = Client().get(
            "/plain/7/", headers={"accept": accept} if accept else {}, **options
        )
    assert response.status_code == 409
    return response


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    "accept",
    ["application/json", "application/problem+json", "application/json, text/plain, */*"],
)
def test_a_client_that_prefers_json_gets_problem_details(accept: str) -> None:
    response = refuse(accept)
    assert response["Content-Type"] == "application/problem+json"
    problem = response.json()  # type: ignore[attr-defined]
    assert (problem["type"], problem["title"]) == ("about:blank", "Conflict")
    assert (problem["status"], problem["instance"]) == (409, "/plain/7/")
    assert problem["detail"].startswith("Another request")
    assert "view:7" not in response.text


@pytest.mark.parametrize("accept", [BROWSER, "*/*", "", "image/png"])
def test_any_other_client_gets_a_page(accept: str) -> None:
    response = refuse(accept)
    assert response["Content-Type"] == "text/html; charset=utf-8"
    assert "<h1>Another request is in progress</h1>" in response.text
    assert "please do not send it again" in response.text


def test_a_client_that_sends_json_and_accepts_anything_gets_json() -> None:
    with Lock("view:7", bound=False):
        response = Client().post("/plain/7/", {}, content_type="application/json")
    assert response["Content-Type"] == "application/problem+json"


def test_a_refusal_has_retry_after_and_varies_on_accept() -> None:
    response = refuse()
    assert 1 <= int(response["Retry-After"]) <= 31
    assert "Accept" in response["Vary"]


def test_retry_after_of_a_request_that_began_just_now_is_short() -> None:
    with Lock("view:7", ttl=3600, renew=False, bound=False):
        assert Client().get("/plain/7/")["Retry-After"] == "1"


def test_retry_after_is_the_end_of_a_lease_that_is_not_renewed() -> None:
    with Lock("view:7", min_hold=20, bound=False):
        pass
    assert 18 <= int(Client().get("/plain/7/")["Retry-After"]) <= 20
    locks["default"].break_("view:7", owner=locks["default"].get("view:7").owner)


def test_retry_after_is_never_more_than_a_minute() -> None:
    with Lock("view:7", min_hold=3600, bound=False):
        pass
    assert Client().get("/plain/7/")["Retry-After"] == "60"
    locks["default"].break_("view:7", owner=locks["default"].get("view:7").owner)


def test_the_page_works_under_a_strict_policy_and_in_light_and_dark() -> None:
    page = refuse(BROWSER).text
    assert "<style" not in page
    assert "style=" not in page
    assert '<link rel="stylesheet" href="/static/django_dlock/refused.css">' in page
    assert "<script" not in page
    assert "http" not in page
    assert '<meta name="color-scheme" content="light dark">' in page


def test_a_project_may_have_its_own_page() -> None:
    loader = "django.template.loaders.locmem.Loader"
    pages = {"django_dlock/refused.html": "{{ problem.status }} {{ request.path }}"}
    engine = {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "OPTIONS": {
            "loaders": [(loader, pages)],
            "context_processors": ["django.template.context_processors.request"],
        },
    }
    with override_settings(TEMPLATES=[engine]):
        assert refuse(BROWSER).content == b"409 /plain/7/"


def test_a_project_without_templates_gets_plain_text() -> None:
    with override_settings(TEMPLATES=[]):
        response = refuse(BROWSER)
    assert response["Content-Type"] == "text/plain; charset=utf-8"
    assert response.text.startswith("Conflict: Another request")


def test_status_423_has_the_title_locked() -> None:
    with Lock("view:GET:7", bound=False):
        response = Client().get("/callable/7/", headers={"accept": "application/json"})
    assert response.status_code == 423
    assert response.json()["title"] == "Locked"


def test_a_refusal_is_not_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "django_dlock")
    refuse()
    me = threading.get_ident()
    # Other threads may warn that the machine is busy.
    ours = [it for it in caplog.records if it.name == "django_dlock" and it.thread == me]
    assert {record.levelname for record in ours} == {"INFO"}


# -- errors -------------------------------------------------------------------------------


def request_of(user: Any = None, path: str = "/some/path/") -> HttpRequest:
    request = RequestFactory().get(path)
    if user is not None:
        request.user = user
    return request


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lease_lost_during_the_view_is_raised(asynchronous: bool) -> None:
    def lose() -> HttpResponse:
        found = locks["default"].get("view:lost")
        assert found is not None
        locks["default"].break_("view:lost", owner=found.owner)
        return HttpResponse()

    def view(request: HttpRequest) -> HttpResponse:
        return lose()

    async def aview(request: HttpRequest) -> HttpResponse:
        return await asyncio.to_thread(lose)

    if asynchronous:
        with pytest.raises(LeaseLost, match="broken"):
            asyncio.run(locked_view("view:lost")(aview)(request_of()))
    else:
        with pytest.raises(LeaseLost, match="broken"):
            locked_view("view:lost")(view)(request_of())


# -- metadata for operators --------------------------------------------------------------------


def metadata_of(request: HttpRequest, **options: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    @locked_view("view:seen", **options)
    def view(request: HttpRequest) -> HttpResponse:
        found = locks["default"].get("view:seen")
        assert found is not None
        seen.update(found.metadata)
        return HttpResponse()

    view(request)
    return seen


def test_operators_see_path_user_and_the_views_own_metadata() -> None:
    seen = metadata_of(request_of(User(pk=3, username="ada")), metadata={"by": "me"})
    assert seen == {"path": "/some/path/", "user": "ada", "by": "me"}
    assert metadata_of(request_of(AnonymousUser())) == {"path": "/some/path/"}
    assert metadata_of(request_of()) == {"path": "/some/path/"}


def test_metadata_does_not_load_the_user() -> None:
    from django.utils.functional import SimpleLazyObject

    def load() -> None:
        pytest.fail("loaded")

    assert metadata_of(request_of(SimpleLazyObject(load))) == {"path": "/some/path/"}


# -- errors at decoration -----------------------------------------------------------------


def view(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"status": 503}, ValueError, "409 or 423"),
        ({"if_contended": "queue"}, ValueError, "'reject' or 'wait'"),
        ({"wait": 5}, ValueError, "if_contended='reject' never waits"),
        ({"wait": DEFAULT}, ValueError, "if_contended='reject' never waits"),
        ({"if_contended": "wait"}, ValueError, "needs a wait"),
        ({"if_contended": "wait", "wait": -1}, ValueError, "wait is -1"),
        ({"ttl": "x"}, TypeError, "ttl is 'x'"),
        ({"patience": 1}, TypeError, "patience"),
    ],
)
def test_wrong_and_contradicting_options_are_refused(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        locked_view("view", **options)


@pytest.mark.parametrize("wait", [0.5, None, DEFAULT])
def test_wait_takes_seconds_none_or_the_setting(wait: Seconds | None) -> None:
    assert callable(locked_view("view", if_contended="wait", wait=wait)(view))


def test_an_unknown_argument_of_the_url_is_refused() -> None:
    with pytest.raises(ValueError, match=r"@locked_view on .*\.view: .*'nr'.*: request, number"):
        locked_view("view:{nr}")(view)


@pytest.mark.parametrize("key", [None, 3, [3]])
def test_a_key_is_a_template_a_list_or_a_callable(key: Any) -> None:
    with pytest.raises(TypeError, match=r"a template .*, a list of argument names, or a callable"):
        locked_view(key)


def test_the_error_for_an_undecorated_method_says_what_to_use() -> None:
    def get(self: View, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    with pytest.raises(TypeError, match="method_decorator"):
        locked_view("view")(get)


def test_an_asynchronous_view_cannot_hold_until_a_commit() -> None:
    async def aview(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    with pytest.raises(ValueError, match="asynchronous view has none"):
        locked_view("view", hold_until="commit")(aview)


# -- attributes of the view ------------------------------------------------------------------------


def test_the_view_keeps_its_name_its_attributes_and_whether_it_is_asynchronous() -> None:
    exempt: Callable[..., Any] = locked_view("view:{number}")(csrf_exempt(view))
    assert exempt.csrf_exempt  # type: ignore[attr-defined]
    assert exempt.__name__ == "view"
    assert not iscoroutinefunction(exempt)
    assert iscoroutinefunction(asynchronous)
    assert iscoroutinefunction(locked_view("view:{number}")(AsyncBase.as_view()))
    assert AsyncOnDispatch.as_view().csrf_exempt  # type: ignore[attr-defined]


def test_the_first_parameter_is_the_request_whatever_its_name() -> None:
    @locked_view("view:{request.method}")
    def named(req: HttpRequest) -> HttpResponse:
        return answer("view:GET")

    assert named(request_of()).content == b"view:GET True"


def test_a_view_of_django_rest_framework_is_locked_by_its_url() -> None:
    pytest.importorskip("rest_framework")
    from rest_framework.renderers import JSONRenderer
    from rest_framework.response import Response
    from rest_framework.views import APIView
    from rest_framework.viewsets import ViewSet

    class Api(APIView):
        authentication_classes, permission_classes = [], []
        renderer_classes = [JSONRenderer]

        def get(self, request: Any, number: int) -> Any:
            return Response(held(f"view:{number}"))

    class Apis(ViewSet):
        authentication_classes, permission_classes = [], []
        renderer_classes = [JSONRenderer]

        def retrieve(self, request: Any, number: int) -> Any:
            return Response(held(f"view:{number}"))

    lock_it = locked_view("view:{number}")
    on_class = type("OnApi", (Api,), {})
    views: list[Any] = [
        lock_it(Api.as_view()),
        lock_it(Apis.as_view({"get": "retrieve"})),
        lock_it(on_class).as_view(),
    ]
    for api in views:
        assert api.csrf_exempt
        assert api(request_of(), number=7).data is True
        with Lock("view:7", bound=False):
            assert api(request_of(), number=7).status_code == 409
