"""URLs of the shop."""

from __future__ import annotations

from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("", views.home, name="home"),
    path("orders/<int:number>/charge/", views.charge, name="charge"),
]
