"""The site's settings with everything short, so that a minute is enough to see it go wrong.

A body of the demonstration outlives both the lease and the visibility timeout.
"""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, REDIS_URL

# The charge is the first statement of a body's transaction, and comes after its long part.
# Deferred, the transaction takes SQLite's only write lock there and not already at its begin:
# so bodies of different orders run side by side, and nothing but the guard keeps one order's
# apart. (Immediate is right where a transaction reads first; PostgreSQL needs neither.)
DATABASES["default"]["OPTIONS"]["transaction_mode"] = "DEFERRED"

DLOCKS = {
    "default": {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": REDIS_URL,
        "TTL": 3.0,
        "OPTIONS": {"command_timeout": 0.75},
    },
}

CELERY_IMPORTS = ["testproject.demo.tasks"]
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 4}
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
# How long a worker waits for the result of a child that is gone; ten seconds otherwise.
CELERY_WORKER_LOST_WAIT = 0.5
