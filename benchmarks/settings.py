"""Django as the benchmark needs it; the servers' addresses come from the environment.

What is called "counted" goes by way of the proxies that count.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def _postgres(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
    }


def _cache(url: str) -> dict[str, Any]:
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        # Another database than the locks': ``cache.clear()`` is FLUSHDB.
        "LOCATION": urlsplit(url)._replace(path="/1").geturl(),
    }


def _locks(url: str, **options: Any) -> dict[str, Any]:
    backend = "django_dlock.backends.redis.RedisBackend"
    return {"BACKEND": backend, "LOCATION": url, "OPTIONS": options}


REDIS_URL = os.environ["BENCH_REDIS_URL"]
COUNTED_REDIS_URL = os.environ["BENCH_COUNTED_REDIS_URL"]
POSTGRES_URL = os.environ["BENCH_POSTGRES_URL"]

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
        # As a site with workers has it; see testproject.settings.
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "timeout": 20,
        },
    },
}
if POSTGRES_URL:
    DATABASES["postgres"] = _postgres(POSTGRES_URL)
    DATABASES["postgres_counted"] = _postgres(os.environ["BENCH_COUNTED_POSTGRES_URL"])
if POSTGRES_URL and importlib.util.find_spec("pglock") is not None:
    INSTALLED_APPS += ["pgactivity", "pglock"]

CACHES = {"default": _cache(REDIS_URL), "counted": _cache(COUNTED_REDIS_URL)}
DLOCKS = {
    "default": _locks(REDIS_URL),
    "counted": _locks(COUNTED_REDIS_URL),
    # Shorter leases can be renewed by these, which saves time where many intervals are watched.
    "brisk": _locks(REDIS_URL, command_timeout=0.5),
    "brisk_counted": _locks(COUNTED_REDIS_URL, command_timeout=0.5),
}

# Whatever happens on a busy machine shows in the numbers, not in between.
LOGGING = {"version": 1, "loggers": {"django_dlock": {"level": "CRITICAL"}}}
