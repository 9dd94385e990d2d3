"""A worker whose parent serves the metrics of its children, as the guide on metrics shows.

Run by ``celery -A tests.support.tasks_metrics worker``.
"""

from __future__ import annotations

import os

from celery import shared_task
from celery.signals import worker_init
from prometheus_client import CollectorRegistry, multiprocess, start_http_server

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, body

__all__ = ["app"]


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}")
def locked(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """The lock alone."""
    return body(self, order, place, gate=gate)


@worker_init.connect
def serve_metrics(**_: object) -> None:
    registry = CollectorRegistry()
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        multiprocess.MultiProcessCollector(registry)
    port = int(os.environ.get("METRICS_PORT", "9100"))
    start_http_server(port, os.environ.get("METRICS_HOST", "127.0.0.1"), registry=registry)
