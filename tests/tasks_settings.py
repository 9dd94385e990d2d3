"""Settings of the workers in the tests: the site's, plus what a test says by environment."""

from __future__ import annotations

import json
import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DLOCKS
from tests.postgres import settings_for

if url := os.environ.get("TASKS_POSTGRES"):
    DATABASES = {"default": settings_for(url)}

DLOCKS["default"] |= {
    "TTL": 1.5,
    "OPTIONS": {"command_timeout": 0.5},
    # A Redis apart from the broker's, where a test hurts the one and not the other.
    "LOCATION": os.environ.get("TASKS_LOCKS") or os.environ["REDIS_URL"],
}

CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_SEND_TASK_EVENTS = False

globals().update(json.loads(os.environ.get("TASKS_SETTINGS") or "{}"))
