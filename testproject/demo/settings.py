"""The site's settings with short times, so that all faults happen within a minute.

A body of the demonstration outlives both the lease and the visibility timeout. ``DLOCK_DEMO_KIND``
says what keeps locks and messages: ``redis``; or ``sqlite`` and ``postgresql`` for the locks, and
files for the messages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from testproject.postgres import settings_for
from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, REDIS_URL

from . import files

KIND = os.environ.get("DLOCK_DEMO_KIND", "redis")
DIRECTORY = Path(os.environ["DLOCK_DEMO_DIR"])
QUEUE, DELIVERED = DIRECTORY / "queue", DIRECTORY / "delivered"

# The charge is the first statement of a body's transaction, and comes after its long part. In
# deferred mode the transaction takes SQLite's write lock only there, so that bodies run at the same
# time, and only the lock under test keeps those of one order apart. (Use immediate mode if a
# transaction reads first; PostgreSQL needs neither.)
DATABASES["default"]["OPTIONS"]["transaction_mode"] = "DEFERRED"

DLOCKS = {"default": {"TTL": 3.0, "OPTIONS": {"command_timeout": 0.75}}}
if KIND == "redis":
    DLOCKS["default"] |= {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": REDIS_URL,
    }
else:
    DLOCKS["default"] |= {"BACKEND": "django_dlock.backends.database.DatabaseBackend"}
    CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
if KIND == "postgresql":
    DATABASES["default"] = settings_for(os.environ["DLOCK_DEMO_POSTGRES"])

if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    # What the keys of both tasks begin with: whoever ends a dead child's lock knows its name only.
    DLOCK_METRICS = {"EXPORTERS": ["prometheus"], "GROUPS": ["locked", "order"]}

CELERY_IMPORTS = ["testproject.demo.tasks"]
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {"visibility_timeout": 4}
if KIND != "redis":
    CELERY_BROKER_URL, CELERY_RESULT_BACKEND = files.register(), "disabled://"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(QUEUE),
        "data_folder_out": str(QUEUE),
        "control_folder": str(DIRECTORY / "control"),
        # A separate folder for each worker.
        "processed_folder": str(DELIVERED / os.environ.get("DLOCK_DEMO_WORKER", "nobody")),
        "store_processed": True,
        "polling_interval": 0.1,
    }
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# How long a worker waits for the result of a dead child, ten seconds by default; those that read
# from Redis or RabbitMQ do not wait.
CELERY_WORKER_LOST_WAIT = 0.5
