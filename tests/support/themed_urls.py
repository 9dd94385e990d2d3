"""The addresses of a site with django-grappelli, whose pages need some of its own."""

from __future__ import annotations

from django.urls import include, path

from testproject.urls import urlpatterns as ours

urlpatterns = [path("grappelli/", include("grappelli.urls")), *ours]
