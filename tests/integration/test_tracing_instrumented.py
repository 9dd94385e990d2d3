"""Spans of locks beside those of OpenTelemetry's own instrumentation of Django and Celery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import Client, override_settings
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.instrumentation.django import DjangoInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_dlock.core import dispatch, tracing
from django_dlock.tracing.spans import OpenTelemetryTracer
from tests.support.deliveries import in_memory, recorded, states, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider()


@pytest.fixture
def exporter(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with override_settings(DLOCK_TRACING=True):
        # OpenTelemetry allows one provider in a process, so it is not set there.
        tracing.use(OpenTelemetryTracer(provider))
        yield exporter


def finished(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    dispatch.flush()
    return exporter.get_finished_spans()


def children(spans: tuple[ReadableSpan, ...], parent: ReadableSpan) -> list[str]:
    assert parent.context is not None
    return sorted(
        span.name
        for span in spans
        if span.parent is not None and span.parent.span_id == parent.context.span_id
    )


def test_the_lock_of_a_request_is_inside_the_span_of_the_request(
    exporter: InMemorySpanExporter, provider: TracerProvider, client: Client
) -> None:
    entry = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
    instrumentor = DjangoInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    try:
        with override_settings(DLOCKS={"default": entry}):
            client.post("/orders/7/charge/")
    finally:
        instrumentor.uninstrument()
    spans = finished(exporter)
    [request] = [span for span in spans if span.kind is trace.SpanKind.SERVER]
    assert children(spans, request) == ["django_dlock.acquire", "django_dlock.hold"]


def test_lock_and_record_of_a_task_are_inside_the_span_of_its_run(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    try:
        with in_memory() as app:
            recorded(app).delay(1)
            work(app)
    finally:
        instrumentor.uninstrument()
    assert states() == ["succeeded"]
    spans = finished(exporter)
    [run] = [span for span in spans if span.kind is trace.SpanKind.CONSUMER]
    assert children(spans, run) == [
        "django_dlock.acquire",
        "django_dlock.claim",
        "django_dlock.complete",
        "django_dlock.hold",
    ]
