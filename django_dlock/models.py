"""The package's tables: idempotency records, follow-ups, fences, lock events, lock statistics, the
leases of the database backend, and the record of the fail-over backend.

``HeldLock`` has no table: it is the model of the admin page that lists the leases of all aliases,
which are read from their backends, and has the permissions of that page.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .lease import LeaseInfo
from .printable import printable

__all__ = [
    "FailoverRecord",
    "Fence",
    "FollowUp",
    "HeldLock",
    "IdempotencyRecord",
    "LeaseRecord",
    "LockEvent",
    "LockStatistics",
    "ProcessRecord",
]


def _digest(*parts: str) -> str:
    """One digest for several texts, which every database compares exactly."""
    # The lengths distinguish ("a", "bc") from ("ab", "c").
    *before, last = parts
    text = "".join(f"{len(part)}:{part}" for part in before) + last
    return hashlib.sha256(text.encode()).hexdigest()


class HeldLock(models.Model):
    """A lease in the admin; read from a backend, never from the database."""

    name = models.CharField(_("name"), max_length=255, primary_key=True)
    alias = models.CharField(_("alias"), max_length=255)
    # From the backend; the admin makes all instances, and sets it on each.
    info: LeaseInfo
    # HTML for the page of one lock.
    related: str | None = None

    class Meta:
        managed = False
        default_permissions = ("view",)
        permissions = (("release_heldlock", "Can release held lock"),)
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")

    def __str__(self) -> str:
        return printable(self.name)

    @property
    def shown_name(self) -> str:
        """The name of the lock, without the alias and safe to read."""
        return printable(self.info.name)


class IdempotencyRecordManager(models.Manager["IdempotencyRecord"]):
    """Finds a record by scope and key, exactly."""

    def for_key(self, scope: str, key: str) -> models.QuerySet[IdempotencyRecord]:
        """The record of ``key`` in ``scope``, if there is one; case-sensitive.

        Raises:
            TypeError: Scope or key is not a string.
        """
        if not isinstance(scope, str):
            raise TypeError(f"scope is {scope!r}; it takes a string, such as the name of a task")
        if not isinstance(key, str):
            raise TypeError(
                f"key is {key!r}; it takes the string that idempotency_key makes: {str(key)!r} "
                f"for the template '{{order_id}}', {f'order:{key}'!r} for 'order:{{order_id}}'"
            )
        return self.filter(digest=IdempotencyRecord.digest_of(scope, key))

    def forget(
        self, scope: str, key: str, *, attempt: int | None = None, force: bool = False
    ) -> bool:
        """Delete the record of ``key``, so that the next delivery runs as if it were the first.

        Nothing is deleted while a run is in progress, or if the backend of its lock does not
        answer.

        Args:
            attempt: Delete it only if it is still at this attempt, which an operator has seen.
            force: Delete it even if a run may be in progress. The run is not stopped. When it
                completes, it gets ``StaleToken``, is rolled back if it is atomic, and its message
                is requeued.

        Returns:
            Whether a record was deleted.
        """
        # Imported here, because that module is above the models: it asks the backends.
        from . import retention

        found = self.for_key(scope, key)
        if attempt is not None:
            found = found.filter(attempt=attempt)
        return retention.forget(found, force=force)


class IdempotencyRecord(models.Model):
    """The state of the work of one business key.

    Records are written only by single conditional statements (see ``django_dlock.idempotency``),
    so an object of this class may be out of date.
    """

    class State(models.TextChoices):
        RUNNING = "running", _("running")
        WAITING = "waiting", _("waiting")
        SUCCEEDED = "succeeded", _("succeeded")
        FAILED = "failed", _("failed")

    class Ending(models.TextChoices):
        RETURNED = "returned", _("returned")
        IGNORED = "ignored", _("ignored")
        REPLACED = "replaced", _("replaced")

    id = models.BigAutoField(primary_key=True)
    # The unique key. The two texts themselves would not do: MySQL ignores case and accents, and
    # limits the length of an index.
    digest = models.CharField(max_length=64, unique=True, editable=False)
    scope = models.CharField(_("scope"), max_length=255)
    key = models.CharField(_("key"), max_length=255)
    payload = models.CharField(
        _("payload fingerprint"),
        max_length=64,
        help_text=_("The same key with another payload is an error."),
    )
    state = models.CharField(_("state"), max_length=16, choices=State)
    attempt = models.PositiveIntegerField(
        _("attempt"),
        help_text=_("Increases with every run; only the latest run can complete the record."),
    )
    deaths = models.PositiveIntegerField(
        _("deaths"), default=0, help_text=_("Runs that died in the middle since the last outcome.")
    )
    lock_alias = models.CharField(_("lock alias"), max_length=255, blank=True, default="")
    lock_name = models.CharField(_("lock name"), max_length=255, blank=True, default="")
    owner = models.CharField(
        _("owner"), max_length=255, help_text=_("Owner of the latest run's lease.")
    )
    token = models.BigIntegerField(_("fencing token"), null=True, blank=True)
    task_id = models.CharField(_("task id"), max_length=255, blank=True, default="")
    worker = models.CharField(
        _("worker"),
        max_length=255,
        blank=True,
        default="",
        # As with ``step``: older workers do not know the column.
        db_default="",
        help_text=_("The worker and the process of the latest run."),
    )
    message = models.TextField(  # noqa: DJ001 - MySQL allows no default that older workers need
        _("message"),
        null=True,
        blank=True,
        help_text=_("Task, arguments and queue of the latest run, as JSON; empty if not stored."),
    )
    step = models.PositiveIntegerField(
        _("step"),
        default=0,
        # Also in the database, because older workers insert rows during a rolling deploy.
        db_default=0,
        help_text=_("How often the task had replaced itself before the latest run."),
    )
    ending = models.CharField(
        _("ending"),
        max_length=16,
        choices=Ending,
        blank=True,
        default="",
        db_default="",
        help_text=_("How the successful run ended; “replaced” while its replacement runs."),
    )
    result = models.TextField(
        _("result"), blank=True, default="", help_text=_("Empty if none was stored.")
    )
    error = models.TextField(_("error"), blank=True, default="")
    created_at = models.DateTimeField(_("created at"))
    started_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    expires_at = models.DateTimeField(_("expires at"))

    objects: ClassVar[IdempotencyRecordManager] = IdempotencyRecordManager()

    class Meta:
        default_permissions = ("view",)
        permissions = (
            ("forget_idempotencyrecord", "Can forget idempotency record"),
            ("rerun_idempotencyrecord", "Can run the task of an idempotency record again"),
        )
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        # No index on columns that a run changes, so that PostgreSQL updates rows in place. This one
        # is for the admin's filter by scope, the latest first.
        indexes = (models.Index(fields=["scope", "id"], name="dlock_record_scope"),)

    def __str__(self) -> str:
        return printable(f"{self.scope}: {self.key}")

    def as_it_was(self) -> models.QuerySet[IdempotencyRecord]:
        """This record, unless another run has begun or this one has ended since it was read."""
        # Compare the owner, too: a record that was forgotten and created again has attempt 1.
        return IdempotencyRecord.objects.using(self._state.db).filter(
            pk=self.pk, attempt=self.attempt, state=self.state, owner=self.owner
        )

    @staticmethod
    def digest_of(scope: str, key: str) -> str:
        """The unique digest of a key in its scope."""
        return _digest(scope, key)


class FollowUp(models.Model):
    """A message that a run sends; written in the transaction of the run's record.

    It is published after that transaction has committed, and repeated until the broker confirms
    it, always with the same task id. A pending row is kept even if its record is deleted.
    """

    id = models.BigAutoField(primary_key=True)
    # Without a constraint, so that records can be deleted without reading this table.
    record = models.ForeignKey(
        IdempotencyRecord,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="follow_ups",
        verbose_name=_("idempotency record"),
    )
    task = models.CharField(_("task"), max_length=255)
    task_id = models.CharField(_("task id"), max_length=255)
    message = models.TextField(_("message"), help_text=_("Arguments and options, as JSON."))
    error = models.TextField(
        _("error"), blank=True, default="", help_text=_("Why the last attempt to publish failed.")
    )
    created_at = models.DateTimeField(_("created at"))
    published_at = models.DateTimeField(
        _("published at"), null=True, blank=True, help_text=_("Empty as long as it is pending.")
    )
    expires_at = models.DateTimeField(_("expires at"))

    class Meta:
        default_permissions = ("view",)
        permissions = (("publish_followup", "Can publish follow-up"),)
        verbose_name = _("follow-up")
        verbose_name_plural = _("follow-ups")
        indexes = (models.Index(fields=["published_at", "expires_at"], name="dlock_followup_due"),)

    def __str__(self) -> str:
        return printable(f"{self.task}[{self.task_id}]")


class Fence(models.Model):
    """The highest token with which a ``lock.atomic()`` of a lock has committed.

    A lock is identified by its alias, the alias's ``KEY_PREFIX`` and its name. You may delete a
    row once no holder of an older lease can be alive any more.
    """

    # For the reasons given at ``IdempotencyRecord.digest``.
    digest = models.CharField(max_length=64, primary_key=True, editable=False)
    alias = models.CharField(_("alias"), max_length=255)
    key_prefix = models.CharField(_("key prefix"), max_length=255)
    name = models.CharField(_("name"), max_length=255)
    token = models.BigIntegerField(_("fencing token"))
    updated_at = models.DateTimeField(
        _("updated at"), help_text=_("According to the clock of the last holder.")
    )

    class Meta:
        default_permissions = ()
        verbose_name = _("fence")
        verbose_name_plural = _("fences")

    def __str__(self) -> str:
        return printable(f"{self.alias}: {self.name}")

    @staticmethod
    def digest_of(alias: str, key_prefix: str, name: str) -> str:
        """The unique digest of a name."""
        return _digest(alias, key_prefix, name)


class LockEvent(models.Model):
    """An event of a lock that an operator may want to look up later."""

    class Event(models.TextChoices):
        LOST = "lost", _("lost")
        TAKEN_OVER = "taken_over", _("taken over")
        BROKEN = "broken", _("broken")
        MAX_HOLD = "max_hold", _("max_hold reached")
        LONG_WAIT = "long_wait", _("long wait")
        RERUN = "rerun", _("run again")

    id = models.BigAutoField(primary_key=True)
    when = models.DateTimeField(_("when"), db_index=True)
    event = models.CharField(_("event"), max_length=16, choices=Event)
    alias = models.CharField(_("alias"), max_length=255)
    name = models.CharField(_("name"), max_length=255)
    owner = models.CharField(_("owner"), max_length=255, blank=True, default="")
    token = models.BigIntegerField(_("fencing token"), null=True, blank=True)
    reason = models.CharField(_("reason"), max_length=255, blank=True, default="")
    user = models.CharField(_("user"), max_length=255, blank=True, default="")
    detail: models.JSONField[Any, Any] = models.JSONField(_("detail"), default=dict, blank=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")
        ordering = ("-when", "-id")
        indexes = (
            models.Index(fields=["name", "when"], name="dlock_event_name"),
            models.Index(fields=["event", "when"], name="dlock_event_event"),
        )

    def __str__(self) -> str:
        return printable(f"{self.get_event_display()}: {self.name}")


class LockStatistics(models.Model):
    """What all processes have counted of one metric in one period; ``metrics/table.py`` writes it.

    Each process adds to the rows, so their number does not depend on the number of processes.
    """

    class Period(models.IntegerChoices):
        MINUTE = 60, _("minute")
        TEN_MINUTES = 600, _("ten minutes")
        HOUR = 3600, _("hour")

    # Begins with period and start, so that a database reads the rows of one time in one piece. The
    # rest is a digest of the other keys, for the reasons given at ``IdempotencyRecord.digest``.
    id = models.CharField(max_length=32, primary_key=True, editable=False)
    period = models.PositiveIntegerField(_("period"), choices=Period)
    # Seconds since 1970, on the clock of the process that counted.
    start = models.BigIntegerField(_("start"))
    metric = models.CharField(_("metric"), max_length=64)
    alias = models.CharField(_("alias"), max_length=255)
    group = models.CharField(_("group"), max_length=64)
    # The outcome, the reason, or how a hold ended; empty for most metrics.
    label = models.CharField(_("label"), max_length=64)
    # Not a big integer, whose sums are slow on PostgreSQL.
    count = models.IntegerField(_("count"))
    # The sum of the durations in seconds. For held locks and waiting acquires: their number,
    # multiplied by the seconds for which it lasted.
    total = models.FloatField(_("total"))
    highest = models.FloatField(_("highest"))
    # How many durations were up to each bound of ``metrics.instruments.DURATIONS``, and above the
    # bound before; and how many were longer than all bounds.
    bucket_0 = models.IntegerField()
    bucket_1 = models.IntegerField()
    bucket_2 = models.IntegerField()
    bucket_3 = models.IntegerField()
    bucket_4 = models.IntegerField()
    bucket_5 = models.IntegerField()
    bucket_6 = models.IntegerField()
    bucket_7 = models.IntegerField()
    bucket_8 = models.IntegerField()
    bucket_9 = models.IntegerField()
    bucket_10 = models.IntegerField()
    bucket_11 = models.IntegerField()

    BUCKETS = tuple(f"bucket_{number}" for number in range(12))

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("lock statistics")
        verbose_name_plural = _("lock statistics")

    def __str__(self) -> str:
        return f"{self.metric} {self.alias} {self.group} {self.label}"

    @staticmethod
    def id_of(period: int, start: int, *texts: str) -> str:
        """The key of a row; ``texts`` are its metric, alias, group and label."""
        return LockStatistics.first_id(period, start) + _digest(*texts)[:18]

    @staticmethod
    def first_id(period: int, start: int) -> str:
        """What comes before the keys of all rows that begin then or later, and of no earlier."""
        return f"{period:04x}{start:010x}"

    @classmethod
    def ids(cls, period: int, start: int, end: int) -> models.Q:
        """Selects the rows of a period that begin at ``start`` or later, and before ``end``."""
        return models.Q(pk__gte=cls.first_id(period, start), pk__lt=cls.first_id(period, end))


class LeaseRecord(models.Model):
    """The row of one name at the database backend; ``backends/database/rows.py`` explains it.

    Read and written by that backend alone, in statements of its own. On SQLite the rows are in
    a file beside the database's, and this table stays empty.
    """

    # A digest of prefix and name, for the reasons given at ``IdempotencyRecord.digest``.
    id = models.UUIDField(primary_key=True, editable=False)
    key_prefix = models.CharField(_("key prefix"), max_length=255)
    name = models.CharField(_("name"), max_length=255)
    version = models.BigIntegerField()
    owner = models.CharField(_("owner"), max_length=512)
    kind = models.CharField(_("kind"), max_length=16)
    ended = models.CharField(max_length=1)
    token = models.BigIntegerField(_("fencing token"))
    ttl = models.BigIntegerField()
    granted_at = models.BigIntegerField()
    ends_at = models.BigIntegerField()
    renewals = models.IntegerField()
    shortened = models.IntegerField()
    process = models.TextField()
    metadata = models.TextField()
    past = models.TextField()
    queue = models.TextField()
    cancelled = models.TextField()

    class Meta:
        default_permissions = ()
        verbose_name = _("lease record")
        verbose_name_plural = _("lease records")
        # No index on columns that every acquire changes, so that PostgreSQL updates rows in place.
        indexes = (models.Index(fields=["key_prefix", "name"], name="dlock_lease_name"),)

    def __str__(self) -> str:
        return printable(self.name)


class ProcessRecord(models.Model):
    """When a process that holds leases of the database backend last showed that it is alive."""

    id = models.CharField(max_length=64, primary_key=True, editable=False)
    seen_at = models.BigIntegerField()
    gone = models.BooleanField()

    class Meta:
        default_permissions = ()
        verbose_name = _("process record")
        verbose_name_plural = _("process records")

    def __str__(self) -> str:
        return self.id


class FailoverRecord(models.Model):
    """Which of two stores is active; ``backends/failover/record.py`` explains it.

    Written by that backend alone. Do not delete a row while an alias uses it.
    """

    # A digest, for the reasons given at ``IdempotencyRecord.digest``.
    id = models.CharField(max_length=64, primary_key=True, editable=False)
    alias = models.CharField(_("alias"), max_length=255)
    key_prefix = models.CharField(_("key prefix"), max_length=255)
    epoch = models.IntegerField(_("epoch"))
    active = models.CharField(_("active store"), max_length=255)
    # Times are microseconds since 1970 on the database's clock; durations are microseconds.
    longest = models.BigIntegerField()
    quiet = models.BigIntegerField()
    switched_at = models.BigIntegerField(null=True)
    answered_at = models.BigIntegerField()
    reason = models.CharField(_("reason"), max_length=255, blank=True, default="")
    switched_by = models.CharField(_("switched by"), max_length=255, blank=True, default="")

    class Meta:
        default_permissions = ()
        verbose_name = _("fail-over record")
        verbose_name_plural = _("fail-over records")

    def __str__(self) -> str:
        return f"{self.alias}: {self.active}"
