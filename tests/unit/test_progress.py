"""The progress of commands with much to do, which only a terminal shows."""

from __future__ import annotations

import datetime as dt
import io
import re

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError
from django.utils import timezone

from django_dlock import locks, process
from django_dlock.lease import LeaseRequest
from django_dlock.management.progress import Progress
from django_dlock.models import LockEvent

LOCAL = "django_dlock.backends.local.LocalBackend"


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def shown(self):
        """The successive contents of the line."""
        return re.sub(r"\x1b\[K", "", self.getvalue()).split("\r")[1:]


@pytest.fixture(autouse=True)
def _each_step(monkeypatch):
    # Otherwise the speed of the machine would decide what is shown.
    monkeypatch.setattr(Progress, "PAUSE", 0.0)


@pytest.fixture
def dead_locks(settings):
    """Three locks of a process that has ended."""
    settings.DLOCKS = {"default": {"BACKEND": LOCAL}}
    locks.reset()
    backend = locks["default"]
    for number in range(3):
        request = LeaseRequest(f"order:{number}", f"owner-{number}", 30.0)
        backend.acquire(request, deadline=backend.call_deadline())
    backend.deregister(process.current().id, deadline=backend.call_deadline())
    yield
    locks.reset()


def events(count):
    when = timezone.now() - dt.timedelta(days=100)
    for number in range(count):
        LockEvent.objects.create(when=when, event="lost", alias="one", name=f"{number}")


@pytest.mark.django_db
def test_a_terminal_sees_how_many_rows_are_deleted():
    events(5)
    out, err = io.StringIO(), Terminal()
    call_command("purge_lock_events", batch_size=2, stdout=out, stderr=err)
    assert err.shown == [*(f"{count} lock events deleted so far" for count in (2, 4, 5)), ""]
    assert out.getvalue() == "5 lock events were deleted.\n"


@pytest.mark.django_db
@pytest.mark.usefixtures("dead_locks")
def test_a_terminal_sees_how_many_locks_are_cleared():
    err = Terminal()
    call_command("clear_stale_locks", stdout=io.StringIO(), stderr=err)
    assert err.shown == [*(f"{count} of 3 done, {count} cleared" for count in (1, 2, 3)), ""]


@pytest.mark.django_db
@pytest.mark.usefixtures("dead_locks")
@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_is_shown_on_a_pipe_or_with_verbosity_0(terminal):
    events(2)
    err = Terminal() if terminal else io.StringIO()
    options = {"stdout": io.StringIO(), "stderr": err, "verbosity": 0 if terminal else 1}
    call_command("purge_lock_events", **options)
    call_command("clear_stale_locks", **options)
    assert err.getvalue() == ""


def test_a_terminal_is_not_written_to_more_often_than_it_can_be_read(monkeypatch):
    monkeypatch.setattr(Progress, "PAUSE", 3600.0)
    err = TerminalOfCommand()
    with Progress(err) as progress:
        for number in range(1000):
            progress.show(f"{number} done")
    assert err.shown == ["0 done", ""]


class TerminalOfCommand(Terminal):
    """As Django wraps it."""

    def write(self, text, style_func=None, ending=""):
        return super().write(text + ending)


def test_a_failure_leaves_no_line_behind(monkeypatch):
    def purge(**options):
        yield 3
        raise DatabaseError("gone")

    monkeypatch.setattr("django_dlock.records.retention.purge_events", purge)
    err = Terminal()
    with pytest.raises(CommandError, match="Stopped after 3 lock events"):
        call_command("purge_lock_events", stdout=io.StringIO(), stderr=err)
    assert err.shown == ["3 lock events deleted so far", ""]
