"""The path of a request, in each place where operators see it: bounded, and without a query."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from django_dlock import Lock, idempotent_view, locked_view
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.testing import local_locks

LONG = "/" + "a" * 511
"""As long as a path may be without being cut."""


def request_of(path: str) -> HttpRequest:
    request = RequestFactory().post(path, headers={"idempotency-key": "k1"})
    request.user = User(pk=3, username="ada")
    return request


def plain(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


async def coroutine(request: HttpRequest) -> HttpResponse:
    return HttpResponse("done")


def respond(view: Callable[..., Any], request: HttpRequest) -> Any:
    answer = view(request)
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer


locked_ones = pytest.mark.parametrize("view", [plain, coroutine], ids=["sync", "async"])
paths = pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/reset/?token=secret&mail=ada@example.com", "/reset/"),
        (LONG, LONG),
        (LONG + "b", LONG[:511] + "…"),
        (LONG * 200 + "?token=secret", LONG[:511] + "…"),
    ],
    ids=["query", "512", "513", "100000"],
)


def metadata_of(view: Callable[..., Any], path: str) -> dict[str, Any]:
    """What operators would see of the lock that this request takes."""
    seen: dict[str, Any] = {}
    acquired = Lock.__init__

    def note(lock: Lock, *args: Any, **kwargs: Any) -> None:
        seen.update(kwargs["metadata"])
        acquired(lock, *args, **kwargs)

    with local_locks(), mock.patch.object(Lock, "__init__", note):
        respond(view, request_of(path))
    return seen


@locked_ones
@paths
def test_the_path_of_a_locked_view_is_bounded(
    view: Callable[..., Any], path: str, shown: str
) -> None:
    assert metadata_of(locked_view("paths:one")(view), path)["path"] == shown


@locked_ones
@paths
@pytest.mark.django_db(transaction=True)
def test_the_path_of_an_idempotent_view_is_bounded(
    view: Callable[..., Any], path: str, shown: str
) -> None:
    assert metadata_of(idempotent_view(view), path)["path"] == shown


@locked_ones
@paths
@pytest.mark.parametrize("kind", ["locked", "idempotent"])
def test_the_path_in_the_log_is_bounded(
    view: Callable[..., Any],
    path: str,
    shown: str,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded = (
        locked_view("paths:two", if_unavailable="pass")(view)
        if kind == "locked"
        else idempotent_view(if_unavailable=503)(view)
    )
    down = BackendUnavailable("no answer", "paths:two", "default")
    with (
        local_locks(),
        mock.patch.object(LocalBackend, "acquire", side_effect=down),
        caplog.at_level(logging.WARNING, logger="django_dlock"),
    ):
        respond(guarded, request_of(path))
    lines = [it.getMessage().removeprefix("POST ") for it in caplog.records]
    assert any(line.startswith(f"{shown}: no answer") for line in lines)
    assert all(len(line) < 600 and "token" not in line for line in lines)
