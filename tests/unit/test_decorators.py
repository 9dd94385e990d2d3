"""``locked``: which lock a call takes, and which uses are refused."""

from __future__ import annotations

import asyncio
import functools
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.test import override_settings

from django_dlock import (
    AlreadyHeld,
    Lock,
    LockNotAcquired,
    idempotent_view,
    locked,
    locked_view,
    locks,
)
from django_dlock.checks import check_settings
from django_dlock.exceptions import InvalidLockBackend


@pytest.fixture(autouse=True)
def _fresh_local() -> None:
    locks.reset()


def held(name: str) -> bool:
    return Lock(name, using="local").locked()


# -- calls ---------------------------------------------------------------------------------


def test_a_call_holds_the_lock_named_by_its_arguments() -> None:
    @locked("rebuild:{account_id}:{kind}", using="local")
    def rebuild(account_id: int, kind: str = "all") -> tuple[bool, bool]:
        return held("rebuild:7:all"), held("rebuild:8:all")

    assert rebuild(7) == (True, False)
    assert rebuild(account_id=8) == (False, True)
    assert not held("rebuild:7:all")


def test_an_exception_of_the_body_releases_and_propagates() -> None:
    @locked("it", using="local")
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not held("it")


def test_a_call_that_does_not_get_the_lock_raises_and_runs_nothing() -> None:
    ran = []

    @locked("it", using="local", wait=0)
    def runs() -> None:
        ran.append(1)

    with Lock("it", using="local", bound=False), pytest.raises(LockNotAcquired):
        runs()
    assert ran == []


def test_concurrent_calls_do_not_overlap_and_share_no_handle() -> None:
    inside, most = [], []

    @locked("it", using="local", wait=None)
    def body() -> None:
        inside.append(1)
        most.append(len(inside))
        inside.pop()

    threads = [threading.Thread(target=lambda: [body() for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 400


def test_recursion_is_an_error_unless_the_lock_is_reentrant() -> None:
    def count(n: int) -> int:
        return n and 1 + decorated(n - 1)

    decorated = locked("it", using="local")(count)
    with pytest.raises(AlreadyHeld):
        decorated(2)
    decorated = locked("it", using="local", reentrant=True)(count)
    assert decorated(2) == 2


async def test_a_coroutine_function_holds_until_it_has_been_awaited() -> None:
    @locked("feed:{number}", using="local")
    async def feed(number: int) -> bool:
        await asyncio.sleep(0)
        return held(f"feed:{number}")

    assert iscoroutinefunction(feed)
    call = feed(9)
    assert not held("feed:9")
    assert await call
    assert not held("feed:9")


async def test_a_function_marked_as_coroutine_function_is_awaited() -> None:
    async def body() -> bool:
        await asyncio.sleep(0)
        return held("it")

    def marked() -> Awaitable[bool]:
        return body()

    assert await locked("it", using="local")(markcoroutinefunction(marked))()


class Account:
    def __init__(self, pk: int) -> None:
        self.pk = pk

    @locked("account:{self.pk}", using="local")
    def rebuild(self) -> bool:
        return held(f"account:{self.pk}")

    @classmethod
    @locked("account:{number}", using="local")
    def open(cls, number: int) -> bool:
        return held(f"account:{number}")

    @locked("account:{self}", using="local")
    def unstable(self) -> None: ...

    @locked(["self"], using="local")
    def digested(self) -> None: ...


def test_keys_of_methods_use_only_stable_attributes_of_self() -> None:
    assert Account(5).rebuild()
    assert Account.open(6)
    with pytest.raises(TypeError, match=r"the field \{self\}.*Use an attribute"):
        Account(5).unstable()
    with pytest.raises(TypeError, match=r"the argument 'self' contains .* no stable form"):
        Account(5).digested()


def test_a_list_of_names_makes_a_lock_per_function() -> None:
    seen = []

    def names(contended: Any) -> None:
        seen.append(contended.name)

    def one(number: int) -> None:
        names(locks["local"].list()[0])

    def other(number: int) -> None:
        names(locks["local"].list()[0])

    for function in (one, one, other):
        locked(["number"], using="local")(function)(1)
    assert seen[0] == seen[1] != seen[2]
    assert seen[0].startswith(f"{__name__}.test_a_list_of_names_makes_a_lock_per_function")


def test_the_decorated_function_keeps_name_doc_and_signature() -> None:
    def documented(number: int, *, deep: bool = False) -> str:
        """Says what it does."""
        return str(number)

    decorated = locked("it:{number}", using="local")(documented)
    assert decorated.__name__ == "documented"
    assert decorated.__doc__ == "Says what it does."
    assert inspect.signature(decorated) == inspect.signature(documented)


# -- refused at decoration -----------------------------------------------------------------


def plain(number: int) -> None: ...


def test_the_error_for_an_unknown_field_names_the_function_and_its_arguments() -> None:
    with pytest.raises(ValueError, match=r"@locked on .*\.plain: .*'numbr'.*: number"):
        locked("it:{numbr}", using="local")(plain)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"patience": 3}, TypeError),
        ({"timeout": 3}, TypeError),
        ({"ttl": "30"}, TypeError),
        ({"ttl": 0.2}, ValueError),
        ({"wait": -1}, ValueError),
        ({"hold_until": "later"}, ValueError),
        ({"on_lost": 1}, TypeError),
        ({"using": "nowhere"}, InvalidLockBackend),
    ],
)
def test_wrong_options_are_refused_before_any_call(options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(options))}|nowhere"):
        locked("it", **{"using": "local", **options})


def generator() -> Iterator[int]:
    yield 1


async def asynchronous_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generator, asynchronous_generator])
def test_generator_functions_are_refused(function: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="Use a Lock inside it"):
        locked("it", using="local")(function)


async def coroutine() -> int:
    raise AssertionError("it ran without the lock")


def started() -> asyncio.Task[int]:
    return asyncio.ensure_future(coroutine())


def hidden(function: Callable[[], Any]) -> Callable[[], Any]:
    """As a decorator does that is not made for such functions."""

    @functools.wraps(function)
    def call() -> Any:
        return function()

    # ``wraps`` copies the mark of asgiref, but not what the function is.
    return call


@pytest.mark.parametrize("function", [coroutine, generator, asynchronous_generator])
@pytest.mark.filterwarnings("error")
def test_a_plain_function_whose_result_has_not_run_is_refused(function: Callable[[], Any]) -> None:
    call = locked("it", using="local")(hidden(function))
    with pytest.raises(TypeError, match=r"@locked on .*has not run yet.*Put @locked directly on"):
        call()
    assert not held("it")


async def test_a_task_that_a_plain_function_has_started_is_cancelled() -> None:
    tasks: list[asyncio.Task[int]] = []

    @locked("it", using="local")
    def start() -> asyncio.Task[int]:
        tasks.append(started())
        return tasks[0]

    with pytest.raises(TypeError, match="a Task, which has not run yet"):
        start()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]


async def test_a_coroutine_that_returns_another_one_is_refused() -> None:
    @locked("it", using="local")
    async def returns() -> Any:
        return coroutine()

    with pytest.raises(TypeError, match="returned a coroutine"):
        await returns()
    assert not held("it")


@pytest.mark.parametrize("thing", [classmethod(plain), staticmethod(plain)])
def test_the_error_for_a_wrong_order_of_decorators_says_the_right_one(thing: Any) -> None:
    with pytest.raises(
        TypeError, match=r"Put @locked below @(class|static)method, not above it, on"
    ):
        locked("it", using="local")(thing)


@pytest.mark.parametrize("thing", [Account, functools.partial(plain, 1), 7])
def test_objects_other_than_functions_are_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="takes a function or method"):
        locked("it", using="local")(thing)


@pytest.mark.parametrize("arguments", [(), (7,)])
def test_a_decorator_without_a_key_raises_at_the_first_call(arguments: Any) -> None:
    @locked
    def rebuild(*_: int) -> None: ...

    with pytest.raises(TypeError, match="it needs a key first"):
        rebuild(*arguments)


def test_a_coroutine_function_cannot_hold_until_a_commit() -> None:
    async def body() -> None: ...

    with pytest.raises(ValueError, match="a coroutine has none"):
        locked("it", using="local", hold_until="commit")(body)


def test_a_module_can_be_imported_with_wrong_settings() -> None:
    with override_settings(DLOCKS={"default": {"BACKEND": 7}}):
        decorated = locked("it")(plain)
        with pytest.raises(TypeError, match="patience"):
            locked("it", patience=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidLockBackend, match="BACKEND"):
            decorated(1)


OTHER = {"other": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
TOO_FEW = {
    "default": {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": "redis://127.0.0.1:1/0",
        # Found only when the backend is built.
        "OPTIONS": {"max_connections": 1},
    }
}


@pytest.mark.parametrize(
    ("dlocks", "check_id", "message"),
    [
        ({}, "E001", "must be a dict of aliases"),
        (OTHER, "W014", r"no lock alias 'default' in DLOCKS; it defines \['other'\]"),
        (TOO_FEW, "E008", "max_connections"),
    ],
)
def test_wrong_settings_are_left_to_the_check_and_to_the_first_use(
    dlocks: Any, check_id: str, message: str
) -> None:
    with override_settings(DLOCKS=dlocks):
        decorated = locked("it")(plain)
        locked_view("it")(plain)
        idempotent_view()(plain)
        (found,) = check_settings()
        assert found.id == f"django_dlock.{check_id}"
        with pytest.raises(InvalidLockBackend, match=message):
            decorated(1)


def test_an_alias_that_does_not_exist_is_refused_without_a_default_alias_too() -> None:
    with override_settings(DLOCKS=OTHER), pytest.raises(InvalidLockBackend, match="nowhere"):
        locked("it", using="nowhere")


def test_a_module_without_settings_can_be_imported() -> None:
    script = (
        "from django_dlock import locked\n"
        "@locked('it:{number}')\n"
        "def body(number): ...\n"
        "try: locked('it', patience=3)\n"
        "except TypeError: print('refused')"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={}
    )
    assert run.stdout == "refused\n"
