"""Requests that REST framework has wrapped: its views get a wrapper around Django's request."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest


def unwrapped(request: HttpRequest) -> Any:
    """Django's own request; ``Any``, because callers read what Django does not declare."""
    return getattr(request, "_request", request)
