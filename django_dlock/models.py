"""The package's tables: idempotency records, fences, lock events, and the face of held locks.

Leases are not here: they live at their alias's backend. ``HeldLock`` has no table; it carries
the permissions of the page that lists them.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .lease import LeaseInfo

__all__ = ["Fence", "HeldLock", "IdempotencyRecord", "LockEvent"]


def _digest(*parts: str) -> str:
    """One text for several, compared exactly on every database."""
    # The lengths keep ("a", "bc") and ("ab", "c") apart.
    *before, last = parts
    text = "".join(f"{len(part)}:{part}" for part in before) + last
    return hashlib.sha256(text.encode()).hexdigest()


class HeldLock(models.Model):
    """A lease as the admin shows it; read live from a backend, never from the database."""

    name = models.CharField(_("name"), max_length=255, primary_key=True)
    alias = models.CharField(_("alias"), max_length=255)
    # What the backend said; set on every instance, all of which the admin makes.
    info: LeaseInfo

    class Meta:
        managed = False
        default_permissions = ("view",)
        permissions = (("release_heldlock", "Can release held lock"),)
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")

    def __str__(self) -> str:
        return self.name


class IdempotencyRecordManager(models.Manager["IdempotencyRecord"]):
    """Finds a record by scope and key, exactly."""

    def for_key(self, scope: str, key: str) -> models.QuerySet[IdempotencyRecord]:
        """The record of ``key`` in ``scope``: one or none; case and accents count."""
        return self.filter(digest=IdempotencyRecord.digest_of(scope, key))

    def forget(self, scope: str, key: str, *, attempt: int | None = None) -> bool:
        """Delete the record of ``key``, so that the next delivery runs as if it were the first.

        A run that is under way is not stopped: it finds its record gone when it completes,
        which is ``StaleToken``, rolls back if it is atomic, and its delivery is put back.

        Args:
            attempt: Only if the record still is at this attempt: what an operator has seen.

        Returns:
            Whether a record was deleted.
        """
        found = self.for_key(scope, key)
        if attempt is not None:
            found = found.filter(attempt=attempt)
        return found.delete()[0] > 0


class IdempotencyRecord(models.Model):
    """What became of the work of one business key.

    Written by single conditional statements only (see ``django_dlock.idempotency``); an object
    of this class is a copy that was true when it was read.
    """

    class State(models.TextChoices):
        RUNNING = "running", _("running")
        WAITING = "waiting", _("waiting")
        SUCCEEDED = "succeeded", _("succeeded")
        FAILED = "failed", _("failed")

    id = models.BigAutoField(primary_key=True)
    # What makes a record unique. Not the two texts themselves: MySQL compares those without
    # regard to case and accents, and limits the length of an index.
    digest = models.CharField(max_length=64, unique=True, editable=False)
    scope = models.CharField(_("scope"), max_length=255)
    key = models.CharField(_("key"), max_length=255)
    payload = models.CharField(
        _("payload fingerprint"),
        max_length=64,
        help_text=_("The same key with another payload is an error."),
    )
    state = models.CharField(_("state"), max_length=16, choices=State, db_index=True)
    attempt = models.PositiveIntegerField(
        _("attempt"),
        help_text=_("Rises with every run that begins; a run that is not the latest cannot end."),
    )
    deaths = models.PositiveIntegerField(
        _("deaths"), default=0, help_text=_("Runs that died in the middle since the last outcome.")
    )
    lock_alias = models.CharField(_("lock alias"), max_length=255, blank=True, default="")
    lock_name = models.CharField(_("lock name"), max_length=255, blank=True, default="")
    owner = models.CharField(
        _("owner"), max_length=255, help_text=_("Of the lease under which the latest run began.")
    )
    token = models.BigIntegerField(_("fencing token"), null=True, blank=True)
    task_id = models.CharField(_("task id"), max_length=255, blank=True, default="")
    result = models.TextField(
        _("result"), blank=True, default="", help_text=_("Empty where none was stored.")
    )
    error = models.TextField(_("error"), blank=True, default="")
    created_at = models.DateTimeField(_("created at"))
    started_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    expires_at = models.DateTimeField(_("expires at"), db_index=True)

    objects: ClassVar[IdempotencyRecordManager] = IdempotencyRecordManager()

    class Meta:
        default_permissions = ("view",)
        permissions = (("forget_idempotencyrecord", "Can forget idempotency record"),)
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        indexes = (models.Index(fields=["scope", "key"], name="dlock_record_key"),)

    def __str__(self) -> str:
        return f"{self.scope}: {self.key}"

    @staticmethod
    def digest_of(scope: str, key: str) -> str:
        """The unique digest of a key in its scope."""
        return _digest(scope, key)


class Fence(models.Model):
    """The highest token under whose name a ``lock.atomic()`` has committed.

    A name is what the lock's alias, the alias's ``KEY_PREFIX`` and the lock's name say
    together. A row may be deleted once no holder of an older lease can be alive any more.
    """

    # Not the three texts, for the reasons given at ``IdempotencyRecord.digest``.
    digest = models.CharField(max_length=64, primary_key=True, editable=False)
    alias = models.CharField(_("alias"), max_length=255)
    key_prefix = models.CharField(_("key prefix"), max_length=255)
    name = models.CharField(_("name"), max_length=255)
    token = models.BigIntegerField(_("fencing token"))
    updated_at = models.DateTimeField(
        _("updated at"), help_text=_("By the clock of the last holder.")
    )

    class Meta:
        default_permissions = ()
        verbose_name = _("fence")
        verbose_name_plural = _("fences")

    def __str__(self) -> str:
        return f"{self.alias}: {self.name}"

    @staticmethod
    def digest_of(alias: str, key_prefix: str, name: str) -> str:
        """The unique digest of a name."""
        return _digest(alias, key_prefix, name)


class LockEvent(models.Model):
    """Something about a lock that an operator may ask for later."""

    class Event(models.TextChoices):
        LOST = "lost", _("lost")
        TAKEN_OVER = "taken_over", _("taken over")
        BROKEN = "broken", _("broken")
        MAX_HOLD = "max_hold", _("longest hold reached")
        LONG_WAIT = "long_wait", _("long wait")

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
        return f"{self.event} {self.name}"
