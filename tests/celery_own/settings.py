"""Settings of the processes that run Celery's own tests, with as little of Django as possible."""

from __future__ import annotations

from testproject.settings import DATABASES, DLOCKS, SECRET_KEY, TIME_ZONE, USE_TZ

__all__ = ["DATABASES", "DLOCKS", "SECRET_KEY", "TIME_ZONE", "USE_TZ"]

# No tasks of a project, because Celery's tests would discover them.
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_dlock"]
# The tests read Celery's log.
LOGGING_CONFIG = None

DATABASES["default"]["CONN_MAX_AGE"] = None
DLOCKS["default"]["OPTIONS"] = {"command_timeout": 2.0}
