"""What a flow's calls reach; and that no call of a backend is a name, which tools cannot follow."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import django_dlock
from django_dlock import Lock, clock, locks
from django_dlock.backends.base import BaseLockBackend
from django_dlock.backends.local import LocalBackend
from django_dlock.core.flow import Flow, adrive, call, drive, either, in_turn, pause
from django_dlock.exceptions import BackendUnavailable, ConnectionsBusy
from django_dlock.lease import Contention, Lease, LeaseRequest, Outcome
from tests.support.aliases import configured

PACKAGE = Path(django_dlock.__file__).parent
METHODS = {name for name, _ in inspect.getmembers(BaseLockBackend, inspect.isfunction)}


# -- no names ---------------------------------------------------------------------------


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders or ("",):
        for file in (PACKAGE / folder).rglob("*.py"):
            yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text())


def named_yields(module: ast.Module) -> Iterator[int]:
    """The lines that yield the name of a method of a backend, alone or first."""
    for node in ast.walk(module):
        if isinstance(node, ast.Yield):
            value = node.value
            first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
            if isinstance(first, ast.Constant) and first.value in METHODS:
                yield node.lineno


def lookups(inside: ast.AST) -> Iterator[int]:
    """The lines that look up a name which only a variable knows, or a method of a backend."""
    for node in ast.walk(inside):
        if not isinstance(node, ast.Call):
            continue
        name = {"getattr": 1, "attrgetter": 0, "methodcaller": 0}.get(called(node))
        if name is None or len(node.args) <= name:
            continue
        given = node.args[name]
        if not isinstance(given, ast.Constant) or given.value in METHODS:
            yield node.lineno


def called(node: ast.Call) -> str:
    function = node.func
    return str(getattr(function, "id", getattr(function, "attr", "")))


def backend_classes(module: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(module):
        methods = {part.name for part in ast.iter_child_nodes(node) if hasattr(part, "name")}
        if isinstance(node, ast.ClassDef) and len(methods & METHODS) > 2:
            yield node


def test_no_generator_yields_the_name_of_a_method() -> None:
    found = [(file, line) for file, module in modules() for line in named_yields(module)]
    assert found == []


def test_flows_and_backends_look_up_no_method_by_its_name() -> None:
    found = [(file, line) for file, module in modules("core") for line in lookups(module)]
    classes = [(file, each) for file, module in modules() for each in backend_classes(module)]
    assert {"BaseLockBackend", "FailoverBackend", "LocalBackend"} <= {it.name for _, it in classes}
    found += [(file, line) for file, each in classes for line in lookups(each)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "finds"),
    [
        ('def f():\n    answer = yield "acquire", (a,), {}', named_yields),
        ('def f():\n    yield "locked"', named_yields),
        ("getattr(backend, method)(*args)", lookups),
        ('getattr(backend, "a" + method)', lookups),
        ('getattr(self, f"_{method}")', lookups),
        ('methodcaller("release", name, owner)', lookups),
    ],
)
def test_each_way_to_call_by_name_is_found(
    text: str, finds: Callable[[ast.Module], Iterator[int]]
) -> None:
    assert list(finds(ast.parse(text)))


# -- runners ----------------------------------------------------------------------------


def run(how: str, flow: Flow[Any], backend: BaseLockBackend | None = None) -> Any:
    if how == "thread":
        return drive(flow)
    return asyncio.run(adrive(flow, backend or locks["local"]))


runners = pytest.mark.parametrize("how", ["thread", "coroutine"])


@runners
def test_a_call_answers_or_raises_in_its_flow(how: str) -> None:
    def divide(by: int) -> float:
        return 6 / by

    def flow() -> Flow[list[object]]:
        found: list[object] = [(yield from call(divide, 3))]
        try:
            yield from call(divide, by=0)
        except ZeroDivisionError as error:
            found.append(error)
        yield from pause(0.0)
        return found

    two, error = run(how, flow())
    assert two == 2
    assert isinstance(error, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        run(how, call(divide, 0))


@runners
def test_either_blocks_or_is_awaited(how: str) -> None:
    def blocking(text: str, *, end: str) -> str:
        return f"{text} on a thread{end}"

    async def awaited(text: str, *, end: str) -> str:
        return f"{text} in a coroutine{end}"

    assert how in run(how, either(blocking, awaited, "it ran", end="."))


@runners
def test_a_call_in_turn_is_repeated_until_a_connection_is_free(how: str) -> None:
    asked: list[int] = []

    def locked(number: int) -> bool:
        asked.append(number)
        if number < 3:
            raise ConnectionsBusy("busy", "it", "local")
        return True

    assert run(how, in_turn(lambda: call(locked, len(asked) + 1)))
    assert asked == [1, 2, 3]

    def silent() -> None:
        raise BackendUnavailable("no answer", "it", "local")

    with pytest.raises(BackendUnavailable):
        run(how, in_turn(lambda: call(silent)))


# -- backends of others -----------------------------------------------------------------


class Noting(LocalBackend):
    """A subclass; its coroutines make their calls on threads, as by default."""

    acall = BaseLockBackend.acall
    noted: list[str] = []

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        self.noted.append("acquire")
        return super().acquire(request, deadline=deadline)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        self.noted.append("release")
        return super().release(name, owner, min_hold=min_hold, deadline=deadline)


class Asynchronous(LocalBackend):
    """One with an asynchronous client for acquires; the rest runs on threads."""

    noted: list[str] = []

    async def acall(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if method == self.acquire:
            return await self._acquired(*args, **kwargs)
        return await BaseLockBackend.acall(self, method, *args, **kwargs)

    async def _acquired(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        await asyncio.sleep(0)
        self.noted.append("awaited")
        return self.acquire(request, deadline=deadline)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = request.param
    with configured({"default": {"BACKEND": f"{__name__}.{kind.__name__}", "TTL": 30.0}}):
        kind.noted.clear()
        yield locks["default"]


def cycle(how: str) -> None:
    async def awaited() -> None:
        async with Lock("it"):
            pass

    if how == "coroutine":
        asyncio.run(awaited())
        return
    with Lock("it"):
        pass


@runners
@pytest.mark.parametrize("backend", [Noting], indirect=True)
def test_the_overrides_of_a_subclass_are_called(how: str, backend: Noting) -> None:
    cycle(how)
    assert backend.noted == ["acquire", "release"]


@runners
@pytest.mark.parametrize("backend", [Noting], indirect=True)
def test_a_method_that_was_replaced_on_the_backend_is_called(
    how: str, backend: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire(*args: Any, **kwargs: Any) -> Lease | Contention:
        backend.noted.append("fake")
        return LocalBackend.acquire(backend, *args, **kwargs)

    monkeypatch.setattr(backend, "acquire", acquire)
    cycle(how)
    assert backend.noted == ["fake", "release"]


@pytest.mark.parametrize("backend", [Asynchronous], indirect=True)
def test_a_backend_may_await_the_methods_that_it_chooses(backend: Asynchronous) -> None:
    cycle("coroutine")
    assert backend.noted == ["awaited"]
    answer = asyncio.run(
        backend.acall(backend.acquire, LeaseRequest("it", "me", 30.0), deadline=clock.now() + 30.0)
    )
    assert isinstance(answer, Lease)
    assert backend.noted == ["awaited"] * 2
