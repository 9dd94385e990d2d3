"""System checks of the settings; those of tasks are registered by ``django_dlock.celery``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from . import conf
from .backends.base import AliasOptions, BaseLockBackend
from .exceptions import BackendUnavailable
from .handler import locks

__all__ = [
    "check_deployment",
    "check_migrations",
    "check_settings",
    "check_shared_caches",
    "register",
]


def register() -> None:
    """Let ``manage.py check`` look at the settings; called once, when the apps are ready."""
    checks.register(check_settings)
    checks.register(check_shared_caches, checks.Tags.caches)
    # What only matters in production, or asks a server: with ``check --deploy``.
    checks.register(check_deployment, deploy=True)
    # Django asks a database only where it is told to: with ``--database``.
    checks.register(check_migrations, checks.Tags.database, deploy=True)


def check_settings(
    app_configs: Sequence[AppConfig] | None = None, **_: Any
) -> list[checks.CheckMessage]:
    """Errors in ``DLOCKS``, E001 to E007; E008 where a backend refuses its alias."""
    found: list[checks.CheckMessage] = [
        checks.Error(problem.message, hint=problem.hint, id=f"django_dlock.{problem.id}")
        for problem in conf.problems()
    ]
    return found or [error for alias in conf.aliases() for error in _refused(alias)]


def _refused(alias: str) -> Iterator[checks.CheckMessage]:
    try:
        # Makes the backend, which connects to nothing.
        locks[alias]
    except ImproperlyConfigured as error:
        yield checks.Error(
            str(error),
            hint="Name a backend that can be imported, and give it what it takes.",
            id="django_dlock.E008",
        )


# -- locks beside a cache ------------------------------------------------------------------

Place = tuple[str, str]
"""A Redis server, and a database in it."""


def check_shared_caches(
    app_configs: Sequence[AppConfig] | None = None, **_: Any
) -> list[checks.CheckMessage]:
    """W001: ``cache.clear()`` flushes a Redis database in which locks are kept."""
    caches: dict[str, Place] = {}
    for name, cache in settings.CACHES.items():
        place = _place_of_cache(cache) if conf.is_redis_cache(cache.get("BACKEND", "")) else None
        if place is not None:
            caches[name] = place
    found: list[checks.CheckMessage] = []
    for options in _aliases():
        place = _place_of_locks(options)
        sharing = [name for name, other in caches.items() if other == place]
        if place is not None and sharing:
            server, database = place
            taken = {other for other_server, other in caches.values() if other_server == server}
            free = next(number for number in range(16) if str(number) not in taken)
            found.append(
                checks.Warning(
                    f"The locks of alias {options.alias!r} share database {database} of the "
                    f"Redis at {server} with the caches {sharing}: clear() of a cache is FLUSHDB "
                    "and takes all locks from their holders.",
                    hint=f"Give the locks a database of their own: {_cure(options, free)}",
                    id="django_dlock.W001",
                )
            )
    return found


def _cure(options: AliasOptions, database: int) -> str:
    """One line for the settings; repeats no value of theirs, which may be a password."""
    if conf.configured() is not None:
        place = f"DLOCKS[{options.alias!r}].setdefault('OPTIONS', {{}})"
        return f"{place}.setdefault('connection_kwargs', {{}})['db'] = {database}"
    own = {"connection_kwargs": {"db": database}}
    entry = {"BACKEND": options.backend, "CACHE": options.cache, "OPTIONS": own}
    return f"DLOCKS = {{{options.alias!r}: {entry!r}}}"


def _place_of_locks(options: AliasOptions) -> Place | None:
    if options.cache is not None:
        place = _place_of_cache(settings.CACHES[options.cache])
    else:
        place = None if options.location is None else _place(options.location, {})
    own = options.options.get("connection_kwargs")
    if place is None or not isinstance(own, Mapping) or "db" not in own:
        return place
    return place[0], str(own["db"])


def _place_of_cache(cache: Mapping[str, Any]) -> Place | None:
    location = cache.get("LOCATION") or ""
    if isinstance(location, str):
        location = location.replace(";", ",").split(",")
    options = cache.get("OPTIONS") or {}
    # Writes, clear() among them, go to the first.
    return _place(location[0].strip(), {**options, **options.get("CONNECTION_POOL_KWARGS", {})})


def _place(url: str, kwargs: Mapping[str, Any]) -> Place | None:
    """What a client connects to; ``None`` where the address is no URL.

    As in redis-py, a database in the URL wins over the one in ``kwargs``.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        server, path = parts.path, ""
    elif parts.scheme in ("redis", "rediss"):
        host = parts.hostname or "localhost"
        server = f"{'127.0.0.1' if host == 'localhost' else host}:{parts.port or 6379}"
        path = parts.path.strip("/")
    else:
        return None
    query = parse_qs(parts.query).get("db", [path])[0]
    return server, query or str(kwargs.get("db", 0))


# -- what only matters in production -------------------------------------------------------


def check_deployment(
    app_configs: Sequence[AppConfig] | None = None, **_: Any
) -> list[checks.CheckMessage]:
    """W002: locks of one process; W003: a store that evicts; W004: SQLite, deferred."""
    found = [warning for options in _aliases() for warning in _deployment(options)]
    return [*found, *_deferred_sqlite()]


def _deployment(options: AliasOptions) -> Iterator[checks.CheckMessage]:
    try:
        backend = locks[options.alias]
    except ImproperlyConfigured:
        return  # E008 tells it.
    if not backend.is_shared:
        yield checks.Warning(
            f"The locks of alias {options.alias!r} are kept in one process: they guard nothing "
            "between workers, servers or tasks.",
            hint=f"Set DLOCKS[{options.alias!r}]['BACKEND'] = {conf.REDIS_BACKEND!r}, and a "
            "'CACHE' or 'LOCATION'.",
            id="django_dlock.W002",
        )
    yield from _evicting(backend)


def _evicting(backend: BaseLockBackend) -> Iterator[checks.CheckMessage]:
    try:
        policy = backend.eviction_policy()
    except BackendUnavailable:
        # A check is often run where the servers are not; it waits for one command_timeout.
        return
    if policy is not None:
        yield checks.Warning(
            f"The Redis of alias {backend.alias!r} evicts keys when its memory is full "
            f"(maxmemory-policy is {policy!r}): a lock may vanish from under its holder.",
            hint="Set maxmemory-policy noeviction there, or keep the locks on another Redis.",
            id="django_dlock.W003",
        )


def _deferred_sqlite() -> Iterator[checks.CheckMessage]:
    for alias, database in connections.settings.items():
        mode = str(database["OPTIONS"].get("transaction_mode") or "DEFERRED").upper()
        name = str(database["NAME"])
        in_memory = not name or ":memory:" in name or "mode=memory" in name
        if database["ENGINE"].endswith("sqlite3") and mode == "DEFERRED" and not in_memory:
            yield checks.Warning(
                f"DATABASES[{alias!r}] is SQLite with deferred transactions: of two workers that "
                "read a record and then write it, one fails at once, whatever the timeout.",
                hint=f"DATABASES[{alias!r}]['OPTIONS'] = {{'transaction_mode': 'IMMEDIATE', "
                "'init_command': 'PRAGMA journal_mode=WAL'}",
                id="django_dlock.W004",
            )


def check_migrations(
    app_configs: Sequence[AppConfig] | None = None,
    databases: Sequence[str] | None = None,
    **_: Any,
) -> list[checks.CheckMessage]:
    """W005: migrations of ours are not applied."""
    # Not needed by a process that only serves.
    from django.db.migrations.executor import MigrationExecutor

    found: list[checks.CheckMessage] = []
    for alias in databases or ():
        if not router.allow_migrate(alias, "django_dlock"):
            continue
        executor = MigrationExecutor(connections[alias])
        ours = [node for node in executor.loader.graph.leaf_nodes() if node[0] == "django_dlock"]
        missing = [migration.name for migration, _ in executor.migration_plan(ours)]
        if missing:
            found.append(
                checks.Warning(
                    f"Database {alias!r} lacks the migrations {missing} of django_dlock: records "
                    "and lock events cannot be written there.",
                    hint=f"python manage.py migrate django_dlock --database {alias}",
                    id="django_dlock.W005",
                )
            )
    return found


def _aliases() -> Iterator[AliasOptions]:
    """The aliases, if all of them are in order; ``check_settings`` tells what is not."""
    if not conf.problems():
        for alias in conf.aliases():
            yield conf.alias_options(alias)
