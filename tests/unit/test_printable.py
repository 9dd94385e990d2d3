"""Text from outside reaches people without characters that a terminal or a log would obey."""

from __future__ import annotations

import io
import json
import logging
import pickle
import sys
import unicodedata
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError

from django_dlock import Lock, LockNotAcquired, locks
from django_dlock.admin.base import breakable, long_text
from django_dlock.backends.failover.record import Reading
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import LeaseRequest
from django_dlock.log import LockLogger, logger
from django_dlock.management import LockedCommand
from django_dlock.management.commands import switch_locks
from django_dlock.models import FollowUp, IdempotencyRecord
from django_dlock.text.printable import JOINERS, printable
from tests.support.deliveries import in_memory, task, work

CONTROLS = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
SEPARATORS = "\u2028\u2029"
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
WITHOUT_WIDTH = "\u00ad\u200b\u2060\ufeff\U000e0001"
SURROGATES = "\udfff\ud800"
HARMFUL = CONTROLS + SEPARATORS + DIRECTIONS + WITHOUT_WIDTH + SURROGATES
PATH = f"/export/é/{HARMFUL}/end"
LOCAL = "django_dlock.backends.local.LocalBackend"
DOWN = f"{__name__}.Down"


class Down(LocalBackend):
    """An alias whose server answers with the path."""

    def page(self, query, **_):
        raise BackendUnavailable(PATH, "", self.alias)

    def acquire(self, request, *, deadline):
        raise BackendUnavailable(PATH, request.name, self.alias)


@pytest.fixture(autouse=True)
def aliases(settings):
    settings.DLOCKS = {"default": {"BACKEND": LOCAL}}
    locks.reset()
    yield
    locks.reset()


def hold(name: str = "export", **metadata: str) -> None:
    """Another process holds the lock."""
    backend = locks["default"]
    metadata = metadata or {"path": PATH}
    request = LeaseRequest(name=name, owner="other", ttl=30, metadata=json.dumps(metadata))
    assert backend.acquire(request, deadline=backend.call_deadline())


def run(command: str, **options: Any) -> Any:
    out, err = io.StringIO(), io.StringIO()
    try:
        call_command(command, stdout=out, stderr=err, no_color=True, **options)
    except CommandError as error:
        return SimpleNamespace(out=out.getvalue(), err=err.getvalue() + str(error))
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue())


def assert_harmless(text: str, *, lines: bool = False) -> None:
    found = sorted({hex(ord(c)) for c in text.replace("\n" if lines else "", "") if c in HARMFUL})
    assert found == []
    assert "\\x1b" in text
    assert "\\u202e" in text
    assert "\\ud800" in text


# -- the function ----------------------------------------------------------------------------


def test_every_character_that_is_not_visible_is_escaped():
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        if char not in JOINERS and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            shown = printable(char)
            assert shown.isascii(), hex(number)
            assert shown.isprintable(), hex(number)


@pytest.mark.parametrize(
    "text",
    ["", "/é/ß", "注文:1", "a\u00a0b\u3000c", "C:\\x1b", "🙂", "🧑\u200d🚀", "क्\u200cष"],
)
def test_other_text_stays_as_it_is(text):
    assert printable(text) == text


def test_escaped_text_may_be_escaped_again():
    assert printable(printable(PATH)) == printable(PATH)
    assert printable("a\x1b[2J\u202eb\n") == "a\\x1b[2J\\u202eb\\n"


# -- exceptions, tasks -----------------------------------------------------------------------


@pytest.mark.parametrize("key", ["path", "task_name"])
def test_the_error_of_a_contended_lock_is_one_harmless_line(key):
    hold(**{key: PATH})
    with pytest.raises(LockNotAcquired) as caught, Lock("export", wait=0):
        pass
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert_harmless(str(error))
        assert_harmless(error.holder)
    assert caught.value.info is not None
    assert caught.value.info.metadata[key] == PATH


def test_an_error_of_another_version_is_shown_harmless_and_stays_exact():
    error = pickle.loads(pickle.dumps(LockNotAcquired("held", "export", "default", PATH)))
    assert error.holder == PATH
    assert_harmless(str(error))
    refused = BackendUnavailable(PATH, "export", "default")
    assert refused.message == PATH
    assert_harmless(str(refused))


def test_a_waiter_is_described_harmless():
    hold()
    info = locks["default"].get("export")
    assert info is not None
    from django_dlock.lease import Waiter

    waiter = Waiter(
        *("export", "default", "o", info.acquired_at, 1.0, info.process, "alive"), info.metadata
    )
    assert_harmless(waiter.who)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("policy", ["fail", "wait", "requeue"])
def test_errors_results_and_lines_of_a_contended_task_are_harmless(policy, caplog):
    with in_memory() as app, caplog.at_level(logging.INFO):
        made = task(app, if_contended=policy, lock_wait=0, lock_key="export")
        hold()
        sent = made.delay(1)
        work(app)
        if policy != "requeue":
            assert_harmless(str(sent.result))
            assert_harmless(sent.result.holder)
    for record in caplog.records:
        assert not set(record.getMessage()) & set(HARMFUL)


# -- commands --------------------------------------------------------------------------------


def test_list_locks_shows_harmless_text_and_exact_json():
    hold()
    assert_harmless(run("list_locks").out, lines=True)
    assert_harmless(run("list_locks", waiters=True).out, lines=True)
    told = run("list_locks", format="json").out
    assert not set(told.replace("\n", "")) & set(HARMFUL)
    assert json.loads(told)[0]["holder"]["path"] == PATH


def test_clear_stale_locks_shows_harmless_text():
    hold()
    shown = run("clear_stale_locks", force=True, name="export", dry_run=True).out
    assert_harmless(shown, lines=True)


@pytest.mark.django_db
def test_clear_stale_locks_reports_an_event_that_is_not_written(monkeypatch):
    def record(*_, **__):
        raise DatabaseError(f"Failing row contains {PATH}")

    monkeypatch.setattr("django_dlock.operators.audit.record_break", record)
    hold()
    assert_harmless(run("clear_stale_locks", force=True, name="export").err, lines=True)


@pytest.mark.parametrize("command", ["list_locks", "clear_stale_locks", "diagnose_locks"])
def test_what_a_store_says_is_shown_harmless(command, settings):
    settings.DLOCKS = {"default": {"BACKEND": DOWN}}
    told = run(command)
    assert_harmless(told.out + told.err, lines=True)


@pytest.mark.parametrize("code", [0, 1])
def test_a_locked_command_reports_its_contention_harmless(code):
    class Export(LockedCommand):
        lock_key = "export"
        contended_exit_code = code

        def handle(self, *args, **options):
            raise AssertionError

    hold()
    err = io.StringIO()
    try:
        call_command(Export(), stderr=err)
    except CommandError as error:
        err.write(str(error))
    assert_harmless(err.getvalue(), lines=True)


def test_switch_locks_shows_a_harmless_record():
    command, out = switch_locks.Command(), io.StringIO()
    command.stdout = out  # type: ignore[assignment]
    reading = Reading(
        **{**dict.fromkeys(Reading._fields, 0), "active": "a", "reason": PATH, "switched_by": PATH}
    )
    command._show("default", reading, "text")
    assert_harmless(out.getvalue(), lines=True)


# -- log -------------------------------------------------------------------------------------


class Strange:
    def __str__(self) -> str:
        return PATH


@pytest.mark.parametrize(
    "argument", [PATH, DatabaseError(PATH), Strange()], ids=["text", "error", "object"]
)
def test_a_line_of_the_log_is_harmless_and_its_fields_are_exact(argument, caplog):
    with caplog.at_level(logging.WARNING, "django_dlock"):
        logger.warning("%s is not recorded: %d", argument, 7, task_id=PATH)
        logger.write(logger.line(logging.WARNING, "%s is not recorded: %d", argument, 7))
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert_harmless(record.getMessage())
        assert record.getMessage().endswith("is not recorded: 7")
    assert caplog.records[0].task_id == PATH


def test_the_repr_in_a_line_is_that_of_the_argument(caplog):
    with caplog.at_level(logging.WARNING, "django_dlock"):
        logger.warning("Lock %r", "a\u202eb", name="a")
    assert caplog.records[0].getMessage() == r"Lock 'a\u202eb'"


def test_an_escaped_argument_can_be_pickled(caplog):
    """Handlers may send the arguments of a record to another process."""
    with caplog.at_level(logging.WARNING, "django_dlock"):
        logger.warning("%s", PATH, name="a")
    args = pickle.loads(pickle.dumps(caplog.records[0].args))
    assert args == (printable(PATH),)


def test_an_argument_without_text_fails_no_caller():
    class Mute:
        def __str__(self) -> str:
            raise ValueError

    quiet = logging.getLogger(f"{__name__}.quiet")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    LockLogger(quiet.name).warning("%s", Mute())


# -- pages -----------------------------------------------------------------------------------


def test_cells_of_the_pages_are_harmless():
    assert_harmless(breakable(PATH))
    assert_harmless(long_text(f"a\n{PATH}"), lines=True)


def test_rows_of_tasks_and_keys_are_harmless():
    assert_harmless(str(FollowUp(task=PATH, task_id="1")))
    assert_harmless(str(IdempotencyRecord(scope="s", key=PATH)))
