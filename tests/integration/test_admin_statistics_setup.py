"""What the page of lock statistics says while nothing is counted, or nothing can be read."""

from __future__ import annotations

import html
import re

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections
from django.test import override_settings

from django_dlock import Lock
from django_dlock.admin import statistics
from django_dlock.core import dispatch
from django_dlock.metrics import config, recorder
from django_dlock.models import LockStatistics
from tests.support.counted import (  # noqa: F401 - a fixture
    PAGE,
    now,
    text_of,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("now")]


def shown(client):
    """What the page offers to copy."""
    found = re.findall(r"<pre[^>]*>(.*?)</pre>", client.get(PAGE).content.decode(), re.DOTALL)
    return [html.unescape(each) for each in found]


def paste(line, **before):
    """The value of the setting after the line was pasted below these settings."""
    exec(line, before)
    return before["DLOCK_METRICS"]


@pytest.mark.parametrize("unset", [None, {}])
def test_the_line_that_the_page_shows_switches_it_on(admin_client, settings, unset):
    settings.DLOCK_METRICS = unset
    assert "Add this to the end of the settings, and restart all processes" in text_of(
        admin_client.get(PAGE)
    )
    (line,) = shown(admin_client)
    assert line == 'DLOCK_METRICS = {"EXPORTERS": ["admin"]}'
    settings.DLOCK_METRICS = paste(line)
    assert config.read().exporters == ("admin",)
    assert shown(admin_client) == []
    assert "Nothing was counted in this time." in text_of(admin_client.get(PAGE))


@pytest.mark.django_db(transaction=True)
def test_with_the_line_locks_are_counted(admin_client, settings):
    settings.DLOCK_METRICS = None
    (line,) = shown(admin_client)
    with override_settings(DLOCK_METRICS=paste(line)):
        with Lock("order:1"):
            pass
        dispatch.flush()
        # This writes what was counted.
        recorder.disconnect()
    assert LockStatistics.objects.filter(metric="django_dlock.wait.duration").exists()


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_line_keeps_what_the_settings_have(admin_client, settings, kind):
    before = {"EXPORTERS": kind(["opentelemetry"]), "GROUPS": ["order"], "RECORDS": False}
    settings.DLOCK_METRICS = before
    (line,) = shown(admin_client)
    found = paste(line, DLOCK_METRICS=before)
    assert found == {**before, "EXPORTERS": ["opentelemetry", "admin"]}
    settings.DLOCK_METRICS = found
    assert config.read().exporters == ("opentelemetry", "admin")
    assert shown(admin_client) == []


def test_settings_without_exporters_keep_their_groups(admin_client, settings):
    settings.DLOCK_METRICS = {"GROUPS": ["order"]}
    (line,) = shown(admin_client)
    assert paste(line, DLOCK_METRICS={"GROUPS": ["order"]}) == {
        "GROUPS": ["order"],
        "EXPORTERS": ["admin"],
    }


def test_settings_that_are_wrong_are_told_instead(admin_client, settings, monkeypatch):
    monkeypatch.setattr("django_dlock.apps._connect_metrics", lambda: None)
    settings.DLOCK_METRICS = {"EXPORTERS": ["admn"]}
    text = text_of(admin_client.get(PAGE))
    assert "Nothing is counted: DLOCK_METRICS['EXPORTERS'] is " in text
    assert shown(admin_client) == []


# -- a table that is missing, and a database that is down -----------------------------------------

MIGRATE = "python manage.py migrate django_dlock"


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_a_missing_table_is_told_with_the_command_that_makes_it(
    admin_client, monkeypatch, settings, atomic, on
):
    if atomic:
        monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    settings.DLOCK_METRICS = {"EXPORTERS": ["admin"]} if on else None
    monkeypatch.setattr(LockStatistics._meta, "db_table", "no_such_table")
    response = admin_client.get(PAGE)
    assert response.status_code == 200
    # While it is off, there is no error yet.
    cannot = "The statistics cannot be read. no such table: no_such_table"
    assert (cannot in text_of(response)) == on
    assert shown(admin_client)[-1] == MIGRATE
    assert len(shown(admin_client)) == (1 if on else 2)


def test_the_command_that_is_shown_exists():
    _python, _manage, name, *arguments = MIGRATE.split()
    call_command(name, *arguments, "--check", verbosity=0)


def test_another_error_is_told_without_a_command(admin_client, monkeypatch, settings):
    settings.DLOCK_METRICS = {"EXPORTERS": ["admin"]}

    def fail(*_):
        raise OperationalError("the database is away")

    monkeypatch.setattr(statistics, "Figures", fail)
    response = admin_client.get(PAGE)
    assert response.status_code == 200
    assert "The statistics cannot be read. the database is away" in text_of(response)
    assert shown(admin_client) == []
