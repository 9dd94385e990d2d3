"""System checks of the settings and, if the project uses Celery, of its tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from .. import conf
from ..backends.base import AliasOptions, Problem
from ..backends.redis.config import cache_entry, is_redis_cache
from ..exceptions import BackendRefused, BackendUnavailable
from ..handler import locks
from .databases import check_databases, check_migrations, check_records
from .dlock_settings import check_admin, check_metrics, check_names, check_scope, check_tracing
from .uwsgi import check_uwsgi

__all__ = [
    "check_admin",
    "check_alias",
    "check_databases",
    "check_deployment",
    "check_metrics",
    "check_migrations",
    "check_names",
    "check_project",
    "check_records",
    "check_scope",
    "check_settings",
    "check_settings_of",
    "check_shared_caches",
    "check_shared_caches_of",
    "check_tasks",
    "check_tracing",
    "check_views",
    "register",
]


def register() -> None:
    """Register the checks; called once, when the apps are ready."""
    checks.register(check_settings)
    checks.register(check_names)
    checks.register(check_admin)
    checks.register(check_metrics)
    checks.register(check_tracing)
    checks.register(check_scope)
    checks.register(check_uwsgi)
    checks.register(check_shared_caches, checks.Tags.caches)
    checks.register(check_tasks)
    checks.register(check_views, checks.Tags.urls)
    # Before Django 6.1, checks that ask a database run only with ``--database``.
    checks.register(check_databases, checks.Tags.database)
    # Checks that only matter in production, or ask a server, need ``check --deploy``.
    checks.register(check_deployment, deploy=True)
    checks.register(check_records, checks.Tags.database, deploy=True)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Errors in ``DLOCKS``, E001 to E009; W014: it has no alias ``default``; W027."""
    if found := list(map(_error, conf.problems())):
        return found
    aliases = conf.aliases()
    of_aliases = (message for alias in aliases for message in check_settings_of(alias))
    return [*_without_default(aliases), *of_aliases]


def check_settings_of(alias: str) -> list[checks.CheckMessage]:
    """Errors in the entry of one alias, or W027: its locks are never renewed."""
    found = list(map(_error, conf.problems_of(alias))) or list(_refused(alias))
    return found or list(_never_renewed(conf.alias_options(alias)))


def _never_renewed(options: AliasOptions) -> Iterator[checks.CheckMessage]:
    if options.max_hold < options.ttl:
        place = f"DLOCKS[{options.alias!r}]"
        yield checks.Warning(
            f"{place}['MAX_HOLD'] is {options.max_hold:g} s, less than its TTL of "
            f"{options.ttl:g} s: a lock is lost after that time, although its holder works, and is "
            "never renewed.",
            hint="MAX_HOLD limits how long a lock is renewed. Raise it above the longest work, or "
            "lower TTL.",
            id="django_dlock.W027",
        )


def _error(problem: Problem) -> checks.CheckMessage:
    return checks.Error(problem.message, hint=problem.hint, id=_id(problem))


def _id(problem: Problem) -> str:
    # A backend of another package has its own ids, such as "shop.E001".
    return problem.id if "." in problem.id else f"django_dlock.{problem.id}"


def _without_default(aliases: Sequence[str]) -> Iterator[checks.CheckMessage]:
    if conf.DEFAULT_ALIAS not in aliases:
        yield checks.Warning(
            f"DLOCKS has no alias {conf.DEFAULT_ALIAS!r}; it defines {sorted(aliases)}. A lock "
            "that names no alias raises InvalidLockBackend.",
            hint=f"Define DLOCKS[{conf.DEFAULT_ALIAS!r}]. If every lock names its alias in using, "
            "and every task in lock_using, silence this check.",
            id="django_dlock.W014",
        )


def _refused(alias: str) -> Iterator[checks.CheckMessage]:
    try:
        # Builds the backend, which does not connect.
        locks[alias]
    except Exception as error:  # noqa: BLE001 - of a backend that is not prepared for a value
        # Any other text may contain a password.
        known = isinstance(error, ImproperlyConfigured)
        what = f"DLOCKS[{alias!r}]: its backend cannot be made ({type(error).__name__})"
        yield checks.Error(
            str(error) if known else what,
            hint=f"Correct DLOCKS[{alias!r}] in the settings.",
            id="django_dlock.E008",
        )


# -- locks in the database of a cache --------------------------------------------------------

RedisLocation = tuple[str, str]
"""A Redis server, and a database in it."""


def check_shared_caches(**_: Any) -> list[checks.CheckMessage]:
    """W001: ``cache.clear()`` flushes a Redis database that contains locks."""
    return [warning for options in _aliases() for warning in check_shared_caches_of(options)]


def check_shared_caches_of(options: AliasOptions) -> Iterator[checks.CheckMessage]:
    """W001 of one alias."""
    caches: dict[str, RedisLocation] = {}
    for name in settings.CACHES:
        cache = cache_entry(name)
        location = _location_of_cache(cache) if is_redis_cache(cache.get("BACKEND", "")) else None
        if location is not None:
            caches[name] = location
    # A cache that the alias names is there for the locks, unless others use it.
    kept = options.cache if options.cache not in _caches_in_use() else None
    for location in _locations_of_locks(options):
        sharing = [name for name, other in caches.items() if other == location and name != kept]
        if sharing:
            server, database = location
            taken = {other for other_server, other in caches.values() if other_server == server}
            free = next((number for number in range(16) if str(number) not in taken), None)
            cure = "Use another server for the locks."
            if free is not None:
                cure = _cure(options, kept, server, free)
            yield checks.Warning(
                f"The locks of alias {options.alias!r} share database {database} of the "
                f"Redis at {server} with the caches {sharing}: cache.clear() runs FLUSHDB, "
                "so all held locks would be lost.",
                hint=cure,
                id="django_dlock.W001",
            )


def _caches_in_use() -> set[str]:
    # Django's tag {% cache %} uses "template_fragments", if there is one.
    used = (settings.CACHE_MIDDLEWARE_ALIAS, settings.SESSION_CACHE_ALIAS)
    return {"default", "template_fragments", *used}


def _cure(options: AliasOptions, kept: str | None, server: str, database: int) -> str:
    """What to change in the settings; it repeats none of their URLs, which may have passwords."""
    unix = server.startswith("/")
    url = f"unix:///path?db={database}" if unix else f"redis://host:6379/{database}"
    place = f"DLOCKS[{options.alias!r}]"
    if conf.configured() is None:
        extra = {"connection_kwargs": {"db": database}}
        whole = {"BACKEND": options.backend, "CACHE": options.cache, "OPTIONS": extra}
        return (
            "Keep the locks in another database, with this line in your settings: "
            f"DLOCKS = {{{options.alias!r}: {whole!r}}}"
        )
    if "db" in _dict(options.options.get("connection_kwargs")):
        # It overrides the database of CACHE and LOCATION.
        return (
            f'Keep the locks in another database, "db": {database}, in '
            f"{place}['OPTIONS']['connection_kwargs']."
        )
    if kept is not None:
        return f'Give CACHES[{kept!r}] a database of its own, "LOCATION": "{url}".'
    if options.cache is not None:
        return (
            "Give the locks a cache of their own in another database, "
            f'"LOCATION": "{url}", and name it in {place}[\'CACHE\'].'
        )
    return f"Name another database in {place}['LOCATION'], as in \"{url}\"."


def _locations_of_locks(options: AliasOptions) -> Iterator[RedisLocation]:
    if options.cache is not None:
        locations = [_location_of_cache(cache_entry(options.cache))]
    else:
        given = options.location or ()
        locations = [_location(url, {}) for url in ([given] if isinstance(given, str) else given)]
    own = _dict(options.options.get("connection_kwargs"))
    for server, database in filter(None, locations):
        yield server, str(own.get("db", database))


def _location_of_cache(cache: Mapping[str, Any]) -> RedisLocation | None:
    location = cache.get("LOCATION") or ""
    if isinstance(location, str):
        location = location.replace(";", ",").split(",")
    # Writes, including clear(), go to the first one.
    first = location[0] if isinstance(location, list | tuple) and location else None
    if not isinstance(first, str):
        return None
    options = _dict(cache.get("OPTIONS"))
    kwargs = {**options, **_dict(options.get("CONNECTION_POOL_KWARGS"))}
    return _location(first.strip(), kwargs)


def _dict(value: object) -> Mapping[str, Any]:
    """What a client reports if it is no dict."""
    return value if isinstance(value, Mapping) else {}


def _location(url: str, kwargs: Mapping[str, Any]) -> RedisLocation | None:
    """The server and database that a client uses; ``None`` if the address is not a valid URL.

    As in redis-py, a database in the URL overrides the one in ``kwargs``.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme == "unix":
        server, path = parts.path, ""
    elif parts.scheme in ("redis", "rediss"):
        host = parts.hostname or "localhost"
        server = f"{'127.0.0.1' if host == 'localhost' else host}:{port or 6379}"
        path = parts.path.strip("/")
    else:
        return None
    query = parse_qs(parts.query).get("db", [path])[0]
    return server, query or str(kwargs.get("db", 0))


# -- what only matters in production -------------------------------------------------------


def check_deployment(**_: Any) -> list[checks.CheckMessage]:
    """E010 to E012, W003, W006, W008 to W013, W016, W022, W023: the store; W002: locks of one
    process only; W004: SQLite with deferred transactions; I001: where locks are kept if ``DLOCKS``
    is not set.
    """
    found = [warning for options in _aliases() for warning in check_alias(options)]
    return [*found, *check_project()]


def check_project() -> Iterator[checks.CheckMessage]:
    """I001 and W004, which belong to no alias."""
    yield from _chosen()
    yield from _deferred_sqlite()


def _chosen() -> Iterator[checks.CheckMessage]:
    if not conf.problems() and conf.configured() is None:
        options = conf.alias_options(conf.DEFAULT_ALIAS)
        if options.backend == conf.DATABASE_BACKEND:
            yield checks.Info(
                "DLOCKS is not set and CACHES['default'] is not a Redis cache, so locks are kept "
                "in the project's database, on connections of their own.",
                hint="Nothing to do. To use Redis, set DLOCKS; to silence this, set DLOCKS = "
                f"{{'default': {{'BACKEND': {conf.DATABASE_BACKEND!r}}}}}.",
                id="django_dlock.I001",
            )


def check_alias(options: AliasOptions) -> Iterator[checks.CheckMessage]:
    """What ``check_deployment`` finds out about one alias."""
    try:
        backend = locks[options.alias]
    except Exception:  # noqa: BLE001 - E008 reports it
        return
    if not backend.is_shared:
        yield checks.Warning(
            f"The locks of alias {options.alias!r} exist in one process only: other workers and "
            "servers do not see them.",
            hint=f"Set DLOCKS[{options.alias!r}]['BACKEND'] = {conf.DATABASE_BACKEND!r} with a "
            f"database that is not in memory, or {conf.REDIS_BACKEND!r} with 'CACHE' or "
            "'LOCATION'.",
            id="django_dlock.W002",
        )
    for problem in backend.warnings(options):
        yield checks.Warning(problem.message, hint=problem.hint, id=_id(problem))
    try:
        problems = backend.store_problems()
    except BackendUnavailable as error:
        entry = f"DLOCKS[{options.alias!r}]"
        if isinstance(error, BackendRefused):
            what, hint = "are refused", f"Correct the user, password or database of {entry}."
        else:
            what = "cannot be reached from here"
            hint = (
                "Run this check on one of your servers. If it fails there, start the server "
                f"or correct {entry}."
            )
        yield checks.Warning(
            f"The locks of alias {options.alias!r} {what}: {error}",
            hint=error.cure or hint,
            id="django_dlock.W008",
        )
        return
    for problem in problems:
        number = problem.id.rpartition(".")[2]
        kind = checks.Error if number.startswith("E") else checks.Warning
        yield kind(problem.message, hint=problem.hint, id=_id(problem))


def _deferred_sqlite() -> Iterator[checks.CheckMessage]:
    for alias, database in connections.settings.items():
        mode = str(database["OPTIONS"].get("transaction_mode") or "DEFERRED").upper()
        name = str(database["NAME"])
        in_memory = not name or ":memory:" in name or "mode=memory" in name
        if database["ENGINE"].endswith("sqlite3") and mode == "DEFERRED" and not in_memory:
            yield checks.Warning(
                f"DATABASES[{alias!r}] is SQLite with deferred transactions: if two workers read "
                "a record and then write it, one of them fails at once, whatever the timeout.",
                hint=f"DATABASES[{alias!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE', "
                "'init_command': 'PRAGMA journal_mode=WAL'}",
                id="django_dlock.W004",
            )


def check_tasks(**_: Any) -> list[checks.CheckMessage]:
    """W101 and above, and E101: wrong options of tasks."""
    if "celery" not in sys.modules:
        # The project has not imported Celery, so there is no app to check.
        return []
    from ..celery.checks import check_tasks

    return check_tasks()


def check_views(**_: Any) -> list[checks.CheckMessage]:
    """W017 to W019, W021: keys of views that visitors can choose, or that never change."""
    # Imported here, because serving processes do not need it.
    from ..views.checks import check_views

    return check_views()


def _aliases() -> Iterator[AliasOptions]:
    """All aliases if all settings are valid, else none; ``check_settings`` reports errors."""
    if not conf.problems():
        for alias in conf.aliases():
            yield conf.alias_options(alias)
