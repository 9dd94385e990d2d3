"""The addresses of each tenant."""

from __future__ import annotations

from django.urls import path
from shop.views import pay

urlpatterns = [path("pay/<int:order>/", pay)]
