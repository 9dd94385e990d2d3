"""What each tenant has in a schema of its own."""

from __future__ import annotations

from django.db import models


class Payment(models.Model):
    order = models.IntegerField()

    def __str__(self) -> str:
        return f"of order {self.order}"
