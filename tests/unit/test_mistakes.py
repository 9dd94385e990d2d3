"""Mistakes in a call of ``Lock`` that would stay silent, or whose error would name no cure."""

from __future__ import annotations

import asyncio
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from django_dlock import Lock, LockedTask, LockNameWarning, idempotent_view, locked, locked_view


@pytest.fixture(autouse=True)
def _each_warning_is_shown():
    """Python shows a warning once for each line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


# -- a forgotten f --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "order:{order_id}",
        "order:{order.id}",
        "order:{order['id']}",
        "order:{order_id!r}",
        "order:{order_id:05}",
        "report:{day:%Y-%m-%d}",
        "{order_id}",
        "über:{größe}",
    ],
)
def test_a_field_in_a_name_gives_a_warning_at_the_line_of_the_lock(name: str) -> None:
    with pytest.warns(LockNameWarning, match="f before the string") as told:
        Lock(name, using="local")
    (warning,) = told
    assert Path(warning.filename) == Path(__file__)


@pytest.mark.parametrize(
    "name",
    [
        "order:7",
        "a{b",
        "}{",
        "{}",
        "{0}",
        "{order:42}:lines",
        "{7f3a-11}",
        json.dumps({"order": 7}),
        str({"order": 7}),
        "{1, 2}",
    ],
)
def test_other_braces_are_accepted(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Lock(name, using="local")


def test_a_lock_for_coroutines_warns_too() -> None:
    async def acquire() -> bool:
        lock = Lock("order:{order_id}", using="local")
        assert await lock.aacquire()
        await lock.arelease()
        return True

    with pytest.warns(LockNameWarning):
        assert asyncio.run(acquire())


def test_the_warning_is_about_a_line_and_not_about_each_name() -> None:
    """Else names that visitors choose would fill the memory of Python's register of warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for number in range(5):
            Lock(f"order:{{x{number}}}", using="local")
    assert len(told) == 1


def test_the_warning_can_be_silenced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", LockNameWarning)
        Lock("{tenant}:orders", using="local")


def test_braces_in_the_value_of_a_template_are_no_mistake() -> None:
    @locked("{{tag}}:order:{order_id}", using="local")
    def charge(order_id: str) -> str:
        return order_id

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert charge("{order_id}") == "{order_id}"


def test_a_callable_key_without_its_f_gives_a_warning() -> None:
    @locked(lambda order_id: "order:{order_id}", using="local")
    def charge(order_id: int) -> int:
        return order_id

    # Its own name for the argument.
    @locked(lambda number: "order:{number}", using="local")
    def refund(order_id: int) -> int:
        return order_id

    with pytest.warns(LockNameWarning, match=r"@locked on .*charge.*\{order_id\}"):
        charge(1)
    with pytest.warns(LockNameWarning, match=r"@locked on .*refund.*\{number\}"):
        refund(1)


def test_a_callable_key_may_return_other_braces() -> None:
    @locked(lambda path: f"file:{path}", using="local")
    def read(path: str) -> str:
        return path

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read("{order_id}") == "{order_id}"


def test_a_callable_key_of_a_task_without_its_f_gives_a_warning() -> None:
    app = Celery("mistakes", broker="memory://", set_as_current=False)

    @app.task(base=LockedTask, shared=False, lock_key=lambda order_id: "order:{order_id}")
    def charge(order_id: int) -> int:
        return order_id

    with pytest.warns(LockNameWarning, match="lock_key of task"):
        charge.dlock_options.lock_key((1,), {})


# -- options of other libraries -------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ("timeout", "ttl="),
        ("blocking_timeout", "wait="),
        ("blocking", r"acquire\(blocking=False\)"),
        ("sleep", "does not poll"),
        ("expire", "ttl="),
        ("auto_renewal", "renew=False"),
        ("id", "owner of its own"),
        ("strict", "leave it out"),
        ("thread_local", "bound=False"),
        ("redis_client", "using="),
    ],
)
def test_an_option_of_another_library_is_refused_with_the_one_to_use(option: str, cure: str):
    given: dict[str, Any] = {"colour": 1, option: 1}
    for use in (
        lambda: Lock("n", **given),
        lambda: locked("n", **given),
        lambda: locked_view("n", **given),
    ):
        with pytest.raises(TypeError, match=rf"no {option}: .*{cure}"):
            use()


def test_an_option_of_no_library_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Lock("n", colour=1)


@pytest.mark.parametrize(
    ("option", "meant"), [("tll", "ttl"), ("re_entrant", "reentrant"), ("maxhold", "max_hold")]
)
def test_a_misspelt_option_is_refused_with_the_one_that_was_meant(option: str, meant: str) -> None:
    given: dict[str, Any] = {option: 1}
    for use in (
        lambda: Lock("n", **given),
        lambda: locked("n", **given),
        lambda: locked_view("n", **given),
    ):
        with pytest.raises(TypeError, match=f"argument '{option}'. Did you mean '{meant}'?"):
            use()


def test_idempotent_view_names_the_cure_too() -> None:
    with pytest.raises(TypeError, match="no blocking_timeout: use wait="):
        idempotent_view(blocking_timeout=3)
