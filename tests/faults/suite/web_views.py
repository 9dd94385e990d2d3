"""The ASGI application of the suite: the body of the tasks, as asynchronous views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.asgi import get_asgi_application

settings.ROOT_URLCONF = __name__
settings.MIDDLEWARE = []
application = get_asgi_application()

from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402

from django_dlock import idempotent_view  # noqa: E402
from testproject.shop.models import Effect  # noqa: E402

from .journal import Journal, gate  # noqa: E402
from .kinds import GUARDED, PLAIN  # noqa: E402
from .workload import Span  # noqa: E402


def body(journal: Journal, kind: str, key: int) -> None:
    """Runs on a thread, which nobody can cancel; the first one of a key waits for the driver."""
    span, first = Span(journal, None), journal.first(f"ran-{kind}-{key}")
    facts = {"delivery": "", "token": None, "owner": None, "attempt": None}
    with span.noted(kind=kind, key=key, long=first, **facts):
        if first:
            facts = {"what": "client gone", "point": "began"}
            journal.write("hit", kind=kind, key=key, long=True, **facts)
            span.wait_at(gate(kind, key))
        Effect.objects.create(order_number=key, by=kind, delivery=span.run)


async def plain(request: HttpRequest, key: int) -> HttpResponse:
    await sync_to_async(body)(Journal(Path(request.headers["Journal"])), PLAIN, key)
    return HttpResponse("done")


@idempotent_view(required=True, client=lambda request, key: "suite")
async def guarded(request: HttpRequest, key: int) -> HttpResponse:
    await sync_to_async(body)(Journal(Path(request.headers["Journal"])), GUARDED, key)
    return HttpResponse("done")


@idempotent_view(required=True, client=lambda request, key: "suite")
def atomic(request: HttpRequest, key: int) -> HttpResponse:
    """For the soak: effect and record are in one transaction, so that any other fault may come."""
    journal = Journal(Path(request.headers["Journal"]))
    span = Span(journal, None)
    if journal.first(f"ran-{GUARDED}-{key}"):
        journal.write("hit", kind=GUARDED, key=key, what="client gone", point="began", long=True)
        span.wait_at(gate(GUARDED, key))
    Effect.objects.create(order_number=key, by=GUARDED, delivery=span.run)
    return HttpResponse("done")


async def ready(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ready")


urlpatterns: list[Any] = [
    path("ready/", ready),
    path(f"{PLAIN}/<int:key>/", plain),
    path(f"{GUARDED}/<int:key>/", guarded),
    path("atomic/<int:key>/", atomic),
]
