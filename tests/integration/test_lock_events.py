"""Lock events are written as rows; if the database fails, a log line is written."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading

import pytest
from django.db import DatabaseError

from django_dlock import Lock, locks, process, signals
from django_dlock.core import dispatch
from django_dlock.models import LockEvent
from django_dlock.operators import audit

FACTS = {
    "name": "order:1",
    "alias": "default",
    "owner": "o",
    "token": 7,
    "metadata": {"task_name": "shop.charge", "user": "ada", "note": "x" * 1000},
}


pytestmark = pytest.mark.usefixtures("lock_events")


def send(signal, **facts):
    """Send it through the events thread, which has its own database connection."""
    dispatch.send(signal, Lock, **{**FACTS, **facts})
    assert dispatch.flush(30)


@pytest.mark.django_db(transaction=True)
def test_a_loss_is_recorded():
    send(signals.lost, reason="expired", held_for=31.5)
    # Select by name here and below, because a lock of another test may end late.
    event = LockEvent.objects.get(name="order:1")
    assert (event.event, event.name, event.alias) == ("lost", "order:1", "default")
    assert (event.owner, event.token, event.reason) == ("o", 7, "expired")
    me = process.current()
    where = {"host": me.host, "pid": me.pid}
    assert event.detail == {"held_for": 31.5, "task_name": "shop.charge", **where}


@pytest.mark.django_db(transaction=True)
def test_reaching_max_hold_is_a_separate_event():
    send(signals.lost, reason="max_hold", held_for=900.0)
    assert LockEvent.objects.get(name="order:1").event == "max_hold"


@pytest.mark.django_db(transaction=True)
def test_a_take_over_from_a_dead_holder_is_recorded():
    dead = process.current()._replace(host="web-1", pid=7)
    send(signals.broken, reason="holder_dead", owner="the dead one", process=dead)
    event = LockEvent.objects.get(name="order:1")
    assert (event.event, event.owner, event.reason) == (
        "taken_over",
        "the dead one",
        "holder_dead",
    )
    # Not the task of the waiter, which sends this.
    assert event.detail == {"host": "web-1", "pid": 7}


@pytest.mark.django_db(transaction=True)
def test_a_long_wait_is_recorded_and_a_short_one_is_not(settings, monkeypatch):
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    locks.reset()
    with Lock("short"):
        pass
    monkeypatch.setattr(signals, "LONG_WAIT", 0.0)
    with Lock("long"):
        pass
    assert dispatch.flush(30)
    (event,) = LockEvent.objects.filter(name__in=["short", "long"])
    assert (event.event, event.name) == ("long_wait", "long")
    assert event.detail["waited"] >= 0
    locks.reset()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("reason", ["operator", "command"])
def test_a_break_by_an_operator_is_recorded_by_the_caller(reason):
    send(signals.broken, reason=reason)
    assert not LockEvent.objects.filter(name="order:1").exists()


@pytest.mark.django_db(transaction=True)
def test_a_break_by_the_projects_code_is_one_event(settings):
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    locks.reset()
    lock = Lock("order:1", metadata={"task_name": "shop.charge"})
    assert lock.acquire()
    assert locks["default"].break_("order:1", owner=lock.owner)
    assert not locks["default"].break_("order:1", owner=lock.owner)
    assert dispatch.flush(30)
    event = LockEvent.objects.get(name="order:1")
    assert (event.event, event.alias, event.owner) == ("broken", "default", lock.owner)
    assert (event.token, event.reason) == (lock.token, "code")
    me = process.current()
    assert event.detail.pop("held_for") >= 0
    where = {"host": me.host, "pid": me.pid}
    assert event.detail == {"holder_state": "alive", "task_name": "shop.charge", **where}
    locks.reset()


def test_a_break_waits_for_no_database_of_events(settings, monkeypatch):
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    locks.reset()
    free, writing, received = threading.Event(), threading.Event(), threading.Event()

    def hang(*args, **facts):
        writing.set()
        free.wait(30)
        raise DatabaseError("no answer")

    def receive(sender, **facts):
        received.set()

    monkeypatch.setattr(audit, "record", hang)
    signals.broken.connect(receive)
    lock = Lock("order:1")
    assert lock.acquire()
    try:
        # It returns although its event cannot be written before ``free``.
        assert locks["default"].break_("order:1", owner=lock.owner)
        assert writing.wait(20)
        assert received.wait(20)
    finally:
        signals.broken.disconnect(receive)
        free.set()
    assert dispatch.flush(30)
    locks.reset()


A_SCRIPT = """
import sys
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
)
django.setup()
from django.core.management import call_command
from django_dlock import Lock, locks
if sys.argv[2] == "hold":
    call_command("migrate", verbosity=0)
    assert Lock("order:1", ttl=600, renew=False).acquire()
    import os
    os._exit(0)
(info,) = locks["default"].list(prefix="order:")
assert locks["default"].break_(info.name, owner=info.owner)
"""


def test_a_script_that_ends_right_after_its_break_has_left_the_event(tmp_path):
    file = tmp_path / "project.sqlite3"
    for step in ("hold", "break"):
        subprocess.run(
            [sys.executable, "-c", A_SCRIPT, str(file), step],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            timeout=60,
            check=True,
        )
    with contextlib.closing(sqlite3.connect(file)) as database:
        found = database.execute("SELECT event, name, reason FROM django_dlock_lockevent")
        assert found.fetchall() == [("broken", "order:1", "code")]


def test_if_the_database_fails_the_row_is_replaced_by_a_log_line(monkeypatch, caplog):
    def refuse(*args, **facts):
        raise DatabaseError("no database")

    monkeypatch.setattr(audit, "record", refuse)
    send(signals.lost, reason="expired", held_for=1.0)
    assert "no database" in caplog.text
    assert "order:1" in caplog.text


def test_g2_a_table_that_does_not_answer_delays_no_receiver(monkeypatch):
    free, received = threading.Event(), threading.Event()
    monkeypatch.setattr(audit, "record", lambda *args, **facts: free.wait(30))

    def receive(sender, **facts):
        received.set()

    signals.lost.connect(receive)
    try:
        # The first one is not written yet when the second one comes.
        for _ in range(2):
            dispatch.send(signals.lost, Lock, **{**FACTS, "reason": "expired", "held_for": 1.0})
            assert received.wait(4)
            received.clear()
    finally:
        signals.lost.disconnect(receive)
        free.set()
        assert dispatch.flush(30)


WITHOUT_A_DATABASE = """
import django
from django.conf import settings
local = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
settings.configure(INSTALLED_APPS=["django_dlock"], DLOCKS={"default": local})
django.setup()
from django_dlock import Lock, locks
from django_dlock.core import dispatch
lock = Lock("lost")
assert lock.acquire() and locks["default"].break_("lost", owner=lock.owner)
try:
    lock.renew()
except Exception as error:
    print(error)
assert dispatch.flush(30)
"""


def test_a_project_without_a_database_has_no_rows_and_no_errors():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_DATABASE],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "The lease is lost: broken" in run.stdout
    (line,) = run.stderr.splitlines()
    assert "was lost after" in line


SILENT_AT_THE_END = """
import sys
import django
from django.conf import settings
local = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DLOCKS={"default": local},
    DATABASES={"default": {
        "ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1], "OPTIONS": {"timeout": 60},
    }},
)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
print(flush=True)
sys.stdin.readline()
from django_dlock import Lock
kept = [Lock(f"shop:{number}") for number in range(3)]
for lock in kept:
    assert lock.acquire()
"""


def test_g2_rows_that_a_database_has_not_taken_when_the_process_ends_are_named(tmp_path):
    path = tmp_path / "events.sqlite3"
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT_AT_THE_END, str(path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        process.stdout.readline()
        other.execute("BEGIN EXCLUSIVE")
        _, told = process.communicate("now", timeout=50)
    assert process.returncode == 0, told
    for number in range(3):
        line = f"The lock event 'lost' of lock 'shop:{number}' was not written before the process"
        assert told.count(line) == 1, told


@pytest.mark.django_db(transaction=True)
def test_connecting_the_receiver_twice_writes_one_row():
    audit.connect()
    send(signals.lost, reason="expired", held_for=1.0)
    assert LockEvent.objects.filter(name="order:1").count() == 1
