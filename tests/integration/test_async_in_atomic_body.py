"""What ``tasks.md`` says of the asynchronous ORM in an ``atomic`` body, on real connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from django.contrib.auth.models import Group

from django_dlock import LockedTask

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres"])

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


def by_asyncio(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def by_asgiref(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async_to_sync(body)()


@pytest.mark.parametrize(("run", "left"), [(by_asyncio, 1), (by_asgiref, 0)])
def test_only_async_to_sync_writes_in_the_transaction_of_the_body(
    postgres_alias: str, run: Run, left: int
) -> None:
    app = Celery("asynchronous", broker="memory://", set_as_current=False)

    async def write() -> None:
        await Group.objects.using(postgres_alias).acreate(name="written")

    @app.task(
        base=LockedTask,
        shared=False,
        lock_using="local",
        idempotency_key="write",
        idempotency_using=postgres_alias,
        atomic=True,
    )
    def body() -> None:
        run(write)
        raise ValueError("rolled back")

    with pytest.raises(ValueError, match="rolled back"):
        body.apply(throw=True)
    assert Group.objects.using(postgres_alias).filter(name="written").count() == left
