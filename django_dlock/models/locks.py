"""Held locks, fences and lock events.

``HeldLock`` has no table: it is the model of the admin page that lists the leases of all aliases,
which are read from their backends, and has the permissions of that page.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..lease import LeaseInfo
from ..text.printable import printable
from .digests import digest_of


class HeldLock(models.Model):
    """A lease in the admin; read from a backend, never from the database."""

    name = models.CharField(_("name"), max_length=255, primary_key=True)
    alias = models.CharField(_("alias"), max_length=255)
    # From the backend; the admin makes all instances, and sets it on each.
    info: LeaseInfo
    # Set by the list.
    in_deadlock = shows_alias = False

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

    @property
    def shown_owner(self) -> str:
        return printable(self.info.owner)


class Fence(models.Model):
    """The highest token with which a ``lock.atomic()`` of a lock has committed.

    A lock is identified by its alias, the alias's ``KEY_PREFIX`` and its name. You may delete a
    row once no holder of an older lease can be alive any more; ``purge_fences`` does so.
    """

    # For the reasons given at ``IdempotencyRecord.digest``.
    digest = models.CharField(max_length=64, primary_key=True, editable=False)
    alias = models.CharField(_("alias"), max_length=255)
    key_prefix = models.CharField(_("key prefix"), max_length=255)
    name = models.CharField(_("name"), max_length=255)
    token = models.BigIntegerField(_("fencing token"))
    updated_at = models.DateTimeField(
        _("updated at"), help_text=_("When a holder last wrote it, by the database's clock.")
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
        return digest_of(alias, key_prefix, name)


class LockEvent(models.Model):
    """An event of a lock that an operator may want to look up later."""

    class Event(models.TextChoices):
        LOST = "lost", _("lost")
        TAKEN_OVER = "taken_over", _("taken over")
        BROKEN = "broken", _("broken")
        MAX_HOLD = "max_hold", _("max_hold reached")
        LONG_WAIT = "long_wait", _("long wait")
        RERUN = "rerun", _("run again")
        FORGOTTEN = "forgotten", _("forgotten")

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
