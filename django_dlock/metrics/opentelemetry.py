"""Counts in OpenTelemetry's metrics, with whatever provider the project has set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from .config import MetricsSettings
from .instruments import EVENTS, STORES, Instrument
from .stores import StoreFacts


class OpenTelemetryExporter:
    """The instruments of a meter."""

    def __init__(self, meter: Meter, facts: StoreFacts) -> None:
        self._facts, self._closed = facts, False
        self._adders = {each.name: _adder(meter, each) for each in EVENTS}
        for each in STORES:
            meter.create_observable_gauge(
                each.name, [partial(self._observe, each)], each.unit, each.description
            )

    def add(self, instrument: Instrument, value: float, labels: Mapping[str, str]) -> None:
        if not self._closed:
            self._adders[instrument.name](value, dict(labels))

    def close(self) -> None:
        """Count and observe nothing any more; a meter cannot forget its instruments."""
        self._closed = True

    def _observe(self, instrument: Instrument, _: CallbackOptions) -> Iterable[Observation]:
        samples = [] if self._closed else self._facts.samples()
        return [Observation(value, labels) for of, value, labels in samples if of is instrument]


def _adder(meter: Meter, instrument: Instrument) -> Callable[[float, dict[str, str]], Any]:
    name, unit, description = instrument.name, instrument.unit, instrument.description
    if instrument.kind == "counter":
        return meter.create_counter(name, unit, description).add
    if instrument.kind == "up_down":
        return meter.create_up_down_counter(name, unit, description).add
    if instrument.kind == "gauge":
        return meter.create_gauge(name, unit, description).set
    advised = {"explicit_bucket_boundaries_advisory": list(instrument.bounds)}
    return meter.create_histogram(name, unit, description, **advised).record


def make(settings: MetricsSettings) -> OpenTelemetryExporter:
    """The exporter, in a meter of the provider that the project has set, or will set."""
    return OpenTelemetryExporter(metrics.get_meter("django_dlock"), StoreFacts(settings.records))
