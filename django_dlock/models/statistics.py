"""Lock statistics."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .digests import digest_of


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
        return LockStatistics.first_id(period, start) + digest_of(*texts)[:18]

    @staticmethod
    def first_id(period: int, start: int) -> str:
        """What comes before the keys of all rows that begin then or later, and of no earlier."""
        # Before Python 3.11, a member of Period is formatted as its text.
        return f"{int(period):04x}{start:010x}"

    @classmethod
    def ids(cls, period: int, start: int, end: int) -> models.Q:
        """Selects the rows of a period that begin at ``start`` or later, and before ``end``."""
        return models.Q(pk__gte=cls.first_id(period, start), pk__lt=cls.first_id(period, end))
