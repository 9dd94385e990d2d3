"""Erases the traces of a subject in the tables, in batches of one transaction each."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, TypeVar

from django.apps import apps
from django.db import OperationalError, ProgrammingError, connections, models, router, transaction

from ...databases.errors import explaining, missing_in, of_ours
from ...keys.views import OF_VIEWS
from ...models import (
    FailoverRecord,
    Fence,
    FollowUp,
    HeldLock,
    IdempotencyRecord,
    LeaseRecord,
    LockEvent,
    LockStatistics,
)
from .. import retention
from .subject import Criterion, Subject

M = TypeVar("M", bound=models.Model)

ERASED = "(erased)"
"""What the admin's log shows in the place of a key."""


@dataclass
class Erasure:
    """What was done, as numbers of rows by kind.

    Attributes:
        erased: Deleted; ``admin_log`` are entries whose object is not named any more.
        anonymised: Kept without the user.
        kept: Rows that were found and not erased.
        found: The criteria that something fitted.
    """

    erased: Counter[str] = field(default_factory=Counter)
    anonymised: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    found: set[Criterion] = field(default_factory=set)


def erase(
    subject: Subject,
    *,
    databases: Collection[str] | None = None,
    batch_size: int = 1000,
    force: bool = False,
    dry_run: bool = False,
) -> Iterator[Erasure]:
    """Erase in records, follow-ups, lock events, lock statistics and the admin's log.

    Args:
        databases: By default all that have these tables.
        force: Also records of runs that may be in progress, or with pending follow-ups.
        dry_run: Only count.

    Yields:
        What was done so far, after each batch; always the same object.

    Raises:
        django.db.Error: What was yielded is done; or there are no tables.
    """
    run = _Run(subject, Erasure(), batch_size, force, dry_run)
    using = [*(_databases() if databases is None else filter(_has_any, databases))]
    if not using:
        # Not "nothing was found".
        raise missing_in(next(iter(databases or ()), router.db_for_write(IdempotencyRecord)))
    # Records first: they tell the names of their locks.
    for step in (
        *(run.records, run.events, run.failover),
        *(run.statistics, run.admin_log, run.others),
    ):
        for database in using:
            # The admin's log is a table of Django.
            with explaining(database, of_ours):
                for _ in step(database):
                    yield run.done
    yield run.done


def _databases() -> Iterator[str]:
    for database in connections:
        engine = connections.settings[database]["ENGINE"]
        if engine == "django.db.backends.dummy":
            continue
        # A router may keep each table in a database of its own.
        models_here = (each for each in _SEARCHED if _belongs(database, each))
        if any(_has(database, each) for each in models_here):
            yield database


def _has_any(database: str) -> bool:
    return any(_has(database, model) for model in _SEARCHED)


def _belongs(database: str, model: type[models.Model]) -> bool:
    # A router for tenants in schemas allows migrations in the schema that has the table, and a
    # tenant may be active who has another one.
    return router.db_for_write(model) == database or router.allow_migrate_model(database, model)


_SEARCHED = (IdempotencyRecord, LockEvent, LockStatistics, FailoverRecord, Fence, LeaseRecord)


def _has(database: str, model: type[models.Model]) -> bool:
    if model._meta.db_table in connections[database].introspection.table_names():
        return True
    try:
        # It may be in another schema, which a library for tenants does not list.
        with transaction.atomic(using=database):
            model._base_manager.using(database).exists()
    except (OperationalError, ProgrammingError):
        return False
    return True


@dataclass
class _Run:
    subject: Subject
    done: Erasure
    batch_size: int
    force: bool
    dry_run: bool

    def _batches(
        self, rows: models.QuerySet[M], conditions: Iterable[models.Q]
    ) -> Iterator[list[M]]:
        chosen = list(conditions)
        # Without any, the query would find every row.
        if chosen:
            found = rows.filter(reduce(operator.or_, chosen))
            yield from retention.in_batches(found, self.batch_size)

    def _in_one(self, database: str, steps: Iterable[Callable[[], None]]) -> None:
        """Do all steps in one transaction, and count them if it was committed."""
        before = self.done.erased.copy(), self.done.anonymised.copy(), self.done.kept.copy()
        try:
            with transaction.atomic(using=database):
                for step in steps:
                    step()
        except BaseException:
            self.done.erased, self.done.anonymised, self.done.kept = before
            raise

    # -- records -----------------------------------------------------------------------

    def records(self, database: str) -> Iterator[None]:
        if not _has(database, IdempotencyRecord):
            return
        subject, silent = self.subject, set[str]()
        rows = IdempotencyRecord.objects.using(database).defer("message", "result", "error")
        conditions = [*subject.names("lock_name"), *subject.keys("key")]
        conditions += (
            condition & models.Q(lock_name__contains=OF_VIEWS)
            for condition in subject.keys_of_views("key")
        )
        for batch in self._batches(rows, conditions):
            steps = []
            for record in batch:
                if found := subject.in_record(record):
                    self.done.found |= found
                    # Asked before the transaction, because a backend may be slow to answer.
                    alive = not self.force and retention.may_be_alive(record, silent)
                    steps.append(partial(self._record, record, alive))
            self._in_one(database, steps)
            yield

    def _record(self, record: IdempotencyRecord, alive: bool) -> None:
        done, follow_ups = self.done, record.follow_ups.using(record._state.db)
        if alive:
            done.kept["records_in_progress"] += 1
        elif not self.force and retention.has_pending(record):
            done.kept["records_with_pending_follow_ups"] += 1
        elif self.dry_run:
            done.erased.update(records=1, follow_ups=follow_ups.count())
        elif forgotten := retention.forget_record(record):
            done.erased.update(records=1, follow_ups=forgotten.follow_ups)
        else:
            # Another run has begun, or this one has ended.
            done.kept["records_that_have_changed"] += 1

    # -- lock events -------------------------------------------------------------------

    def events(self, database: str) -> Iterator[None]:
        if not _has(database, LockEvent):
            return
        subject, rows = self.subject, LockEvent.objects.using(database)
        of_records = [LockEvent.Event.RERUN, LockEvent.Event.FORGOTTEN]
        conditions = [*subject.names("name"), models.Q(event__in=of_records)]
        if subject.users:
            conditions.append(models.Q(user__in=list(subject.users)))
        for batch in self._batches(rows, conditions):
            delete, anonymise = [], []
            for event in batch:
                found = subject.in_name(event.name)
                if event.event in of_records and isinstance(event.detail, dict):
                    found |= subject.in_detail(event.detail, event.name)
                user = subject.users.get(event.user)
                if found:
                    delete.append(event.pk)
                elif user is not None:
                    anonymise.append(event.pk)
                    found.add(user)
                self.done.found |= found
            self._in_one(
                database,
                [partial(self._events, rows, delete), partial(self._users, rows, anonymise)],
            )
            yield

    def _events(self, rows: models.QuerySet[LockEvent], keys: list[int]) -> None:
        if not self.dry_run:
            rows.filter(pk__in=keys).delete()
        self.done.erased["lock_events"] += len(keys)

    def _users(self, rows: models.QuerySet[LockEvent], keys: list[int]) -> None:
        if not self.dry_run:
            rows.filter(pk__in=keys).update(user="")
        self.done.anonymised["lock_events"] += len(keys)

    # -- the record of fail-over -------------------------------------------------------

    def failover(self, database: str) -> Iterator[None]:
        """Who has switched it stays unnamed; the rest of the row is what makes it safe."""
        if not self.subject.users or not _has(database, FailoverRecord):
            return
        rows = FailoverRecord.objects.using(database)
        for batch in self._batches(rows, [models.Q(switched_by__in=list(self.subject.users))]):
            chosen = [row for row in batch if row.switched_by in self.subject.users]
            self.done.found |= {self.subject.users[row.switched_by] for row in chosen}
            keys = [row.pk for row in chosen]
            self._in_one(database, [partial(self._switchers, rows, keys)])
            yield

    def _switchers(self, rows: models.QuerySet[FailoverRecord], keys: list[str]) -> None:
        if not self.dry_run:
            rows.filter(pk__in=keys).update(switched_by="")
        self.done.anonymised["failover_records"] += len(keys)

    # -- lock statistics ---------------------------------------------------------------

    def statistics(self, database: str) -> Iterator[None]:
        """Rows are grouped by what precedes the colon, which may be a value itself."""
        if not _has(database, LockStatistics):
            return
        rows = LockStatistics.objects.using(database)
        for batch in self._batches(rows.only("pk", "group"), self.subject.names("group")):
            keys = []
            for row in batch:
                if found := self.subject.in_group(row.group):
                    self.done.found |= found
                    keys.append(row.pk)
            self._in_one(database, [partial(self._statistics, rows, keys)])
            yield

    def _statistics(self, rows: models.QuerySet[LockStatistics], keys: list[str]) -> None:
        if not self.dry_run:
            rows.filter(pk__in=keys).delete()
        self.done.erased["lock_statistics"] += len(keys)

    # -- the admin's log ---------------------------------------------------------------

    def admin_log(self, database: str) -> Iterator[None]:
        if not apps.is_installed("django.contrib.admin"):
            return
        # Imported here, because a project may have no admin.
        from django.contrib.admin.models import LogEntry

        if not _has(database, LogEntry):
            return
        entries: Any = LogEntry.objects.using(database).exclude(object_repr=ERASED)
        names = [HeldLock._meta.model_name, IdempotencyRecord._meta.model_name]
        of_ours = models.Q(
            content_type__app_label=HeldLock._meta.app_label, content_type__model__in=names
        )
        for batch in self._batches(entries.select_related("content_type"), [of_ours]):
            keys = []
            for entry in batch:
                found = set()
                if entry.content_type.model == HeldLock._meta.model_name:
                    # Alias and name.
                    found = self.subject.in_name((entry.object_id or "").partition("/")[2])
                elif entry.content_type.model == IdempotencyRecord._meta.model_name:
                    found = self.subject.in_text(entry.object_repr)
                if found:
                    self.done.found |= found
                    keys.append(entry.pk)
            self._in_one(database, [partial(self._entries, entries, keys)])
            yield

    def _entries(self, entries: Any, keys: list[int]) -> None:
        if not self.dry_run:
            entries.filter(pk__in=keys).update(object_repr=ERASED, object_id="")
        self.done.erased["admin_log"] += len(keys)

    # -- what only a store may delete --------------------------------------------------

    def others(self, database: str) -> Iterator[None]:
        """Count the rows that make locks safe, so that nobody thinks that they are gone."""
        for kind, model in (("fences", Fence), ("leases", LeaseRecord)):
            if not _has(database, model):
                continue
            rows: models.QuerySet[Any] = models.QuerySet(model, using=database).only("pk", "name")
            for batch in self._batches(rows, self.subject.names("name")):
                for row in batch:
                    if found := self.subject.in_name(row.name):
                        self.done.found |= found
                        self.done.kept[kind] += 1
                yield
        if _has(database, FollowUp) and _has(database, IdempotencyRecord):
            pending = FollowUp.objects.using(database).filter(published_at__isnull=True)
            record = IdempotencyRecord.objects.using(database).filter(
                pk=models.OuterRef("record_id")
            )
            alone = pending.filter(~models.Exists(record)).count()
            if alone:
                self.done.kept["pending_follow_ups_without_record"] += alone
