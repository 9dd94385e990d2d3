"""Counts in prometheus-client; also with several processes (``PROMETHEUS_MULTIPROC_DIR``)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import prometheus_client
from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry, multiprocess
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from . import config
from .config import MetricsSettings
from .instruments import DURATIONS, EVENTS, STORES, Instrument, prometheus_name
from .stores import StoreFacts

__all__ = ["PrometheusExporter", "StoreCollector", "make", "metrics_view"]


class PrometheusExporter:
    """The metrics of this process, in a registry.

    Args:
        stores: Collects what the stores say; ``None`` for nothing.
    """

    def __init__(self, registry: CollectorRegistry, stores: StoreCollector | None) -> None:
        self._registry, self._stores = registry, stores
        self._metrics = {each.name: _metric(each, registry) for each in EVENTS}
        if stores is not None:
            registry.register(stores)

    def add(self, instrument: Instrument, value: float, labels: Mapping[str, str]) -> None:
        metric = self._metrics[instrument.name]
        if labels:
            metric = metric.labels(**labels)
        if instrument.kind == "gauge":
            metric.set(value)
        elif instrument.kind == "histogram":
            metric.observe(value)
        else:
            metric.inc(value)

    def close(self) -> None:
        for metric in self._metrics.values():
            self._registry.unregister(metric)
        if self._stores is not None:
            self._registry.unregister(self._stores)


def _metric(instrument: Instrument, registry: CollectorRegistry) -> Any:
    name, labels = prometheus_name(instrument), instrument.labels
    common: dict[str, Any] = {"labelnames": labels, "registry": registry}
    if instrument.kind == "counter":
        return prometheus_client.Counter(name, instrument.description, **common)
    if instrument.kind == "histogram":
        common["buckets"] = DURATIONS
        return prometheus_client.Histogram(name, instrument.description, **common)
    # A process that has ended holds nothing.
    mode = "livesum" if instrument.kind == "up_down" else "livemax"
    common["multiprocess_mode"] = mode
    return prometheus_client.Gauge(name, instrument.description, **common)


class StoreCollector(Collector):
    """What the stores say, asked for when metrics are read."""

    def __init__(self, facts: StoreFacts) -> None:
        self._facts = facts

    def describe(self) -> Iterable[GaugeMetricFamily]:
        # Without this, registering would ask the stores.
        return list(self._families().values())

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = self._families()
        for instrument, value, labels in self._facts.samples():
            families[instrument.name].add_metric(
                [labels[label] for label in instrument.labels], value
            )
        return list(families.values())

    def _families(self) -> dict[str, GaugeMetricFamily]:
        return {
            each.name: GaugeMetricFamily(
                prometheus_name(each), each.description, labels=each.labels
            )
            for each in STORES
        }


def make(settings: MetricsSettings) -> PrometheusExporter:
    """The exporter of this process, in the registry of prometheus-client."""
    stores = StoreCollector(StoreFacts(settings.records))
    return PrometheusExporter(prometheus_client.REGISTRY, stores)


def metrics_view(request: HttpRequest) -> HttpResponse:
    """All metrics of prometheus-client, of all processes if there are several."""
    registry = prometheus_client.REGISTRY
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(StoreCollector(StoreFacts(config.read().records)))
    wants = request.headers.get("Accept", "")
    openmetrics = re.search(r"application/openmetrics-text", wants)
    generate: Any = prometheus_client.generate_latest
    content_type = prometheus_client.CONTENT_TYPE_LATEST
    if openmetrics:
        from prometheus_client import openmetrics as of

        generate = of.exposition.generate_latest
        content_type = of.exposition.CONTENT_TYPE_LATEST
    return HttpResponse(generate(registry), content_type=content_type)
