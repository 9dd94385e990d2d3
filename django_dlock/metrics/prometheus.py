"""Counts in prometheus-client; also with several processes (``PROMETHEUS_MULTIPROC_DIR``)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import prometheus_client
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry, Metric, multiprocess
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .. import process
from ..core import dispatch
from ..log import logger
from . import config
from .config import MetricsSettings
from .instruments import EVENTS, LEFT_OUT, STORES, Instrument, prometheus_name
from .stores import StoreFacts

__all__ = ["PrometheusExporter", "StoreCollector", "make", "metrics_view", "registry"]

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


class PrometheusExporter:
    """The metrics of this process, in a registry.

    Args:
        stores: Collects what the stores say; ``None`` for nothing.
    """

    def __init__(self, registry: CollectorRegistry, stores: StoreCollector | None) -> None:
        self._registry, self._stores = registry, stores
        self._metrics: dict[str, Any] | None = None
        if stores is not None:
            registry.register(stores)
        if _directory():
            # Before the first event, which may still be in the queue when the process ends.
            process.at_fork(after_in_child=_end_gauges_at_exit)
            _end_gauges_at_exit()

    def add(self, instrument: Instrument, value: float, labels: Mapping[str, str]) -> None:
        if self._metrics is None:
            # Not earlier: with several processes, this makes a file, which stays when they end.
            self._metrics = self._made()
        if (metric := self._metrics.get(instrument.name)) is None:
            return
        if labels:
            metric = metric.labels(**labels)
        if instrument.kind == "gauge":
            metric.set(value)
        elif instrument.kind == "histogram":
            metric.observe(value)
        else:
            metric.inc(value)

    def _made(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        try:
            for each in EVENTS:
                made[each.name] = _metric(each, self._registry)
        except OSError as error:
            logger.error("Metrics are off: %s", error)
        return made

    def close(self) -> None:
        for metric in (self._metrics or {}).values():
            self._registry.unregister(metric)
        if self._stores is not None:
            self._registry.unregister(self._stores)


def _metric(instrument: Instrument, registry: CollectorRegistry) -> Any:
    name, labels = prometheus_name(instrument), instrument.labels
    common: dict[str, Any] = {"labelnames": labels, "registry": registry}
    if instrument.kind == "counter":
        return prometheus_client.Counter(name, instrument.description, **common)
    if instrument.kind == "histogram":
        common["buckets"] = instrument.bounds
        return prometheus_client.Histogram(name, instrument.description, **common)
    # A process that has ended holds nothing.
    mode = "livesum" if instrument.kind == "up_down" else "livemax"
    common["multiprocess_mode"] = mode
    return prometheus_client.Gauge(name, instrument.description, **common)


def _end_gauges_at_exit() -> None:
    process.at_exit(_end_gauges)


def _end_gauges() -> None:
    """Remove the files of what this process holds and waits for."""
    dispatch.settle(dispatch.PATIENCE_AT_EXIT)
    try:
        multiprocess.mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]
    except OSError as error:
        logger.info("Gauges of an ended process are not removed: %s", error)


def _counted_by_processes() -> Iterable[Metric]:
    """What is in their files.

    Raises:
        OSError: The directory is not there, or may not be read.
    """
    files = []
    for path in Path(os.environ[DIRECTORY]).iterdir():
        # The gauges of a process are removed when it ends. A file is empty if its process was
        # killed while it made it; the library would then read none of the others.
        with contextlib.suppress(FileNotFoundError):
            if path.suffix == ".db" and path.stat().st_size:
                files.append(str(path))
    merged: Iterable[Metric] = multiprocess.MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return merged


class StoreCollector(Collector):
    """What the stores say, asked for when metrics are read; and what all processes have counted.

    Args:
        processes: Whether to read the files of ``PROMETHEUS_MULTIPROC_DIR``.
    """

    def __init__(self, facts: StoreFacts, *, processes: bool = False) -> None:
        self._facts, self._processes = facts, processes

    def describe(self) -> Iterable[GaugeMetricFamily]:
        # Without this, registering would ask the stores.
        return list(self._families().values())

    def collect(self) -> Iterable[Metric]:
        families = self._families()
        counted: list[Metric] = []
        if self._processes:
            labels, left_out = ["processes", ""], 0
            try:
                counted += _counted_by_processes()
            except Exception as error:  # noqa: BLE001 - the rest of the page is still true
                logger.warning("What processes have counted cannot be read: %s", error)
                left_out = 1
            families[LEFT_OUT.name].add_metric(labels, left_out)
        for instrument, value, labels_ in self._facts.samples():
            families[instrument.name].add_metric(
                [labels_[label] for label in instrument.labels], value
            )
        return [*counted, *families.values()]

    def _families(self) -> dict[str, GaugeMetricFamily]:
        return {
            each.name: GaugeMetricFamily(
                prometheus_name(each), each.description, labels=each.labels
            )
            for each in STORES
        }


_facts: StoreFacts | None = None
"""Of this process: for all who read its metrics, so that their answers are kept."""


def make(settings: MetricsSettings) -> PrometheusExporter:
    """The exporter of this process, in the registry of prometheus-client.

    Raises:
        ImproperlyConfigured: The directory for several processes cannot be used.
    """
    global _facts
    directory = _directory()
    if directory is not None and not os.access(directory, os.W_OK | os.X_OK):
        raise ImproperlyConfigured(
            f"{DIRECTORY} is {str(directory)!r}, which is not a directory that this process may "
            "write to"
        )
    _facts = StoreFacts(settings.records, directory)
    return PrometheusExporter(prometheus_client.REGISTRY, StoreCollector(_facts))


def _directory() -> Path | None:
    """Where several processes count; ``None`` if each counts for itself."""
    path = os.environ.get(DIRECTORY)
    return Path(path) if path else None


def registry() -> CollectorRegistry:
    """What a page of metrics shows: those of all processes if there are several.

    For a server of your own, such as that of a Celery worker.

    Raises:
        ImproperlyConfigured: ``DLOCK_METRICS`` is wrong.
    """
    global _facts
    if (directory := _directory()) is None:
        return prometheus_client.REGISTRY
    if _facts is None:
        # This process counts nothing, but others may.
        _facts = StoreFacts(config.read().records, directory)
    made = CollectorRegistry()
    made.register(StoreCollector(_facts, processes=True))
    return made


def metrics_view(request: HttpRequest) -> HttpResponse:
    """All metrics of prometheus-client, of all processes if there are several."""
    wants = request.headers.get("Accept", "")
    openmetrics = re.search(r"application/openmetrics-text", wants)
    generate: Any = prometheus_client.generate_latest
    content_type = prometheus_client.CONTENT_TYPE_LATEST
    if openmetrics:
        from prometheus_client import openmetrics as of

        generate = of.exposition.generate_latest
        content_type = of.exposition.CONTENT_TYPE_LATEST
    return HttpResponse(generate(registry()), content_type=content_type)
