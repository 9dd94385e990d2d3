"""Settings of the test project; some of them come from the environment.

``DLOCK_DB`` is the SQLite file, ``REDIS_URL`` the Redis of locks, broker and results;
``DLOCK_STATISTICS`` turns on the counts for the admin.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BASE_DIR = Path(__file__).resolve().parent
REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")

SECRET_KEY = "only for the test project"
DEBUG = False
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", "testserver"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_dlock",
    "testproject.shop",
]

MIDDLEWARE = [
    "testproject.middleware.content_security_policy",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
ASGI_APPLICATION = "testproject.asgi.application"
STATIC_URL = "static/"
STATIC_ROOT = os.environ.get("DLOCK_STATIC_ROOT")
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"

DATABASES: dict[str, Any] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DLOCK_DB", BASE_DIR / "db.sqlite3"),
        "OPTIONS": {
            # For several workers: in SQLite's deferred mode, a transaction that first reads and
            # then writes may fail at once, whatever the timeout.
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "timeout": 20,
        },
        # A file instead of memory, so that the workers of a test see it; with the pid, so that
        # two test runs do not share it.
        "TEST": {"NAME": Path(tempfile.gettempdir()) / f"django-dlock-test-{os.getpid()}.sqlite3"},
    },
}

CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        # Not the database of the locks, because ``cache.clear()`` runs FLUSHDB.
        "LOCATION": urlsplit(REDIS_URL)._replace(path="/1").geturl(),
    },
}

DLOCKS: dict[str, Any] = {
    "default": {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": REDIS_URL,
    },
    "local": {"BACKEND": "django_dlock.backends.local.LocalBackend"},
}

# For the page of lock statistics. Tests and the demonstration count for themselves.
if os.environ.get("DLOCK_STATISTICS"):
    DLOCK_METRICS = {"EXPORTERS": ["admin"]}

CELERY_BROKER_URL = REDIS_URL
CELERY_RESULT_BACKEND = REDIS_URL
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TIMEZONE = TIME_ZONE
