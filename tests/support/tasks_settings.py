"""Settings of the tests' workers: the site's, plus values from the environment."""

from __future__ import annotations

import json
import os
import sys

from testproject.demo.files import register
from testproject.settings import *  # noqa: F403
from testproject.settings import DLOCKS
from tests.support.postgres import settings_for

if url := os.environ.get("TASKS_POSTGRES"):
    DATABASES = {"default": settings_for(url)}
if os.environ.get("TASKS_DRIVER") == "psycopg2":
    # Django prefers the newer driver.
    sys.modules["psycopg"] = None  # type: ignore[assignment]

DLOCKS["default"] |= {
    # Short enough for tests that wait for the end of a lease, and longer than a busy machine keeps
    # a process from running.
    "TTL": 6.0,
    "OPTIONS": {"command_timeout": 2.0},
    # A Redis other than the broker's, if a test disturbs only one of them.
    "LOCATION": os.environ["TASKS_LOCKS"],
}
if os.environ["TASKS_LOCKS"] == "database":
    del DLOCKS["default"]["LOCATION"]
    DLOCKS["default"]["BACKEND"] = "django_dlock.backends.database.DatabaseBackend"

CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_SEND_TASK_EVENTS = False

register()

globals().update(json.loads(os.environ.get("TASKS_SETTINGS") or "{}"))
