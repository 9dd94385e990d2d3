"""The views of ``metrics_site``."""

from __future__ import annotations

import os
from typing import Any

from django.db.backends.signals import connection_created
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_dlock import Lock, locked
from django_dlock.core import dispatch
from django_dlock.metrics.prometheus import metrics_view


def _note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    with open(os.environ["SITE_STATEMENTS"], "a") as file:
        file.write(f"{sql}\n")
    return execute(sql, params, many, context)


@receiver(connection_created)
def _watch(connection: Any, **_: Any) -> None:
    """Write all statements of all processes into one file."""
    if "SITE_STATEMENTS" in os.environ:
        connection.execute_wrappers.append(_note)


@locked("{slug}:edit")
def edit(slug: str) -> None:
    pass


def recycle(request: HttpRequest, children: int, names: int) -> HttpResponse:
    """Let children come and go that lock names which nobody else has."""
    for _ in range(children):
        pid = os.fork()
        if not pid:
            for number in range(names):
                with Lock(f"visitor-{os.getpid()}-{number}:edit"):
                    pass
                edit(f"other-{os.getpid()}-{number}")
            with Lock("order:1"):
                pass
            dispatch.flush()
            os._exit(0)
        os.waitpid(pid, 0)
    return HttpResponse()


def hold(request: HttpRequest, name: str) -> HttpResponse:
    """Hold a lock until the process ends; answers with its pid."""
    lock = Lock(name, bound=False)
    assert lock.acquire()
    HELD.append(lock)
    return HttpResponse(os.getpid())


HELD: list[Lock] = []

urlpatterns = [
    path("hold/<str:name>", hold),
    path("metrics", metrics_view),
    path("recycle/<int:children>/<int:names>", recycle),
]
