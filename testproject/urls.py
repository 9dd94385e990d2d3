"""URLs of the admin and the shop."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("testproject.shop.urls")),
]
