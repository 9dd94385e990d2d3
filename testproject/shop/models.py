"""Orders, and the charges for them."""

from __future__ import annotations

from django.db import models

from django_dlock import FencingTokenField


class Order(models.Model):
    """An order that a customer must pay only once."""

    number = models.PositiveIntegerField(unique=True)
    paid = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"Order {self.number}"


class Effect(models.Model):
    """One charge, written by a run of a task or view.

    It has no unique constraint, so that only the lock or record under test can prevent doubles.
    """

    order_number = models.PositiveIntegerField()
    by = models.CharField(max_length=40)
    delivery = models.CharField(max_length=100, blank=True)
    token = models.BigIntegerField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [models.Index(fields=["by", "order_number"], name="shop_effect_by_order")]

    def __str__(self) -> str:
        return f"{self.by} of order {self.order_number}"


class Stock(models.Model):
    """The number of articles in stock; a row that refuses late writes."""

    article = models.PositiveIntegerField(unique=True)
    count = models.IntegerField(default=0)
    fence = FencingTokenField()

    def __str__(self) -> str:
        return f"{self.count} of article {self.article}"
