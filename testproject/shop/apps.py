"""The shop's app configuration."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["ShopConfig"]


class ShopConfig(AppConfig):
    name = "testproject.shop"
    label = "shop"
