"""Rows of lock statistics as processes write them, and their page, at a time that stands still."""

from __future__ import annotations

import html
import re

import pytest

from django_dlock import locks
from django_dlock.admin import figures
from django_dlock.metrics import table
from django_dlock.metrics.counts import Point, Series

PAGE = "/admin/django_dlock/lockstatistics/"
NOW = 1_790_001_030
"""Half a minute after the start of a minute."""


@pytest.fixture
def now(settings, monkeypatch):
    """Two aliases; the page believes that it is NOW."""
    settings.DLOCKS = {
        name: {"BACKEND": "django_dlock.backends.local.LocalBackend"} for name in ("default", "b")
    }
    settings.DLOCK_METRICS = {"EXPORTERS": []}
    locks.reset()
    monkeypatch.setattr(figures.time, "time", lambda: float(NOW))
    yield NOW
    locks.reset()


def point(count=0, total=0.0, *durations):
    made = Point()
    for seconds in durations:
        made.observe(seconds)
    made.count += count
    made.total += total
    return made


def series(instrument, label="", *, alias="default", group="order"):
    return Series(instrument.name, alias, group, label)


def write(points, before=120):
    """Add points to the minute that began so many seconds ago."""
    minute = NOW - before
    table.write({minute - minute % 60: points})


def text_of(response):
    """What the page says, without markup."""
    body = response.content.decode().partition('<div class="dlock-statistics">')[2]
    body = re.sub(r"<svg.*?</svg>", "", body, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())
