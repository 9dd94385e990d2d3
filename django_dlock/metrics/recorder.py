"""Receives the signals of locks, and counts them in the exporters.

Receivers run on a thread of their own, so nothing waits for an exporter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured

from .. import signals
from ..core import dispatch
from . import instruments
from .config import EXPORTERS, MetricsSettings
from .groups import Groups
from .instruments import Instrument


class Exporter(Protocol):
    """Counts values in one library."""

    def add(self, instrument: Instrument, value: float, labels: Mapping[str, str]) -> None:
        """Add to a counter, to a sum of all processes, or to a histogram; or set a gauge.

        A counter to which 0 is added is exported from then on.
        """

    def close(self) -> None:
        """Count nothing any more."""


class Recorder:
    """The receivers.

    Once a group of an alias is seen, all of its counters are exported with 0: a series that begins
    with 1 does not increase in Prometheus, so nobody would be told of the first loss.
    """

    def __init__(self, exporters: Sequence[Exporter], groups: Groups) -> None:
        self._exporters, self._groups = exporters, groups
        self._begun: set[tuple[str, str]] = set()
        self._pid = os.getpid()

    def connect(self) -> None:
        for signal, receiver in self._receivers():
            dispatch.assign(receiver.__func__, dispatch.metrics)
            signal.connect(receiver, weak=False, dispatch_uid="django_dlock.metrics")

    def disconnect(self) -> None:
        for signal, _ in self._receivers():
            signal.disconnect(dispatch_uid="django_dlock.metrics")
        for exporter in self._exporters:
            exporter.close()

    def _receivers(self) -> list[tuple[Any, Any]]:
        return [
            (signals.acquired, self._on_acquired),
            (signals.broken, self._on_broken),
            (signals.contended, self._on_contended),
            (signals.gave_up, self._on_gave_up),
            (signals.in_doubt, self._on_in_doubt),
            (signals.lost, self._on_lost),
            (signals.released, self._on_released),
            (signals.renewal_due, self._on_renewal_due),
            (signals.renewed, self._on_renewed),
            (signals.requeued, self._on_requeued),
            (signals.stopped_waiting, self._on_stopped_waiting),
        ]

    def _add(
        self, instrument: Instrument, labels: Mapping[str, str], value: float = 1, **more: str
    ) -> None:
        for exporter in self._exporters:
            exporter.add(instrument, value, {**labels, **more})

    def _of(self, alias: str, name: str, facts: Mapping[str, Any]) -> dict[str, str]:
        labels = {"alias": alias, "group": self._groups.of(name, facts.get("template", ""))}
        if self._pid != os.getpid():
            # A forked child may have exporters of its own, which know of no group yet.
            self._pid, self._begun = os.getpid(), set()
        if (alias, labels["group"]) not in self._begun:
            self._begin(labels)
            self._begun.add((alias, labels["group"]))
        return labels

    def _begin(self, labels: Mapping[str, str]) -> None:
        for instrument in instruments.EVENTS:
            if instrument.kind != "counter" or "task" in instrument.labels:
                continue
            of = {label: labels[label] for label in instrument.labels if label in labels}
            for value in instrument.values:
                self._add(instrument, {**of, instrument.labels[-1]: value}, 0)
            if not instrument.values:
                self._add(instrument, of, 0)

    def _on_acquired(self, *, alias: str, name: str, waited: float, **facts: Any) -> None:
        labels = self._of(alias, name, facts)
        self._add(instruments.ATTEMPTS, labels, outcome="acquired")
        self._add(instruments.WAITS, labels, waited)
        self._add(instruments.HELD, labels)

    def _on_contended(self, *, alias: str, name: str, **facts: Any) -> None:
        labels = self._of(alias, name, facts)
        self._add(instruments.CONTENTIONS, labels)
        self._add(instruments.WAITING, labels)

    def _on_stopped_waiting(self, *, alias: str, name: str, **facts: Any) -> None:
        self._add(instruments.WAITING, self._of(alias, name, facts), -1)

    def _on_gave_up(self, *, alias: str, name: str, reason: str, **facts: Any) -> None:
        self._add(instruments.ATTEMPTS, self._of(alias, name, facts), outcome=reason)

    def _on_renewed(self, *, alias: str, **_: Any) -> None:
        self._add(instruments.RENEWALS, {"alias": alias})

    def _on_renewal_due(self, *, late: float, **_: Any) -> None:
        self._add(instruments.LATENESS, {}, late)

    def _on_in_doubt(self, *, alias: str, name: str, **facts: Any) -> None:
        self._add(instruments.DOUBTS, self._of(alias, name, facts))

    def _on_released(
        self, *, alias: str, name: str, held_for: float, reason: str = "released", **facts: Any
    ) -> None:
        self._ended(self._of(alias, name, facts), held_for, reason)

    def _on_lost(
        self, *, alias: str, name: str, held_for: float, reason: str, **facts: Any
    ) -> None:
        labels = self._of(alias, name, facts)
        self._add(instruments.LOSSES, labels, reason=reason)
        self._ended(labels, held_for, "lost")

    def _ended(self, labels: dict[str, str], held_for: float, end: str) -> None:
        self._add(instruments.HOLDS, labels, held_for, end=end)
        self._add(instruments.HELD, labels, -1)

    def _on_broken(self, *, alias: str, name: str, reason: str, **facts: Any) -> None:
        self._add(instruments.BREAKS, self._of(alias, name, facts), reason=reason)

    def _on_requeued(self, *, task: str, reason: str, **_: Any) -> None:
        self._add(instruments.REQUEUES, {"task": task, "reason": reason})


_connected: Recorder | None = None


def connect(settings: MetricsSettings) -> None:
    """Count from now on in the exporters of these settings, and no longer in earlier ones.

    Raises:
        ImproperlyConfigured: The library of an exporter is not installed.
    """
    global _connected
    disconnect()
    if not settings.exporters:
        return
    exporters: list[Exporter] = [module.make(settings) for module in modules(settings)]
    _connected = Recorder(exporters, Groups(settings.group, settings.groups))
    _connected.connect()


def disconnect() -> None:
    """Count nothing any more."""
    global _connected
    if _connected is not None:
        _connected.disconnect()
        _connected = None


def modules(settings: MetricsSettings) -> list[Any]:
    """The modules of the exporters of these settings.

    Raises:
        ImproperlyConfigured: The library of an exporter is not installed.
    """
    return [_module(name) for name in settings.exporters]


def _module(name: str) -> Any:
    path, package = EXPORTERS[name]
    try:
        return import_module(path)
    except ImportError as error:
        if package is None or (error.name or "").partition(".")[0] != package:
            raise
        raise ImproperlyConfigured(
            f"DLOCK_METRICS['EXPORTERS'] has {name!r}, but {package} is not installed: "
            f'pip install "django-dlock[{name}]"'
        ) from error
