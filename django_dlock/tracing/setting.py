"""Reads ``DLOCK_TRACING``."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..text.redaction import redacted


def tracer_class() -> Any:
    """The class of the tracer that ``DLOCK_TRACING`` asks for; ``None`` without tracing.

    Raises:
        ImproperlyConfigured: Its value is wrong, or OpenTelemetry is not installed.
    """
    wanted: Any = getattr(settings, "DLOCK_TRACING", False)
    if not isinstance(wanted, bool):
        raise ImproperlyConfigured(f"DLOCK_TRACING is {redacted(wanted)}; it takes True or False")
    if not wanted:
        return None
    try:
        return import_string("django_dlock.tracing.spans.OpenTelemetryTracer")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ImproperlyConfigured(
            "DLOCK_TRACING is True, but opentelemetry-api is not installed: "
            'pip install "django-dlock[opentelemetry]"'
        ) from error
