"""The scope of the tenant in the names of locks: which names meet, and what is refused."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_dlock import AlreadyHeld, Lock, LockNotAcquired, locked, locks, signals, tenancy
from django_dlock.checks import check_scope
from django_dlock.metrics.groups import Groups
from django_dlock.text.names import MAX_NAME
from tests.support.tenants import active
from tests.support.tenants import scoped as tenants


async def coroutine() -> str:
    return ""


NOT_CALLABLE = "a string"


@pytest.fixture
def local_locks() -> Iterator[None]:
    """The alias ``default`` is in this process, and empty."""
    backend = "django_dlock.backends.local.LocalBackend"
    with override_settings(DLOCKS={"default": {"BACKEND": backend}}):
        yield


@pytest.fixture
def scoped(local_locks: object) -> Iterator[None]:
    with tenants():
        yield


def in_thread(call: Callable[[], object]) -> object:
    """The answer of a call in a thread of its own, with the tenants of this one."""
    answers: list[object] = []
    context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: answers.append(context.run(call)))
    thread.start()
    thread.join()
    return answers[0]


def is_free(name: str, who: str) -> object:
    """Whether another thread can acquire the name for a tenant."""

    def call() -> bool:
        with active(who):
            lock = Lock(name)
            if acquired := lock.acquire(blocking=False):
                lock.release()
            return acquired

    return in_thread(call)


# -- locks ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("scoped")
def test_g1_locks_of_two_tenants_do_not_meet_and_those_of_one_do() -> None:
    with active("a"), Lock("order:1"):
        assert is_free("order:1", "b")
        assert is_free("order:1", "")
        assert not is_free("order:1", "a")


@pytest.mark.usefixtures("scoped")
async def test_g1_a_coroutine_locks_for_its_tenant() -> None:
    with active("a"):
        async with Lock("order:1"):
            assert await Lock("order:1").alocked()
            with active("b"):
                assert not await Lock("order:1").alocked()
                other = Lock("order:1")
                assert await other.aacquire(blocking=False)
                await other.arelease()
            assert not await Lock("order:1").aacquire(blocking=False)


@pytest.mark.usefixtures("scoped")
async def test_two_coroutines_of_two_tenants_share_one_handle() -> None:
    shared, both = Lock("x"), asyncio.Barrier(2) if hasattr(asyncio, "Barrier") else None

    async def work(who: str) -> str:
        with active(who):
            async with shared:
                if both is not None:
                    await both.wait()
                return shared.name

    assert sorted(await asyncio.gather(work("a"), work("b"))) == ["[a]x", "[b]x"]


@pytest.mark.usefixtures("scoped")
def test_a_lock_of_a_module_belongs_to_the_tenant_of_each_acquire() -> None:
    shared = Lock("x")
    for who in ("a", "b", ""):
        with active(who), shared:
            assert [info.name for info in locks["default"].list()] == [tenancy.prefixed(who, "x")]


@pytest.mark.usefixtures("scoped")
def test_what_was_acquired_for_one_tenant_is_released_for_another() -> None:
    lock = Lock("x")
    with active("a"):
        assert lock.acquire()
    with active("b"):
        assert lock.name == "[a]x"
        lock.renew()
        lock.release()
        assert lock.name == "[b]x"
    assert locks["default"].list() == []


@pytest.mark.usefixtures("scoped")
def test_nested_blocks_of_one_handle_release_each_its_own() -> None:
    shared = Lock("x")
    with active("a"), shared:
        with active("b"), shared:
            assert len(locks["default"].list()) == 2
        assert [info.name for info in locks["default"].list()] == ["[a]x"]
    assert locks["default"].list() == []


@pytest.mark.usefixtures("scoped")
def test_the_caller_of_one_tenant_is_told_that_it_holds_the_name() -> None:
    with active("a"), Lock("x"):
        with pytest.raises(AlreadyHeld) as raised:
            Lock("x").acquire()
        assert raised.value.name == "[a]x"


@pytest.mark.usefixtures("scoped")
def test_errors_and_signals_tell_the_full_name() -> None:
    names: list[str] = []

    def note(name: str, **_: Any) -> None:
        names.append(name)

    for signal in (signals.acquired, signals.released, signals.contended, signals.gave_up):
        signal.connect(note)
    try:
        with active("a"), Lock("x"):

            def refused() -> LockNotAcquired:
                with pytest.raises(LockNotAcquired) as raised, Lock("x", wait=0):
                    pass
                return raised.value

            error: Any = in_thread(refused)
        from django_dlock.core import dispatch

        dispatch.flush()
    finally:
        for signal in (signals.acquired, signals.released, signals.contended, signals.gave_up):
            signal.disconnect(note)
    assert error.name == error.info.name == "[a]x"
    assert names == ["[a]x"] * 4


@pytest.mark.usefixtures("scoped")
def test_a_decorated_function_is_locked_for_the_tenant_of_the_call() -> None:
    @locked("order:{number}")
    def ship(number: int) -> list[str]:
        return [info.name for info in locks["default"].list()]

    for who in ("a", "b"):
        with active(who):
            assert ship(1) == [f"[{who}]order:1"]
            with Lock("order:1"):
                assert not is_free("order:1", who)


@pytest.mark.usefixtures("scoped")
async def test_a_decorated_coroutine_is_locked_for_the_tenant_of_the_call() -> None:
    @locked("order:{number}")
    async def ship(number: int) -> list[str]:
        return [info.name for info in locks["default"].list()]

    with active("a"):
        assert await ship(1) == ["[a]order:1"]


# -- names ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("scoped")
@pytest.mark.parametrize("scope", ["a", "a:b", "", "ä b*c", "x" * tenancy.LONGEST])
@pytest.mark.parametrize("name", ["x", "b:c", "]x", "a]x", "n" * MAX_NAME])
def test_a_full_name_is_a_name_and_tells_the_tenant(scope: str, name: str) -> None:
    with active(scope):
        full = tenancy.full(name)
    assert len(full) <= MAX_NAME
    assert tenancy.split(full)[0] == scope
    if len(scope) + len(name) + 2 <= MAX_NAME:
        assert tenancy.split(full) == (scope, name)


@pytest.mark.usefixtures("scoped")
def test_no_two_scopes_and_names_make_the_same_full_name() -> None:
    made = set[str]()
    pairs = [
        (scope, name) for scope in ("", "a", "a:b", "b") for name in ("c", "b:c", "a]c", "]", "b]")
    ]
    for scope, name in pairs:
        with active(scope):
            made.add(tenancy.full(name))
    assert len(made) == len(pairs)


@pytest.mark.usefixtures("scoped")
@pytest.mark.parametrize("who", ["", "a"])
def test_a_name_that_looks_like_a_full_one_is_refused(who: str) -> None:
    with active(who), pytest.raises(ValueError, match="begins with '\\['"):
        Lock("[a]x").acquire()


@pytest.mark.usefixtures("local_locks")
def test_without_the_setting_names_are_as_given() -> None:
    tenancy.reset()
    for name in ("x", "[a]x"):
        with Lock(name) as lock:
            assert lock.name == name == locks["default"].list()[0].name
    assert tenancy.function is None


# -- the function --------------------------------------------------------------------------


@pytest.mark.usefixtures("scoped")
@pytest.mark.parametrize(
    ("returned", "error"),
    [
        *((None, TypeError), (1, TypeError), (b"a", TypeError)),
        *(("a]b", ValueError), ("[a", ValueError), ("a\nb", ValueError)),
        ("x" * (tenancy.LONGEST + 1), ValueError),
        (LookupError("no tenant"), LookupError),
    ],
)
def test_a_function_that_gives_no_scope_locks_nothing(
    returned: object, error: type[Exception]
) -> None:
    with active(returned):
        with pytest.raises(error):
            Lock("x").acquire()
        with pytest.raises(error), Lock("x"):
            pass
        assert repr(Lock("x")) == "<Lock 'x' on 'default': free>"
    assert locks["default"].list() == []


@pytest.mark.usefixtures("scoped")
async def test_a_function_that_gives_no_scope_locks_nothing_in_a_coroutine() -> None:
    with active(None), pytest.raises(TypeError, match="DLOCK_SCOPE returned None"):
        async with Lock("x"):
            pass


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("shop.nowhere.scope", "cannot import"),
        ("scope", "cannot import"),
        (1, "takes the dotted path"),
        (f"{__name__}.NOT_CALLABLE", "takes a plain function"),
        (f"{__name__}.coroutine", "takes a plain function"),
        ("collections.abc.Iterator", "takes a plain function"),
    ],
)
def test_a_wrong_setting_is_an_error_of_the_check_and_of_each_lock(
    local_locks: object, path: object, why: str
) -> None:
    with override_settings(DLOCK_SCOPE=path):
        (error,) = check_scope()
        assert error.id == "django_dlock.E016"
        assert why in error.msg
        for _ in range(2):
            with pytest.raises(ImproperlyConfigured, match="DLOCK_SCOPE"):
                Lock("x").acquire()
        assert locks["default"].list() == []


def test_a_right_setting_is_no_error() -> None:
    assert check_scope() == []
    with tenants():
        assert check_scope() == []


@pytest.mark.usefixtures("scoped")
def test_a_message_tells_the_scope_only_where_the_function_tells_none() -> None:
    with tenancy.of_message("a"):
        assert tenancy.current() == "a"
        with active("b"):
            assert tenancy.current() == "b"
        with tenancy.of_message(""):
            assert tenancy.current() == "a"
    assert tenancy.current() == ""


@pytest.mark.usefixtures("scoped")
def test_metrics_do_not_tell_tenants_apart() -> None:
    groups = Groups(listed=["order"])
    assert {groups.of(f"[{who}]order:1") for who in ("a", "b:c")} == {"order"}
