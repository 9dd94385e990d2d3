"""System checks of the databases: forgotten migrations, and records of lost aliases.

Django passes the databases: those of ``check --database``, from Django 6.1 on all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from django.apps import apps
from django.core import checks
from django.core.management.base import BaseCommand
from django.db import Error, connections, router, transaction
from django.db.models import Max, Model

from .. import conf
from ..databases.errors import fate_of, migrate_command
from ..operators.audit import is_defined

LATEST_RECORDS = 10_000
"""How many records ``check_records`` reads."""
APP = "django_dlock"


def check_databases(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """W005, E017; W015: a database does not answer, which must not end the other checks."""
    if not databases:
        return []
    if _is_migrating():
        return [message for alias in databases for message in _refused(alias)]
    return [message for alias in databases for message in _migrations_of(alias)]


def _is_migrating() -> bool:
    """Whether it is ``migrate`` that runs the checks: it says itself what it applies.

    Django does not tell a check which command runs it.
    """
    # Imported here, because serving processes do not need it.
    from django.core.management.commands.migrate import Command as Migrate

    return any(isinstance(command, Migrate) for command in _running_commands())


def _running_commands() -> Iterator[BaseCommand]:
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(command := frame.f_locals.get("self"), BaseCommand):
            yield command
        frame = frame.f_back


def _migrations_of(alias: str) -> list[checks.CheckMessage]:
    try:
        return check_migrations([alias])
    except Error as error:
        return [
            checks.Warning(
                f"Database {alias!r} does not say which migrations of django_dlock are applied: "
                f"{' '.join(str(error).split())}",
                hint=f"Start its server, or correct DATABASES[{alias!r}].",
                id="django_dlock.W015",
            )
        ]


def _refused(alias: str) -> list[checks.CheckMessage]:
    """Only what ``migrate`` must not do; of what it cannot, it tells itself."""
    try:
        return [message for message in check_migrations([alias]) if message.is_serious()]
    except Error:
        return []


def check_migrations(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """W005: migrations of django_dlock are not applied, where routers allow any of its tables.

    E017: they are said to be applied, but the tables are not what they make.
    """
    defined = filter(is_defined, databases or ())
    return [message for alias in defined for message in _unapplied(alias)]


def _unapplied(alias: str) -> Iterator[checks.CheckMessage]:
    # Imported here, because serving processes do not need it.
    from django.db.migrations.executor import MigrationExecutor

    # Asked for each, because a router may send the events to another database than the records.
    models = {
        model._meta.db_table: model
        for model in apps.get_app_config(APP).get_models()
        if model._meta.managed and router.allow_migrate_model(alias, model)
    }
    if not models:
        return
    connection = connections[alias]
    executor = MigrationExecutor(connection)
    ours = [node for node in executor.loader.graph.leaf_nodes() if node[0] == APP]
    plan = executor.migration_plan(ours)
    missing = [migration.name for migration, _ in plan if migration.app_label == APP]
    if not ours:
        # MIGRATION_MODULES leaves the tables to ``migrate --run-syncdb``.
        return
    if not missing:
        yield from _incomplete(alias, models)
        return
    applied = {node for node in executor.loader.applied_migrations if node[0] == APP}
    # A test database that was made without migrations has the tables, and no record of them.
    if not applied and models.keys() <= set(connection.introspection.table_names()):
        return
    yield checks.Warning(
        f"Database {alias!r} lacks the migrations {missing} of django_dlock: records "
        "and lock events cannot be written there.",
        hint=f"Run {migrate_command(alias)}; if nothing of django_dlock is kept there, let "
        "allow_migrate() of a database router say so.",
        id="django_dlock.W005",
    )


def _incomplete(alias: str, models: Mapping[str, type[Model]]) -> Iterator[checks.CheckMessage]:
    """Before 0.1.0, the first migration had the name of today's, and made less."""
    lacking = list[str]()
    for table, model in models.items():
        columns = _columns_of(table, alias)
        if columns is None:
            continue
        fields = [field.column for field in model._meta.concrete_fields]
        missing = [f"{table}.{column}" for column in fields if column not in columns]
        lacking += missing if columns else [table]
    if not lacking:
        return
    yield checks.Error(
        f"Database {alias!r} says that all migrations of django_dlock are applied, but it lacks "
        f"{', '.join(lacking)}: its tables were made before 0.1.0, or by hand.",
        hint="Run migrate with the last state of the package before 0.1.0, and install this "
        "version again. Or, if nothing in them is needed, delete the tables of django_dlock and "
        "its rows in django_migrations, and run migrate.",
        id="django_dlock.E017",
    )


def _columns_of(table: str, alias: str) -> set[str] | None:
    """None of them if there is no such table; ``None`` if this user may not know.

    Asks the table itself: a list of all tables leaves out views, and on MySQL what the user may
    not read.
    """
    connection = connections[alias]
    # A failed statement must not spoil a transaction of the caller. Without one, none is begun,
    # which SQLite may make one that writes.
    inside = transaction.atomic(using=alias) if connection.in_atomic_block else nullcontext()
    try:
        with inside, connection.cursor() as cursor:
            quoted = connection.ops.quote_name(table)
            cursor.execute(f"SELECT * FROM {quoted} WHERE 1 = 0")  # noqa: S608 - a quoted name
            described = cursor.description
    except Error as error:
        fate = fate_of(error)
        if fate not in ("missing", "denied"):
            raise
        return set() if fate == "missing" else None
    return {connection.introspection.identifier_converter(column[0]) for column in described}


def check_records(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """W007: runs are recorded under aliases that are not defined any more.

    There is no index on the state of records, so only the latest ones are read.
    """
    from ..models import IdempotencyRecord

    if conf.problems():
        return []
    found: list[checks.CheckMessage] = []
    for database in databases or ():
        records = IdempotencyRecord.objects.using(database)
        try:
            newest = records.aggregate(newest=Max("pk"))["newest"] or 0
            running = records.filter(pk__gt=newest - LATEST_RECORDS, state="running")
            found_here = set(running.values_list("lock_alias", flat=True).distinct())
        except Error:
            # The table does not exist; another check reports that.
            continue
        found += [
            checks.Warning(
                f"Database {database!r} has records of runs under the alias {alias!r}, which "
                "DLOCKS does not define. It is not known whether those runs are alive, so their "
                "keys are blocked.",
                hint=f"Define {alias!r} in DLOCKS until they have ended, or forget the records "
                "with force=True.",
                id="django_dlock.W007",
            )
            for alias in sorted(found_here.difference(conf.aliases()))
        ]
    return found
