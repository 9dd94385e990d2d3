"""Django as the benchmark needs it; the servers' addresses come from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REDIS_URL = os.environ["BENCH_REDIS_URL"]
POSTGRES_URL = os.environ.get("BENCH_POSTGRES_URL", "")

SECRET_KEY = "only for the benchmark"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_dlock",
]

DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": Path(os.environ["BENCH_DIRECTORY"]) / "db.sqlite3",
    },
}
if POSTGRES_URL:
    _parts = urlsplit(POSTGRES_URL)
    DATABASES["postgres"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _parts.path.lstrip("/"),
        "USER": unquote(_parts.username or ""),
        "PASSWORD": unquote(_parts.password or ""),
        "HOST": _parts.hostname or "",
        "PORT": str(_parts.port or ""),
    }

CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        # Another database than the locks': ``cache.clear()`` is FLUSHDB.
        "LOCATION": urlsplit(REDIS_URL)._replace(path="/1").geturl(),
    },
}

DLOCKS: dict[str, Any] = {
    "default": {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": REDIS_URL,
    },
}
