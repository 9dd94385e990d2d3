"""The tables that backends keep, and read and write in statements of their own."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..text.printable import printable


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
    # With a default in the database, for processes that do not know the column yet.
    in_a_row = models.IntegerField(default=0, db_default=0)

    class Meta:
        default_permissions = ()
        verbose_name = _("fail-over record")
        verbose_name_plural = _("fail-over records")

    def __str__(self) -> str:
        return f"{self.alias}: {self.active}"
