"""Orders in the admin, with their locks."""

from __future__ import annotations

from django.contrib import admin

from django_dlock.admin import LockedObjectAdmin

from .models import Order


@admin.register(Order)
class OrderAdmin(LockedObjectAdmin):
    list_display = ("number", "paid", "created_at")
    lock_keys = ("order:{object.number}",)
