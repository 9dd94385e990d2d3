"""Django's settings for the benchmark; the environment says where the servers are.

Each route to the servers has its own cache, lock aliases and database.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from testproject.postgres import settings_for

from . import parsers
from .peers import ETCD, FAILOVER, REDLOCK, ROUTES, ZOOKEEPER, Route

# Settings are read before any module that imports redis.
parsers.use(os.environ.get(parsers.VARIABLE, parsers.PYTHON))


def _cache(url: str) -> dict[str, Any]:
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        # Not the database of the locks, because ``cache.clear()`` runs FLUSHDB.
        "LOCATION": urlsplit(url)._replace(path="/1").geturl(),
    }


def _locks(url: str, **options: Any) -> dict[str, Any]:
    backend = "django_dlock.backends.redis.RedisBackend"
    return {"BACKEND": backend, "LOCATION": url, "OPTIONS": options}


def _table(database: str, **options: Any) -> dict[str, Any]:
    backend = "django_dlock.backends.database.DatabaseBackend"
    return {"BACKEND": backend, "OPTIONS": {"database": database, **options}}


def _store(path: str, location: Any = None, **options: Any) -> dict[str, Any]:
    entry = {"BACKEND": f"django_dlock.backends.{path}", "OPTIONS": options}
    return entry if location is None else {**entry, "LOCATION": location}


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
        # As on a site with workers; see testproject.settings.
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "timeout": 20,
        },
    },
}
CACHES: dict[str, dict[str, Any]] = {}
SQLITE = Route("default", store="sqlite").alias
DLOCKS: dict[str, dict[str, Any]] = {SQLITE: _table("default")}

for _name, _urls in json.loads(os.environ[ROUTES]).items():
    _route = Route(_name)
    CACHES[_name] = _cache(_urls["redis"])
    DLOCKS[_route.alias] = _locks(_urls["redis"])
    # With this one, shorter leases can be renewed, which saves time when intervals are measured.
    DLOCKS[Route(_name, brisk=True).alias] = _locks(_urls["redis"], command_timeout=0.5)
    if _urls["postgres"]:
        DATABASES[_route.database] = entry = settings_for(_urls["postgres"])
        for _brisk in ({}, {"command_timeout": 0.5}):
            _alias = Route(_name, brisk=bool(_brisk), store="postgres").alias
            DLOCKS[_alias] = _table(_route.database, **_brisk)
        # As Django's documentation recommends for sites without a pooler.
        prepare = {"OPTIONS": {"prepare_threshold": 5, "server_side_binding": True}}
        for _size in (10, 1_000, 100_000):
            path = {"OPTIONS": {"options": f"-c search_path=held_{_size}"}}
            DATABASES[f"held-{_size}"] = entry | path
        DATABASES[f"{_route.database}-prepared"] = entry | prepare
        DLOCKS[Route(_name, store="prepared").alias] = _table(f"{_route.database}-prepared")

    if REDLOCK in _urls:
        DLOCKS |= {
            Route(_name, store=_kind).alias: entry
            for _kind, entry in {
                REDLOCK: _store("redlock.RedlockBackend", _urls[REDLOCK]),
                ZOOKEEPER: _store("zookeeper.ZooKeeperBackend", _urls[ZOOKEEPER]),
                ETCD: _store("etcd.EtcdBackend", _urls[ETCD]),
                FAILOVER: _store("failover.FailoverBackend", primary=_route.alias, standby=SQLITE),
            }.items()
        }

if len(DATABASES) > 1 and importlib.util.find_spec("pglock") is not None:
    INSTALLED_APPS += ["pgactivity", "pglock"]

# Events on a busy machine show in the numbers, not in the log.
LOGGING = {"version": 1, "loggers": {"django_dlock": {"level": "CRITICAL"}}}
