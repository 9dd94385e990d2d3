"""Which connections a thread or a coroutine has made, asked at every acquire."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_dlock import transactions


def both() -> tuple[list[BaseDatabaseWrapper], list[BaseDatabaseWrapper]]:
    """As we see it, and as Django does."""
    return list(transactions.made()), list(connections.all(initialized_only=True))


def made_two() -> Any:
    """Before and after a connection is made; a wrapper connects when it is first used."""
    before = both()
    # A thread that serves coroutines may have it from another test.
    new = not before[1]
    connection = connections["default"]
    after = both()
    if new:
        del connections["default"]
    return before, after, connection


def on_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


async def in_a_coroutine() -> Any:
    return made_two()


async def on_the_thread_of_a_coroutine() -> Any:
    return await sync_to_async(made_two)()


@pytest.mark.parametrize(
    "where",
    [
        made_two,
        lambda: contextvars.copy_context().run(made_two),
        lambda: asyncio.run(in_a_coroutine()),
        lambda: asyncio.run(on_the_thread_of_a_coroutine()),
    ],
    ids=["a thread", "a context", "a coroutine", "a thread for a coroutine"],
)
def test_it_sees_what_django_sees(where: Callable[[], Any]) -> None:
    (ours_before, theirs_before), after, connection = on_a_thread(where)
    assert ours_before == theirs_before
    assert after == ([connection], [connection])


def test_a_thread_need_not_ask_for_each_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "all", None)
    assert on_a_thread(transactions.made) == []


def test_it_sees_what_django_sees_where_connections_are_kept_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Storage:
        default = object()

    monkeypatch.setattr(connections, "_connections", Storage())
    assert both() == ([Storage.default], [Storage.default])


def test_a_thread_on_which_a_loop_ran_has_its_connections_only() -> None:
    def after_a_loop() -> Any:
        made_two()
        asyncio.run(in_a_coroutine())
        return made_two()

    (ours_before, theirs_before), after, connection = on_a_thread(after_a_loop)
    assert ours_before == theirs_before == []
    assert after == ([connection], [connection])
