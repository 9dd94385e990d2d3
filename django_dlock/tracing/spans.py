"""Makes spans in OpenTelemetry, with the provider that the project has set up.

Loaded only if ``DLOCK_TRACING`` is on; ``core/tracing.py`` says what becomes a span.
"""

from __future__ import annotations

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, TracerProvider

from ..core.tracing import Facts


class OpenTelemetryTracer:
    """See ``core.tracing.Tracer``.

    Args:
        provider: By default the one of the process, even if it is set later.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("django_dlock", tracer_provider=provider)

    def current(self) -> Context:
        return context.get_current()

    def start(self, name: str, parent: Context, started: int, facts: Facts) -> Span:
        return self._tracer.start_span(name, parent, start_time=started, attributes=dict(facts))

    def inside(self, span: Span) -> Context:
        return trace.set_span_in_context(span, Context())

    def end(self, span: Span, ended: int, facts: Facts, error: str) -> None:
        span.set_attributes(dict(facts))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(ended)
