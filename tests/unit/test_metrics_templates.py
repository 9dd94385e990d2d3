"""Groups of metrics follow the template of a lock, not what a visitor put into its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.management import call_command
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View

from django_dlock import LeaseLost, Lock, LockNotAcquired, locked, locked_view, locks
from django_dlock.core import dispatch
from django_dlock.management import LockedCommand
from django_dlock.metrics.groups import OTHER, Groups
from django_dlock.metrics.recorder import Recorder
from django_dlock.testing import local_locks
from tests.support.deliveries import in_memory, task, work


class Seen:
    """An exporter that keeps the groups."""

    def __init__(self) -> None:
        self.groups: dict[str, set[str]] = {}

    def add(self, instrument: Any, value: float, labels: Any) -> None:
        if "group" in labels:
            self.groups.setdefault(instrument.name, set()).add(labels["group"])

    def close(self) -> None:
        pass

    @property
    def all(self) -> set[str]:
        return set().union(*self.groups.values())


@pytest.fixture
def seen() -> Iterator[Seen]:
    exporter = Seen()
    recorder = Recorder([exporter], Groups(listed=["order"]))
    recorder.connect()
    yield exporter
    recorder.disconnect()


@locked_view("{slug}:edit")
def plain(request: HttpRequest, slug: str) -> HttpResponse:
    return HttpResponse()


@locked_view("{slug}:edit")
async def coroutine(request: HttpRequest, slug: str) -> HttpResponse:
    return HttpResponse()


@locked_view("{slug}:edit")
class Whole(View):
    def get(self, request: HttpRequest, slug: str) -> HttpResponse:
        return HttpResponse()


class OneMethod(View):
    @method_decorator(locked_view("{slug}:edit"))
    def get(self, request: HttpRequest, slug: str) -> HttpResponse:
        return HttpResponse()


@locked("{slug}:edit")
def function(request: object, slug: str) -> None:
    pass


@locked("{slug}:edit")
async def afunction(request: object, slug: str) -> None:
    pass


CALLS: dict[str, Callable[..., Any]] = {
    "view": plain,
    "async view": coroutine,
    "class": Whole.as_view(),
    "method": OneMethod.as_view(),
    "function": function,
    "async function": afunction,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_visitors_cannot_use_up_the_groups(seen, call):
    with local_locks():
        for number in range(20):
            answer = call(RequestFactory().get("/"), slug=f"visitor-{number}")
            if asyncio.iscoroutine(answer):
                asyncio.run(answer)
        with Lock("order:1"):
            pass
        assert dispatch.flush()
    assert seen.all == {"{slug}", "order"}


@pytest.mark.django_db(transaction=True)
def test_tasks_are_grouped_by_their_template(seen):
    with in_memory() as app:
        made = task(app, lock_key="{note}:{order}")
        for number in range(3):
            made.delay(number, f"visitor-{number}")
            work(app)
        assert dispatch.flush()
    assert seen.all == {"{note}"}


def test_each_signal_of_a_lock_has_its_group(seen):
    @locked("{slug}:edit", wait=0)
    def edit(slug: str) -> None:
        # Another thread finds it held, and gives up.
        assert isinstance(pool.submit(edit, slug).exception(), LockNotAcquired)
        found = locks["default"].get(f"{slug}:edit")
        # A break knows no template, because the store keeps none.
        assert locks["default"].break_silently(found.name, owner=found.owner)

    with local_locks(), ThreadPoolExecutor() as pool:
        with pytest.raises(LeaseLost):
            edit("visitor")
        assert dispatch.flush()
    assert {"django_dlock.acquire.contentions", "django_dlock.losses"} <= seen.groups.keys()
    assert len(seen.groups) >= 6
    assert seen.all == {"{slug}"}


@pytest.mark.parametrize(
    ("template", "group"),
    [
        ("order:{order}", "order"),
        ("order:{a}:{b}", "order"),
        ("{slug}:edit", "{slug}"),
        ("{tenant.pk}-cart:{user}", "{tenant.pk}-cart"),
        ("{day:%H:%M} of:{x}", "{day:%H:%M} of"),
        ("nightly{day:%H:%M}", OTHER),
        ("{{odd}}:{x}", "{{odd}}"),
        (":{x}", OTHER),
        ("x" * 100 + ":{x}", "x" * 64),
    ],
)
def test_what_is_before_the_colon_of_a_template(template, group):
    assert Groups().of("a:visitor", template) == group


def test_a_rule_of_the_project_still_gets_the_name():
    groups = Groups(lambda name: name[0], ["a"])
    assert groups.of("a:1", "{slug}:x") == "a"
    assert groups.of("b:1", "{slug}:x") == OTHER


def test_a_list_of_arguments_is_grouped_by_what_it_belongs_to(seen):
    @locked(["slug"])
    def edit(slug: str) -> None:
        pass

    with local_locks():
        for number in range(3):
            edit(f"visitor-{number}")
        assert dispatch.flush()
    assert seen.all == {f"{__name__}.{edit.__qualname__}"[:64]}


def test_a_command_is_grouped_by_its_template(seen):
    class Import(LockedCommand):
        lock_key = "{feed}:import"

        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("feed")

        def handle(self, *args: Any, **options: Any) -> None:
            pass

    with local_locks():
        call_command(Import(), "visitor")
        assert dispatch.flush()
    assert seen.all == {"{feed}"}
