"""URLs of the admin and the shop."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [
    path("admin/", admin.site.urls),
    path("", include("testproject.shop.urls")),
]

if "prometheus" in (getattr(settings, "DLOCK_METRICS", None) or {}).get("EXPORTERS", ()):
    from django_dlock.metrics.prometheus import metrics_view

    urlpatterns.append(path("metrics", metrics_view))
