"""The documentation is complete and correct: its samples run, and its links work."""

from __future__ import annotations

import ast
import configparser
import doctest
import hashlib
import hmac
import inspect
import io
import itertools
import json
import re
import subprocess
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import django.apps
import pytest
from django.contrib import admin
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.backends.cache import SessionStore
from django.core import signing
from django.core.cache import cache
from django.core.management import (
    CommandError,
    ManagementUtility,
    call_command,
    get_commands,
    load_command_class,
)
from django.dispatch import Signal
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.test.utils import isolate_apps
from django.urls import path
from rest_framework.test import force_authenticate

import django_dlock
from django_dlock import Lock, LockNotAcquired, conf, exceptions, locks, signals
from django_dlock.backends.base import BaseLockBackend
from django_dlock.celery.options import TaskWithOptions
from django_dlock.checks import check_shared_caches
from django_dlock.lease import Contention, LeaseInfo, Waiter
from django_dlock.management import LockedCommand
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks
from testproject.celery import app
from testproject.servers import RedisServer
from tests import fates, guarantees
from tests.support.page_reader import FENCE

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted([ROOT / "README.md", ROOT / "DESCRIPTION.md", *DOCS.rglob("*.md")])
FOR_CONTRIBUTORS = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "contributing").glob("*.md"))]

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
ANY_REDIS = re.compile(r"redis://localhost:6379")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


# -- samples -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One fenced sample; ``line`` is its position in the page, for tracebacks."""

    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start(2)))
        for found in FENCE.finditer(text)
    ]


class Reader:
    """Does what a page tells its reader, from top to bottom."""

    # Celery keeps shared tasks by name forever, so each reading needs different names.
    numbers = itertools.count()

    def __init__(self, page: Path, settings: Any, redis_url: str, directory: Path) -> None:
        self.page, self.settings, self.redis_url = page, settings, redis_url
        self.directory = directory
        name = page.stem.replace("-", "_").lower()
        self.module = types.ModuleType(f"docs_{name}_{next(self.numbers)}")

    def run(self) -> dict[str, Any]:
        for block in blocks(self.page):
            # Samples marked ``py`` are code of other packages, which are not installed here.
            if block.language == "python":
                self.python(block)
            elif block.language == "console":
                self.console(block)
            elif block.language == "pycon":
                self.session(block)
        return vars(self.module)

    def python(self, block: Block) -> None:
        # The page names the reader's Redis and directory; here they are replaced by the tests' own.
        source = ANY_REDIS.sub(self.redis_url, block.code)
        source = source.replace("/run/shop/", f"{self.directory}/")
        code = compile("\n" * block.line + source, str(self.page), "exec")
        if block.code.startswith(MAKES_A_PROJECT):
            return
        if re.match(r"# (shop/)?settings\.py\n", block.code):
            self.configure(code)
        elif block.code.startswith("# shop/models.py\n"):
            self.compare_models(code)
        else:
            exec(code, vars(self.module))

    def configure(self, code: types.CodeType) -> None:
        wanted: dict[str, Any] = {}
        exec(code, wanted)
        for name, value in wanted.items():
            if name == "INSTALLED_APPS":
                # The reader's own app is not in a package of tests.
                installed = {it.removeprefix("testproject.") for it in self.settings.INSTALLED_APPS}
                assert set(value) - {...} <= installed
            elif name.isupper():
                setattr(self.settings, name, value)
        assert conf.problems() == []
        if "CACHES" in wanted:
            assert check_shared_caches() == []
        # Create them, which connects to nothing, so that the backend's own options are read, too.
        assert [locks[alias] for alias in locks]

    def compare_models(self, code: types.CodeType) -> None:
        """The reader's models have no field that the models of the tests' shop lack."""
        with isolate_apps("testproject.shop") as apps:
            exec(code, {"__name__": "testproject.shop.models"})
        for model in apps.get_models():
            ours = django.apps.apps.get_model("shop", model.__name__)
            known = {(field.name, type(field)) for field in ours._meta.get_fields()}
            assert {(field.name, type(field)) for field in model._meta.get_fields()} <= known

    def session(self, block: Block) -> None:
        """A shell must print what the page shows."""
        if block.code.startswith(ELSEWHERE):
            run_elsewhere(block.code, self.settings.DLOCKS)
        else:
            compare_session(block.code, vars(self.module))

    def console(self, block: Block) -> None:
        for line in block.code.splitlines():
            assert line.startswith("$ "), f"{self.page.name}: {line}"
            command = line.removeprefix("$ ").replace('"', "").split()
            if command[0] in OUTSIDE or command[2:3] in ([name] for name in DO_NOT_END):
                continue
            if command[:2] == ["python", "manage.py"]:
                manage(command[1:])
            elif command[0] == "make":
                makefile = (ROOT / "Makefile").read_text()
                assert re.search(f"^{command[1]}:", makefile, re.MULTILINE), line
            else:
                assert command[:2] == ["pip", "install"], line
                assert extras_of(command[2]) <= defined_extras(), line


MAKES_A_PROJECT = ("# shop/__init__.py\n", "# shop/celery.py\nimport os\n", "# shop/urls.py\n")
OUTSIDE = {"python3", ".", "django-admin", "celery"}
DO_NOT_END = ("createsuperuser", "runserver", "shell")
"""What only ``test_readme_commands.py`` does, which makes the reader's project in a folder."""

ELSEWHERE = ">>> # in the second terminal\n"
"""The first line of a session of another process."""


def compare_session(session: str, names: dict[str, Any]) -> None:
    """Run a shell's session and compare what it prints; ``...`` stands for anything."""
    test = doctest.DocTestParser().get_doctest(session, names, "session", None, 0)
    differences: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
        test, out=differences.append, clear_globs=False
    )
    names.update(test.globs)
    assert not differences, "".join(differences)


def run_elsewhere(session: str, dlocks: dict[str, Any]) -> None:
    """The same in a separate process."""
    script = (
        "import json, sys, django; from django.conf import settings; django.setup(); "
        "settings.DLOCKS = json.loads(sys.argv[2]); "
        "from tests.test_docs import compare_session; compare_session(sys.argv[1], {})"
    )
    subprocess.run([sys.executable, "-c", script, session, json.dumps(dlocks)], check=True)


def manage(command: list[str]) -> None:
    code: object = 0
    try:
        ManagementUtility(command).execute()
    except SystemExit as exit_:
        code = exit_.code
    assert not code, f"{' '.join(command)} ended with {code}"


def extras_of(requirement: str) -> set[str]:
    found = re.fullmatch(r"django-dlock(?:\[([\w,-]+)\])?", requirement)
    assert found, requirement
    return set(found[1].split(",")) if found[1] else set()


def defined_extras() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(setup["options.extras_require"])


Read = Callable[[str], dict[str, Any]]
SIGNALS = [value for value in vars(signals).values() if isinstance(value, Signal)]


@pytest.fixture
def read(
    settings: Any,
    redis_server: RedisServer,
    transactional_db: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Read]:
    """Run a page's samples; returns the names that they define."""
    import testproject.shop.models

    # The reader's own app is called shop.
    monkeypatch.setitem(sys.modules, "shop", testproject.shop)
    monkeypatch.setitem(sys.modules, "shop.models", testproject.shop.models)
    monkeypatch.setitem(sys.modules, "shop.celery", sys.modules["testproject.celery"])
    # The reader registers their own pages of the shop's models.
    for model in [model for model in admin.site._registry if model._meta.app_label == "shop"]:
        monkeypatch.delitem(admin.site._registry, model)
    conf_before, tasks_before = dict(app.conf), set(app.tasks)
    # Another test may have made its app the current one, in which tasks are created.
    app.set_current()
    app.conf.update(task_always_eager=True, task_eager_propagates=True)

    defined: list[dict[str, Any]] = []

    def run(page: str) -> dict[str, Any]:
        reader = Reader(ROOT / page, settings, redis_server.url.removesuffix("/0"), tmp_path)
        defined.append(vars(reader.module))
        # The reader's backend is in a separate module.
        for name in (reader.module.__name__, "shop.locks", "shop.tasks"):
            monkeypatch.setitem(sys.modules, name, reader.module)
        return reader.run()

    yield run
    # A receiver that a page defines must not print into the session of another page.
    for signal, names_of_page, sender in itertools.product(SIGNALS, defined, (None, Lock)):
        for function in filter(inspect.isfunction, names_of_page.values()):
            signal.disconnect(function, sender)
    app.conf.update(
        {name: conf_before[name] for name in ("task_always_eager", "task_eager_propagates")}
    )
    for name in set(app.tasks) - tasks_before:
        app.tasks.unregister(name)


WITH_SAMPLES = [page for page in PAGES if blocks(page)]


@pytest.mark.parametrize("page", names(WITH_SAMPLES))
def test_the_samples_run(page: str, read: Read) -> None:
    read(page)


LISTENERS = {"start_http_server": 1, "make_server": 0, "create_server": 0, "HTTPServer": 0}
"""Functions that open a port, and the position of the address among their arguments."""


def test_a_sample_that_opens_a_port_says_to_whom() -> None:
    """Without an address, some of these listen on every network of the machine."""
    found = 0
    for page in PAGES:
        assert not re.search(r"\b0\.0\.0\.0\b|\[::\]", page.read_text()), page
        for block in blocks(page):
            if block.language != "python":
                continue
            for call in ast.walk(ast.parse(block.code)):
                if not isinstance(call, ast.Call):
                    continue
                name = ast.unparse(call.func).rpartition(".")[2]
                if name in LISTENERS:
                    address = ast.unparse(call.args[LISTENERS[name] :][0])
                    assert "127.0.0.1" in address, page
                    found += 1
    assert found == 1


def test_the_readme_charges_an_order_once(read: Read) -> None:
    page = read("README.md")
    assert page["Effect"].objects.filter(order_number=42).count() == 1


def test_the_readme_shows_the_table_of_the_demonstration() -> None:
    from testproject.demo.report import ROWS, TITLES

    shown = (ROOT / "README.md").read_text().partition("<!-- demonstration -->")[2]
    table = re.match(r"\n\n\| \|(.*)\|\n\| --- .*\n((?:\|.*\n)+)\n<!-- end of the demon", shown)
    assert table
    assert [cell.strip() for cell in table[1].split("|")] == list(TITLES.values())
    assert re.findall(r"^\| ([^|]+) \|", table[2], re.MULTILINE) == [row.name for row in ROWS]


def test_a_payment_provider_gets_the_key_of_the_run(read: Read) -> None:
    page, sent = read("docs/howto/charge-once.md"), []

    @contextmanager
    def urlopen(request: Any, timeout: float) -> Iterator[Any]:
        sent.append(request.get_header("Idempotency-key"))
        yield types.SimpleNamespace(status=201)

    page["urlopen"] = urlopen
    assert page["pay"].delay(5, amount=100).get() == 201
    assert sent == [f"{page['pay'].name}:pay:5"]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "docs/howto/guard-view.md"])
def test_the_view_refuses_the_second_click(page: str, read: Read) -> None:
    told = read(page)
    checkout = told["checkout"]
    # The view of the tutorial is slow, so that its reader sees the lock.
    told["sleep"] = lambda seconds: None
    request = RequestFactory().post("/checkout/")
    request.user = User(pk=1)
    assert checkout(request).status_code == 200
    with Lock("checkout:1", bound=False):
        response = checkout(request)
    assert response.status_code == 409
    assert int(response["Retry-After"]) >= 1


def test_the_samples_of_the_view_guide_work(read: Read) -> None:
    page = read("docs/howto/guard-view.md")
    request = RequestFactory().post("/", headers={"accept": "application/json"})
    request.user = AnonymousUser()
    with Lock("order:1", bound=False):
        refused = page["charge"](request, number=1)
    assert refused.status_code == 423
    assert refused["Content-Type"] == "application/problem+json"
    assert page["refund"](request, number=1).status_code == 200
    assert page["basket"](request, number=1).status_code == 200
    assert page["checkout"](request).status_code == 403
    assert page["favour"](request, article="3").status_code == 403
    get = RequestFactory().get("/")
    get.user = AnonymousUser()
    assert page["report"](get, number=1).status_code == 302
    get.user = User(pk=1)
    with Lock("profile:1", bound=False):
        assert page["profile"](get).status_code == 200
    request.session = SessionStore()
    with Lock("checkout:1", bound=False):
        assert page["add_to_cart"](request).status_code == 200
        assert request.session.session_key
        assert request.session.session_key not in page["cart_of"](request)
        assert page["pay"](request).status_code == 403
        force_authenticate(request, User(pk=1))
        assert page["pay"](request).status_code == 409


def test_the_client_of_the_guide_is_verified(read: Read) -> None:
    page = read("docs/howto/repeated-requests.md")
    token = signing.dumps({"account": "7"}, salt="shop.accounts")
    statuses = [
        page["refund"](RequestFactory().post("/", headers={"idempotency-key": "k1", **headers}))
        for headers in ({"x-account-token": token}, {"x-account-token": "7"}, {})
    ]
    assert [answer.status_code for answer in statuses] == [200, 401, 401]


@pytest.fixture
def customer(settings: Any) -> Callable[[dict[str, Any]], Client]:
    """A logged-in customer of a shop with the views and the template of a page."""

    def of(page: dict[str, Any]) -> Client:
        html = next(
            it.code for it in blocks(DOCS / "howto/double-click.md") if "{% load" in it.code
        )
        templates = {"shop/payment.html": "{{ messages.0 }}" + html}
        processors = ["request", "csrf"]
        options = {
            "loaders": [("django.template.loaders.locmem.Loader", templates)],
            "context_processors": [
                *(f"django.template.context_processors.{name}" for name in processors),
                "django.contrib.messages.context_processors.messages",
            ],
        }
        engine = "django.template.backends.django.DjangoTemplates"
        settings.TEMPLATES = [{"BACKEND": engine, "OPTIONS": options}]
        urls = types.ModuleType("urls")
        views = {name: page[name] for name in ("pay_order", "order")}
        views["payment"] = page["Payment"].as_view()
        urls.urlpatterns = [  # type: ignore[attr-defined]
            path(f"{name}/", view) for name, view in views.items()
        ]
        settings.ROOT_URLCONF = urls
        client = Client()
        client.force_login(User.objects.create_user("ada"))
        return client

    return of


@pytest.mark.parametrize("name", ["payment", "order"])
def test_a_form_of_the_guide_that_is_sent_twice_pays_once(
    name: str, read: Read, customer: Callable[[dict[str, Any]], Client]
) -> None:
    page = read("docs/howto/double-click.md")
    client = customer(page)
    form = client.get(f"/{name}/")
    if name == "order":
        client = Client()
        form = client.get("/order/")
        assert Client().post("/order/", {"idempotency_key": "t"}).status_code == 401
    token = re.search(r'name="idempotency_key" value="(\w+)"', form.text)
    assert token
    sent = {"idempotency_key": token[1], "order": 7}
    if name != "order":
        wrong = client.post(f"/{name}/", {**sent, "order": 0})
        assert wrong.status_code == 200
        assert "greater than or equal to 1" in wrong.text
    for _ in range(2):
        assert client.post(f"/{name}/", sent)["Location"] == "/thanks/"
    assert page["Effect"].objects.count() == 1
    assert client.post(f"/{name}/", {**sent, "order": 8}).status_code == 422
    assert client.post(f"/{name}/", {"order": 8}).status_code == 400


def test_an_order_of_the_guide_is_paid_once_in_two_tabs(
    read: Read, customer: Callable[[dict[str, Any]], Client]
) -> None:
    page = read("docs/howto/double-click.md")
    client = customer(page)
    for token in ("of the first tab", "of the second tab"):
        wrong = client.post("/pay_order/", {"csrfmiddlewaretoken": token, "order": 0})
        assert wrong.status_code == 200
        sent = {"csrfmiddlewaretoken": token, "order": 7}
        assert client.post("/pay_order/", sent)["Location"] == "/thanks/"
    assert page["Effect"].objects.count() == 1


def test_an_event_of_the_guide_that_comes_twice_counts_once(read: Read) -> None:
    page = read("docs/howto/webhooks.md")
    text = next(it.code for it in blocks(DOCS / "howto/webhooks.md") if it.language == "json")

    def send(
        body: str,
        secret: bytes = page["SECRET"],
        url: Mapping[str, Any] | None = None,
        **headers: str,
    ) -> HttpResponse:
        signature = hmac.new(secret, body.encode(), hashlib.sha256).hexdigest()
        given = {"x-signature": signature, **headers}
        request = RequestFactory().post(
            "/", body, content_type="application/json", headers={**given, "accept": "text/html"}
        )
        request.user = AnonymousUser()
        view = "parcel_event" if url else "push_event" if headers else "payment_event"
        answer: HttpResponse = page[view](request, **(url or {}))
        return answer

    again = text.replace('"attempt": 1', '"attempt": 2')
    assert [send(text).status_code, send(again).status_code] == [204, 204]
    assert page["Effect"].objects.count() == 1
    assert send(text.replace("7", "8")).status_code == 422
    assert send(text.replace('"id"', '"name"')).status_code == 400
    assert send(text, secret=b"guessed").status_code == 401
    for body in (text, again):
        assert send(body, **{"x-github-delivery": "d1"}).status_code == 204
    assert page["Effect"].objects.filter(by="push").count() == 1
    for state in ("sent", "sent", "arrived"):
        assert send(again, url={"number": 5, "state": state}).status_code == 204
    assert page["Effect"].objects.filter(order_number=5).count() == 2


async def _feed(view: Callable[..., Any]) -> int:
    response = await view(RequestFactory().get("/"), number=1)
    status: int = response.status_code
    return status


def test_the_throttle_counts_before_a_request_gets_a_key(read: Read) -> None:
    pay = read("docs/explanation/trust.md")["pay"]
    cache.clear()

    def post(number: int, user: int = 1) -> HttpResponse:
        request = RequestFactory().post("/", headers={"Idempotency-Key": f"key-{number}"})
        request.user = User(pk=user)
        answer: HttpResponse = pay(request)
        return answer

    assert [post(number).status_code for number in range(62)] == [201] * 60 + [429] * 2
    assert IdempotencyRecord.objects.count() == 60
    assert post(1, user=2).status_code == 201


def test_a_row_of_an_idempotent_view_is_as_large_as_the_page_says() -> None:
    page = (ROOT / "docs/explanation/trust.md").read_text()
    said = re.search(r"at most ([0-9 ]+) bytes, and the answer in base64", page)
    assert said
    longest = 0
    for column in IdempotencyRecord._meta.fields:
        if column.name in ("result", "message"):
            continue
        # A view writes only ASCII into the others; a key that it makes itself may be any text.
        wide = 4 if column.name in ("scope", "key", "error") else 1
        size = 1000 if column.name == "error" else getattr(column, "max_length", None) or 8
        longest += wide * size
    assert longest <= int(said[1].replace(" ", ""))


def test_the_asynchronous_samples_run(read: Read) -> None:
    import asyncio

    assert asyncio.run(_feed(read("docs/howto/guard-view.md")["feed"])) == 200
    page = read("docs/howto/async.md")
    for sample in ("refresh", "refresh_if_free", "rebuild_unless_busy"):
        assert asyncio.run(page[sample](9)) > 0
    with Lock("feed:9", bound=False), Lock("rebuild:9", bound=False):
        assert asyncio.run(page["refresh_if_free"](9)) is None
        assert asyncio.run(page["rebuild_unless_busy"](9)) is None


def test_the_sample_of_a_cancelled_block_waits_for_its_thread(read: Read) -> None:
    import asyncio
    import threading

    page, begun, goes_on = read("docs/howto/async.md"), threading.Event(), threading.Event()
    held: list[bool] = []

    def write_file(number: int) -> None:
        begun.set()
        assert goes_on.wait(20)
        held.append(Lock(f"export:{number}").locked())

    async def cancelled() -> None:
        page["export"].__globals__["write_file"] = write_file
        running = asyncio.create_task(page["export"](9))
        assert await asyncio.to_thread(begun.wait, 20)
        running.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert held == [True]
    assert not Lock("export:9").locked()


def test_the_tests_of_the_testing_guide_pass(read: Read) -> None:
    page = read("docs/howto/test-locks.md")
    functions = [page[name] for name in page if name.startswith("test_")]
    for function in functions:
        with local_locks():
            function(*[locks for _ in inspect.signature(function).parameters])
    cases = [value for value in page.values() if isinstance(value, type)]
    cases = [case for case in cases if case.__module__.startswith("docs_")]
    for case in cases:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        assert result.wasSuccessful(), result.errors + result.failures
    assert (len(functions), len(cases)) == (4, 2)


def test_a_second_publish_is_dropped_as_the_guide_says(read: Read) -> None:
    enqueue = read("docs/howto/from-celery-once.md")["enqueue"]
    app.conf.task_always_eager = False
    try:
        assert enqueue(8) == "enqueued"
        assert enqueue(8).startswith("pending as ")
    finally:
        app.control.purge()


def test_the_commands_of_the_cron_guide_are_refused_as_it_says(read: Read) -> None:
    page, out = read("docs/howto/cron.md"), io.StringIO()
    decorated, report, nightly = page["Command"](), page["Report"](), page["Nightly"]()
    # Later samples have the same name as the first one.
    imports = next(
        made()
        for made in LockedCommand.__subclasses__()
        if made.__module__ == page["__name__"] and made.lock_key
    )
    for command in (imports, nightly, decorated, report):
        call_command(command, stdout=out)
    assert out.getvalue() == "news imported\ndone\nreport written\nreport written\n"
    with Lock("report:daily", bound=False):
        with pytest.raises(LockNotAcquired):
            call_command(decorated)
        with pytest.raises(CommandError) as refused:
            call_command(report)
    assert refused.value.returncode == 9


def test_every_attribute_of_locked_command_is_in_the_reference() -> None:
    attributes = set(inspect.get_annotations(LockedCommand))
    assert "contended_exit_code" in attributes
    assert not_told(attributes, "commands.md") == set()


def test_the_tutorial_charges_twice_with_the_lock_alone(read: Read) -> None:
    page = read("docs/tutorial.md")
    assert page["Effect"].objects.filter(order_number=1).count() == 2


# -- links and build -----------------------------------------------------------------------


@pytest.mark.parametrize("page", names([*PAGES, *FOR_CONTRIBUTORS]))
def test_links_have_targets(page: str) -> None:
    file = ROOT / page
    targets = [link for link in LINK.findall(file.read_text()) if "://" not in link]
    assert [link for link in targets if not (file.parent / link).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_into_pages_have_headings(page: str) -> None:
    """Of the pages that Sphinx, which checks the others, does not read."""
    for name, anchor in re.findall(r"\]\(([^)#\s:]+)#([^)]+)\)", (ROOT / page).read_text()):
        headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text(), re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", it).strip().lower().replace(" ", "-") for it in headings]
        assert anchor in slugs, (page, name, anchor)


def test_the_readme_links_to_lists_that_a_code_host_can_show() -> None:
    """It shows a folder; of an index page of Sphinx, only the source of its lists."""
    text = (ROOT / "README.md").read_text()
    assert [link for link in LINK.findall(text) if link.endswith("/index.md")] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1000


def test_the_readme_shows_the_admin_in_light_and_dark() -> None:
    """A code host picks by the reader's theme; both pictures are those of the documentation."""
    (picture,) = re.findall(r"<picture>.*?</picture>", (ROOT / "README.md").read_text(), re.DOTALL)
    shown = re.findall(r'(?:srcset|src)="([^"]+)"', picture)
    assert shown == ["docs/images/held-locks-dark.png", "docs/images/held-locks-light.png"]
    assert all((ROOT / file).exists() for file in shown)
    assert '(prefers-color-scheme: dark)" srcset="docs/images/held-locks-dark.png"' in picture
    assert re.search(r'alt="[^"]{20,}"', picture)


@pytest.mark.project
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = ["-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path / "html")]
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-d", str(tmp_path / "doctrees"), *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr


# -- completeness --------------------------------------------------------------------------


def reference(page: str) -> str:
    return (REFERENCE / page).read_text()


def not_told(wanted: set[str], page: str) -> set[str]:
    """The names that do not appear as code on the page."""
    code = " ".join(re.findall(r"`([^`\n]+)`", reference(page)))
    told = set(re.findall(r"[\w.-]+", code))
    return {name for name in wanted if name not in told}


def test_every_setting_is_in_the_reference() -> None:
    wanted = {"DLOCKS", "DLOCK_ADMIN", "DLOCK_METRICS", "DLOCK_SCOPE", "DLOCK_TRACING"}
    assert not_told(wanted, "settings.md") == set()


def test_every_parameter_and_member_of_lock_is_in_the_reference() -> None:
    parameters = set(inspect.signature(Lock.__init__).parameters) - {"self"}
    members = {name for name in dir(Lock) if not name.startswith("_")}
    assert not_told(parameters | members, "api.md") == set()


def test_every_reason_of_a_loss_is_in_the_reference() -> None:
    reasons = set(re.findall(r"``(\w+)``", Lock.lost_reason.__doc__ or "")) - {"None"}
    table = reference("api.md").partition("### Reasons of a loss")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == reasons


def test_every_option_of_locked_task_is_in_the_reference() -> None:
    options = set(inspect.get_annotations(TaskWithOptions))
    assert "if_contended" in options
    assert not_told(options, "tasks.md") == set()


@pytest.mark.parametrize("described", [Contention, LeaseInfo, Waiter])
def test_every_attribute_of_what_operators_get_is_in_the_reference(described: type) -> None:
    of_tuple = set(dir(tuple)) if issubclass(described, tuple) else set()
    public = {*dir(described), *inspect.get_annotations(described)}
    assert not_told({n for n in public - of_tuple if not n.startswith("_")}, "api.md") == set()


def test_every_member_of_a_backend_is_in_the_reference() -> None:
    members = {*dir(BaseLockBackend), *inspect.get_annotations(BaseLockBackend)}
    members = {name for name in members if not name.startswith("_")}
    missing = not_told(members, "backends.md")
    assert missing <= {"alias", "capabilities", "command_timeout", "options", "list", "count"}
    assert not_told({"list", "count"}, "api.md") == set()


def test_every_attribute_of_an_error_is_in_the_reference() -> None:
    for name in exceptions.__all__:
        error = getattr(exceptions, name)
        given = set(inspect.signature(error.__init__).parameters) | set(
            inspect.get_annotations(error)
        )
        for attribute in given - {"self", "args", "kwargs", "message"}:
            assert f".{attribute}" in reference("errors.md"), (name, attribute)


def test_every_extra_is_in_the_reference() -> None:
    ours = {"bench", "demo", "dev", "docs", "test"}
    table = reference("settings.md").partition("## Extras\n")[2]
    told = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", row)
    }
    assert told == defined_extras() - ours


IN_THE_GLOSSARY = {
    "capability",
    "czxid",
    "ensemble",
    "errback",
    "prefetch",
    "session",
    "shutdown (warm, soft, cold)",
    "take-over",
}
"""Terms of other packages, and of ours, that pages use without an explanation."""


def test_the_glossary_has_its_terms_in_order() -> None:
    terms = re.findall(r"^(\S.*)\n: ", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert terms == sorted(terms, key=str.casefold)
    assert set(terms) >= IN_THE_GLOSSARY


@pytest.mark.parametrize("page", ["tasks.md", "commands.md"])
def test_an_option_with_the_default_of_its_alias_is_a_setting(page: str) -> None:
    rows = re.findall(r"^\| (`lock_.*?) \| [^|]*the alias's", reference(page), re.MULTILINE)
    rows += re.findall(r"^(`lock_.*)\n: .*the alias's", reference(page), re.MULTILINE)
    options = [name for row in rows for name in re.findall(r"`lock_(\w+)`", row)]
    assert "ttl" in options
    assert {option.upper() for option in options} <= {*conf.KEYS}


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in REFERENCE.glob("*.md"))
    public = set(django_dlock.__all__)
    assert {name for name in public if not re.search(rf"\b{name}\b", text)} == set()


def test_every_error_is_in_the_reference() -> None:
    assert not_told(set(exceptions.__all__), "errors.md") == set()


def test_the_tree_of_errors_is_correct() -> None:
    tree = re.search(r"```text\n(.*?)```", reference("errors.md"), re.DOTALL)
    assert tree
    path: list[str] = []
    for line in tree[1].splitlines():
        found = re.match(r"([│├└─ ]*)(\w+)", line)
        assert found, line
        path[len(found[1]) // 3 :] = [found[2]]
        bases = getattr(exceptions, path[-1]).__mro__[1:]
        if len(path) > 1:
            assert getattr(exceptions, path[-2]) is bases[0], line


def test_every_error_can_be_imported_from_the_package() -> None:
    assert set(exceptions.__all__) <= set(django_dlock.__all__)


def test_every_signal_is_in_the_reference() -> None:
    assert not_told(set(signals.__all__), "signals.md") == set()


def check_ids_in_code() -> set[str]:
    found: set[str] = set()
    for file in (ROOT / "django_dlock").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known = re.fullmatch(r"(?:django_dlock\.)?([EWI]\d{3})", node.value)
                if known:
                    found.add(known[1])
    return found


def test_the_reference_lists_exactly_the_check_ids_of_the_code() -> None:
    told = set(re.findall(r"`django_dlock\.([EWI]\d{3})`", reference("checks.md")))
    assert told == check_ids_in_code()


def test_the_production_checklist_names_only_existing_checks() -> None:
    for page in ("production.md", "troubleshooting.md"):
        told = set(re.findall(r"\b([EW]\d{3})\b", (DOCS / "howto" / page).read_text()))
        assert told
        assert told <= check_ids_in_code()


OUR_COMMANDS = sorted(name for name, app_ in get_commands().items() if app_ == "django_dlock")


@pytest.mark.parametrize("command", OUR_COMMANDS)
def test_every_option_of_a_command_is_in_the_reference(command: str) -> None:
    parser = load_command_class("django_dlock", command).create_parser("manage.py", command)
    ours = parser._option_string_actions.keys() - {"-h", "--help", "-v"}
    djangos = {"--version", "--verbosity", "--settings", "--pythonpath", "--traceback"}
    djangos |= {"--no-color", "--force-color", "--skip-checks"}
    assert not_told({command, *(ours - djangos)}, "commands.md") == set()


def test_the_fates_of_messages_are_those_of_the_code() -> None:
    told = reference("fates.md").partition(fates.HEADING)[2]
    assert told == fates.section(), "run: python -m tests.fates"
    assert fates.OF_DRIVERS.read_text() == fates.codes(), "run: python -m tests.fates"


def test_each_guarantee_says_what_it_promises() -> None:
    rows = re.findall(r"^(G\d+) .+\n: (.+(?:\n  .+)*)$", reference("guarantees.md"), re.MULTILINE)
    assert [row[0] for row in rows] == [f"G{number}" for number in range(1, 16)]
    for number, text in rows:
        assert len(re.sub(r"`[^`]*`", "", text).split()) >= 7, number


def test_the_tests_of_each_guarantee_are_on_the_page() -> None:
    assert all(guarantees.counted().values()), "a guarantee without a test"
    assert guarantees.PAGE.read_text() == guarantees.page(), "run: python -m tests.guarantees"


@pytest.mark.project
def test_the_license_and_the_changelog_exist() -> None:
    assert "BSD 3-Clause" in (ROOT / "LICENSE").read_text()
    assert "## 0.1.0" in (ROOT / "CHANGELOG.md").read_text()
