"""Fencing: the database refuses writes of a holder whose lease has ended.

A holder may be stopped between its last check and its write, for longer than its lease. A token
that rises with every grant prevents that write: it is stored with what is written, and compared
in the statement that writes::

    A  token 1, check() … stopped …………………………………………………………… UPDATE … token <= 1: 0 rows → StaleToken
    B                     lease ended; token 2, UPDATE … token <= 2: 1 row

``fence`` compares with the rows themselves, ``atomic`` with one row per lock name in the fence
table. Both keep those rows locked until COMMIT, so a newer holder waits there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from asgiref.sync import sync_to_async
from django.db import connections, models, router, transaction
from django.db.models.manager import BaseManager

from .core import transactions
from .core.held_lease import HeldLease
from .databases.time import Now
from .exceptions import BackendUnavailable, StaleToken
from .fields import FencingTokenField
from .models import Fence

__all__ = ["FencedInstance", "FencedQuerySet", "atomic", "fence"]

Rows: TypeAlias = models.QuerySet[Any, Any]


def fence(held: HeldLease, target: object, field: str | None) -> FencedQuerySet | FencedInstance:
    """See ``Lock.fence``."""
    if isinstance(target, BaseManager):
        target = target.all()
    if isinstance(target, models.QuerySet):
        return FencedQuerySet(_Column(held, target.model, field), target)
    if isinstance(target, models.Model):
        return FencedInstance(_Column(held, type(target), field), target)
    raise TypeError(f"fence() takes a queryset, a manager or a model instance, not {target!r}")


class FencedQuerySet:
    """Writes rows only if no newer holder has written them.

    Each write is a transaction, or a savepoint in the caller's transaction, and its rows stay
    locked until COMMIT. If a matching row has seen a newer token, the whole write is rolled back.
    A row that is deleted meanwhile is neither refused nor counted.

    Writes use the token of the grant under which ``lock.fence()`` was called. If that grant ends
    before the write has ended, it raises ``LeaseLost`` or ``NotHeld``.
    """

    def __init__(self, column: _Column, queryset: Rows) -> None:
        self._column = column
        # For routers that use another database for reads, choose the one for writes.
        self._queryset = queryset.using(queryset.select_for_update().db)

    def __repr__(self) -> str:
        return f"<FencedQuerySet of {self._column}>"

    def update(self, **values: Any) -> int:
        """As ``QuerySet.update``, with the token in the same statement.

        If conditions refer to other tables, or columns are in several tables (multi-table
        inheritance), the rows first get the token, by primary key, and a second statement writes
        the values.

        Returns:
            The number of rows that matched.

        Raises:
            StaleToken: One of them has seen a newer token; nothing is written.
            LeaseLost, NotHeld: The grant has ended; nothing is written.
        """
        column = self._column
        if column.field.name in values or column.field.attname in values:
            raise TypeError(f"The fence sets {column}; leave it out of update()")
        if self._queryset.query.is_sliced:
            raise TypeError("Cannot update a query once a slice has been taken.")
        with column.writing(self._queryset.db):
            if not column.is_enough_for(self._queryset, values):
                claimed = self._claim()
                return claimed.update(**values) if values else claimed.count()
            accepting = self._queryset.filter(column.accepts)
            changed = accepting.update(**values, **{column.field.name: column.token})
            column.refuse_newer(self._queryset)
            return changed

    def delete(self) -> tuple[int, dict[str, int]]:
        """As ``QuerySet.delete``; the rows first get the token.

        A deleted row remembers no token. If rows are created again under the same key, use
        ``lock.atomic()`` instead.

        Raises:
            StaleToken: One of them has seen a newer token; nothing is deleted.
            LeaseLost, NotHeld: The grant has ended; nothing is deleted.
        """
        with self._column.writing(self._queryset.db):
            return self._claim().delete()

    async def aupdate(self, **values: Any) -> int:
        """As ``update``, for coroutines."""
        return await sync_to_async(self.update)(**values)

    async def adelete(self) -> tuple[int, dict[str, int]]:
        """As ``delete``, for coroutines."""
        return await sync_to_async(self.delete)()

    def _claim(self) -> Rows:
        """The matching rows, with our token, and locked."""
        keys = list(self._queryset.order_by().values_list("pk", self._column.key))
        self._column.claim(self._queryset.db, [key for _, key in keys])
        return self._queryset.filter(pk__in=[pk for pk, _ in keys])


class FencedInstance:
    """Writes a row only if no newer holder has written it; see ``FencedQuerySet``."""

    def __init__(self, column: _Column, instance: models.Model) -> None:
        self._column, self._instance = column, instance

    def __repr__(self) -> str:
        return f"<FencedInstance of {self._column}: {self._instance!r}>"

    def save(self, **options: Any) -> None:
        """As ``Model.save``, in one transaction with a statement that writes the token.

        That statement comes first and locks the row; then ``save()`` runs, with signals, parents
        and everything that the model adds to it. A new instance is inserted with the token, since
        there is no row that could refuse it. If two holders may insert the same object, use
        ``lock.atomic()`` instead.

        Raises:
            StaleToken: The row has seen a newer token; nothing is written.
            LeaseLost, NotHeld: The grant has ended; nothing is written.
            DoesNotExist: The row was deleted meanwhile; it is not inserted again.
        """
        column, instance = self._column, self._instance
        with column.carried_by(instance), column.writing(self._database(options)) as using:
            key = None if options.get("force_insert") else getattr(instance, column.key)
            is_there = key is not None and column.claim(using, [key])
            if not is_there and not instance._state.adding:
                raise column.model.DoesNotExist(
                    f"{column.model._meta.label} {instance.pk!r} was deleted meanwhile"
                )
            instance.save(**options)

    def delete(self, **options: Any) -> tuple[int, dict[str, int]]:
        """As ``Model.delete``, in one transaction with a statement that writes the token.

        Raises:
            StaleToken: The row has seen a newer token; nothing is deleted.
            LeaseLost, NotHeld: The grant has ended; nothing is deleted.
        """
        with self._column.writing(self._database(options)) as using:
            self._column.claim(using, [getattr(self._instance, self._column.key)])
            return self._instance.delete(**options)

    async def asave(self, **options: Any) -> None:
        """As ``save``, for coroutines."""
        await sync_to_async(self.save)(**options)

    async def adelete(self, **options: Any) -> tuple[int, dict[str, int]]:
        """As ``delete``, for coroutines."""
        return await sync_to_async(self.delete)(**options)

    def _database(self, options: dict[str, Any]) -> str:
        using: str | None = options.get("using")
        return using or router.db_for_write(type(self._instance), instance=self._instance)


def _token_of(held: HeldLease) -> int:
    """The token to write.

    Raises:
        BackendUnavailable: The name was locked in this process only, because its backend did not
            answer; a number that no other process knows would fence nothing.
    """
    if held.token is None:
        raise BackendUnavailable(
            "The backend did not answer when this was locked, so there is no fencing token. With "
            "if_unavailable='raise', nothing runs without a token",
            held.name,
            held.alias,
        )
    return held.token


class _Column:
    """A model's column of tokens, and one grant's token for it."""

    def __init__(self, held: HeldLease, model: type[models.Model], name: str | None) -> None:
        self.held, self.token = held, _token_of(held)
        self.model: Any = model
        self.field = _find(model, name)
        # With multi-table inheritance the field may be in a parent's table, which has its own
        # primary key.
        self.table: Any = self.field.model
        self.key: str = self.table._meta.pk.attname
        self.accepts = models.Q((f"{self.field.name}__lte", self.token))

    def __str__(self) -> str:
        return f"{self.model._meta.label}.{self.field.name}"

    @contextmanager
    def writing(self, using: str) -> Iterator[str]:
        """A transaction on ``using``; the lease must be held at its begin and at its end."""
        self.held.check()
        with transaction.atomic(using=using):
            yield using
            # If this process was stopped for longer than its lease, roll back, even if there was
            # no newer holder.
            self.held.check()

    @contextmanager
    def carried_by(self, instance: models.Model) -> Iterator[None]:
        """Set the token on ``instance``; undo that if the write fails."""
        known, name = vars(instance), self.field.attname
        before = {name: known[name]} if name in known else {}
        setattr(instance, name, self.token)
        try:
            yield
        except BaseException:
            known.pop(name, None)
            known.update(before)
            raise
        # On MariaDB and MySQL, Django 6 defers what it has saved as an expression.
        setattr(instance, name, self.token)

    def is_enough_for(self, queryset: Rows, values: dict[str, Any]) -> bool:
        """Whether Django writes the rows in one UPDATE with the token in its own condition.

        With a join, the condition is in a subquery, which is not evaluated again after waiting
        for the row. With several tables, Django first reads the keys and then updates by them.
        """
        meta, query = self.model._meta, queryset.query
        named = [meta.get_field(name) for name in values]
        return (
            all(field.model is meta.concrete_model for field in [self.field, *named])
            and query.count_active_tables() <= 1
            and not query.distinct
            and query.group_by is None
        )

    def claim(self, using: str, keys: Sequence[Any]) -> int:
        """Write the token to the rows with these keys; they stay locked until COMMIT.

        Returns:
            The number of rows that exist.

        Raises:
            StaleToken: One of them has seen a newer token.
        """
        rows: Rows = self.table._base_manager.using(using).filter(pk__in=keys)
        claimed = rows.filter(self.accepts).update(**{self.field.name: self.token})
        self.refuse_newer(rows)
        return claimed

    def refuse_newer(self, rows: Rows) -> None:
        """Raise ``StaleToken`` if one of the rows has seen a newer token."""
        # A locking read sees the present; under MySQL's REPEATABLE READ other reads may see what
        # was there when the caller's transaction began.
        newer = rows.filter(**{f"{self.field.name}__gt": self.token}).select_for_update()
        seen = list(newer.order_by().values_list(self.field.name, flat=True)[:1])
        if seen:
            raise StaleToken(
                f"A row of {self} has seen token {seen[0]}; this grant has {self.token}",
                self.held.name,
                self.held.alias,
            )


def _find(model: type[models.Model], name: str | None) -> FencingTokenField:
    fields = [
        field for field in model._meta.concrete_fields if isinstance(field, FencingTokenField)
    ]
    label = model._meta.label
    if not fields:
        raise TypeError(f"{label} has no FencingTokenField; add one: fence = FencingTokenField()")
    names = ", ".join(repr(field.name) for field in fields)
    if name is not None:
        fields = [field for field in fields if field.name == name]
        if not fields:
            raise TypeError(f"{label} has no FencingTokenField {name!r}; it has {names}")
    if len(fields) > 1:
        raise TypeError(f"{label} has several FencingTokenFields; choose one with field=: {names}")
    return fields[0]


@contextmanager
def atomic(held: HeldLease, using: str | None) -> Iterator[None]:
    """See ``Lock.atomic``."""
    using = using or router.db_for_write(Fence)
    if transactions.is_open(using):
        raise RuntimeError(
            f"lock.atomic() of lock {held.name!r} (alias {held.alias!r}) must be the outermost "
            f"transaction on database {using!r}, because it compares tokens just before its "
            "COMMIT. Move it outside of transaction.atomic() (in a view: non_atomic_requests; in "
            "a task: atomic=True compares attempts already), or use lock.fence()"
        )
    name = _Name(held, using)
    # Committed before the transaction: if two transactions both found no row and inserted it, one
    # would fail, and on MySQL they would deadlock.
    name.ensure_row()
    with transaction.atomic(using=using, durable=True):
        name.begin()
        yield
        if not connections[using].needs_rollback:
            # Compare again: the row is still locked, unless a statement has implicitly ended the
            # transaction, as DDL does on MySQL.
            name.write_token()
            held.check()


class _Name:
    """A lock's name in the fence table, and one grant's token for it."""

    def __init__(self, held: HeldLease, using: str) -> None:
        self.held, self.using, self.token = held, using, _token_of(held)
        prefix = held.backend.options.key_prefix
        self.facts = {"alias": held.alias, "key_prefix": prefix, "name": held.name}
        self.digest = Fence.digest_of(**self.facts)
        self.row = Fence.objects.using(using).filter(digest=self.digest)

    def ensure_row(self) -> None:
        """Make sure that there is a row."""
        if not self.row.exists():
            self._insert()

    def _insert(self) -> None:
        new = Fence(digest=self.digest, token=0, updated_at=Now(), **self.facts)
        Fence.objects.using(self.using).bulk_create([new], ignore_conflicts=True)

    def begin(self) -> None:
        """As ``write_token``, but if the row is gone, make a new one.

        It was untouched for long, and a purge has deleted it since ``ensure_row``.
        """
        if self._write():
            return
        if not self.row.exists():
            self._insert()
        self.write_token()

    def write_token(self) -> None:
        """Write our token unless there is a newer one; the row stays locked until COMMIT.

        Raises:
            StaleToken: There is a newer one, or the row is gone.
        """
        if not self._write():
            raise StaleToken(
                f"The fence on database {self.using!r} has seen a newer token than {self.token}",
                self.held.name,
                self.held.alias,
            )

    def _write(self) -> int:
        token = self.token
        return self.row.filter(token__lte=token).update(token=token, updated_at=Now())
