"""Settings of the processes that run Celery's own tests: as little of Django as we need."""

from __future__ import annotations

from testproject.settings import DATABASES, DLOCKS, SECRET_KEY, TIME_ZONE, USE_TZ

__all__ = ["DATABASES", "DLOCKS", "SECRET_KEY", "TIME_ZONE", "USE_TZ"]

# No tasks of a project's own, which Celery's tests would discover.
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_dlock"]
# The tests look at what Celery logs.
LOGGING_CONFIG = None

DATABASES["default"]["CONN_MAX_AGE"] = None
DLOCKS["default"]["OPTIONS"] = {"command_timeout": 2.0}
