"""Pages of a site on which a test makes what the alerts are for; served by gunicorn."""

from __future__ import annotations

import os
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import path

from django_dlock import BackendUnavailable, Lock
from django_dlock.lock import of_template
from django_dlock.metrics.prometheus import metrics_view

kept: list[Lock] = []


def made(name: str, **options: Any) -> Lock:
    """A lock whose metrics are those of what precedes the colon."""
    return of_template(Lock(name, **options), f"{name.partition(':')[0]}:{{number}}")


def hold(request: HttpRequest, alias: str, name: str) -> HttpResponse:
    """Hold a lock from now on; the answer is the id of the process that does."""
    options = {option: float(value) for option, value in request.GET.items()}
    lock = made(name, using=alias, bound=False, **options)
    if not lock.acquire(timeout=10):
        return HttpResponse(status=409)
    kept.append(lock)
    return HttpResponse(os.getpid())


def attempt(request: HttpRequest, alias: str, name: str) -> HttpResponse:
    """Acquire a lock and release it, if it is free within ``wait`` seconds; say what happened."""
    lock = made(name, using=alias, wait=float(request.GET.get("wait", 0)))
    try:
        if not lock.acquire():
            return HttpResponse("contended")
    except BackendUnavailable:
        return HttpResponse("unavailable")
    lock.release()
    return HttpResponse("acquired")


urlpatterns = [
    path("metrics", metrics_view),
    path("hold/<str:alias>/<str:name>", hold),
    path("attempt/<str:alias>/<str:name>", attempt),
]
