"""Idempotency records, and the messages that their runs send."""

from __future__ import annotations

from typing import ClassVar, Protocol

from django.db import models
from django.utils.translation import gettext_lazy as _

from .. import tenancy
from ..text.names import plain
from ..text.printable import printable
from .digests import digest_of


class Forget(Protocol):
    def __call__(
        self, records: models.QuerySet[IdempotencyRecord], *, force: bool, user: str
    ) -> bool: ...


class IdempotencyRecordManager(models.Manager["IdempotencyRecord"]):
    """Finds a record by scope and key, exactly."""

    on_forget: ClassVar[Forget]
    """Deletes the records that it may; set by ``apps.py``, because its rules ask the backends,
    which are above the models."""

    def for_key(self, scope: str, key: str) -> models.QuerySet[IdempotencyRecord]:
        """The record of ``key`` in ``scope``, if there is one; case-sensitive.

        Args:
            scope: With ``DLOCK_SCOPE``, that of the active tenant; or a full one, as lists show
                it, such as ``"[acme]shop.tasks.charge"``.

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
        scope, key = plain(scope), plain(key)
        if not tenancy.is_full(scope):
            scope = tenancy.full(scope)
        return self.filter(digest=IdempotencyRecord.digest_of(scope, key))

    def forget(
        self,
        scope: str,
        key: str,
        *,
        attempt: int | None = None,
        force: bool = False,
        user: str = "",
    ) -> bool:
        """Delete the record of ``key``, so that the next delivery runs as if it were the first.

        The messages that its runs have sent are deleted, too, and a lock event is written.
        Nothing is deleted while a run is in progress, if the backend of its lock does not answer,
        or if a message of a committed run has not been published yet.

        Args:
            attempt: Delete it only if it is still at this attempt, which an operator has seen.
            force: Delete it even if a run may be in progress, or if a message is pending, which
                is then never sent. The run is not stopped. When it completes, it gets
                ``StaleToken``, is rolled back if it is atomic, and its message is requeued.
            user: Who wants it, for the lock event.

        Returns:
            Whether a record was deleted.
        """
        found = self.for_key(scope, key)
        if attempt is not None:
            found = found.filter(attempt=attempt)
        return self.on_forget(found, force=force, user=user)


class IdempotencyRecord(models.Model):
    """The state of the work of one business key.

    Records are written only by single conditional statements (see ``records/idempotency.py``),
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
            (
                "view_results_idempotencyrecord",
                "Can view results, answers and errors of idempotency records",
            ),
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
        return digest_of(scope, key)


class FollowUp(models.Model):
    """A message that a run sends; written in the transaction of the run's record.

    It is published after that transaction has committed, and repeated until the broker confirms
    it, always with the same task id. A pending row is kept even if its record has expired.
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
    message = models.TextField(
        _("message"), help_text=_("Arguments and options, as JSON; empty once published.")
    )
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
        permissions = (("publish_followup", "Can publish outbox message"),)
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        indexes = (models.Index(fields=["published_at", "expires_at"], name="dlock_followup_due"),)

    def __str__(self) -> str:
        return printable(f"{self.task}[{self.task_id}]")
