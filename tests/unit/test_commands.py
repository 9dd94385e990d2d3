"""The commands: what they show, what they clear, and how they end."""

from __future__ import annotations

import datetime as dt
import io
import json
import sys
import threading
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import OutputWrapper
from django.db import DatabaseError
from django.db.utils import ConnectionHandler
from django.test import override_settings
from django.utils import timezone

from django_dlock import clock, locks, process, signals
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Lease, LeaseInfo, LeaseRequest, Renewal
from django_dlock.management.commands.clear_stale_locks import _is_stale
from django_dlock.management.wanted import Wanted
from django_dlock.models import IdempotencyRecord, LockEvent
from django_dlock.operators import audit
from django_dlock.records.erasure import Erasure

LOCAL = "django_dlock.backends.local.LocalBackend"
KEYS = {
    "unknown",
    "name",
    "alias",
    "kind",
    "owner",
    "token",
    "holder",
    "holder_state",
    "acquired_at",
    "age",
    "ttl",
    "renewals",
    "waiting",
    "damaged",
}


class DownBackend(LocalBackend):
    """An alias that does not answer."""

    def page(self, query, **_):
        raise BackendUnavailable("nobody answers", "", self.alias)


class BreaksNothing(LocalBackend):
    """Every lock gets another owner between listing and break."""

    def break_silently(self, name, *, owner):
        return False


@pytest.fixture(autouse=True)
def aliases(settings):
    settings.DLOCKS = {"one": {"BACKEND": LOCAL}, "two": {"BACKEND": LOCAL}}
    locks.reset()
    yield
    locks.reset()


def hold(name, alias="one", owner="owner", **facts):
    backend = locks[alias]
    request = LeaseRequest(name=name, owner=owner, ttl=30, **facts)
    lease = backend.acquire(request, deadline=backend.call_deadline())
    assert isinstance(lease, Lease)
    return lease


def say_goodbye(alias="one"):
    """Makes this process report its end, which proves its death."""
    backend = locks[alias]
    backend.deregister(process.current().id, deadline=backend.call_deadline())


def run(command, **options):
    out, err = io.StringIO(), io.StringIO()
    call_command(command, stdout=out, stderr=err, **options)
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue())


def run_json(command, **options):
    return json.loads(run(command, format="json", **options).out)


def exit_code(command, **options):
    with pytest.raises(CommandError) as caught:
        run(command, **options)
    return caught.value.returncode


# -- list_locks ---------------------------------------------------------------------------


def test_list_locks_shows_the_locks_of_every_alias():
    hold("invoice:1", metadata='{"task_name": "shop.charge"}')
    hold("report:daily", alias="two")
    out = run("list_locks").out
    assert out.splitlines()[0].split() == [
        *("NAME", "STATE", "AGE", "WAITING", "HOLDER", "TASK", "TTL", "ALIAS")
    ]
    assert "invoice:1" in out
    assert "shop.charge" in out
    assert "report:daily" in out


def test_the_json_has_no_terminal_escapes_and_accepts_lone_surrogates():
    strange = "\x9b2J\u202e\ud800\U000e0001 é"
    hold("invoice:1", metadata=json.dumps({"path": strange}))
    out = run("list_locks", format="json").out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "é" in out
    assert json.loads(out)[0]["holder"]["path"] == strange


def test_list_locks_says_so_when_nothing_is_held():
    assert run("list_locks").out == "No lock is held.\n"


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("import", "No held lock has the name 'import'. --name needs the whole name; * matches"),
        ("import:*", "No held lock has a name that matches 'import:*'."),
    ],
)
def test_list_locks_without_a_match_repeats_the_pattern(pattern, told):
    hold("report:daily")
    assert run("list_locks", name=pattern).out.startswith(told)


def test_commands_about_locks_say_which_pattern_matches_nothing():
    told = "No held lock matches --host 'web' and --task 'shop.charge'. A pattern is for the whole"
    assert run("list_locks", host="web", task="shop.charge").out.startswith(told)
    told = "Nothing would be cleared. No held lock has the name 'import'."
    assert run("clear_stale_locks", name="import", dry_run=True).out.startswith(told)
    told = "Nothing was cleared. No held lock matches --task 'shop.*'.\n"
    assert run("clear_stale_locks", task="shop.*").out == told


def test_list_locks_shows_the_id_of_a_task():
    hold("order:1", metadata='{"task_name": "shop.charge", "task_id": "9f-42"}')
    assert "shop.charge[9f-42]" in run("list_locks").out


def test_list_locks_prints_exactly_the_promised_keys_as_json():
    hold("invoice:1", metadata='{"path": "/pay/", "user": "ada"}')
    (lock,) = run_json("list_locks")
    assert set(lock) == KEYS
    assert set(lock["holder"]) == {"host", "pid", "task_name", "task_id", "path", "user"}
    assert (lock["name"], lock["alias"], lock["holder"]["path"]) == ("invoice:1", "one", "/pay/")
    assert dt.datetime.fromisoformat(lock["acquired_at"]).tzinfo is not None


def queue_up(name, alias="one", **facts):
    store = locks[alias]
    request = LeaseRequest(name, f"waiter {len(store.waiters(name))}", 30.0, waits=True, **facts)
    store.acquire(request, deadline=store.call_deadline())


def test_list_locks_shows_the_waiters_of_each_lock():
    hold("quiet")
    hold("a")
    queue_up("a", metadata='{"task_name": "shop.charge", "task_id": "9f-42"}')
    queue_up("a", metadata='{"path": "/pay/\\u001b[2J", "user": "ann"}')
    lines = run("list_locks", waiters=True).out.splitlines()
    me = process.current()
    assert lines[-3].split() == ["WAITS", "FOR", "STATE", "SINCE", "WAITER", "TASK", "ALIAS"]
    waiter = ["a", "alive", "0.0s", f"{me.host}:{me.pid}"]
    assert lines[-2].split()[:5] == [*waiter, "shop.charge[9f-42]"]
    assert lines[-1].split()[:5] == [*waiter, "/pay/\\x1b[2J"]
    assert "WAITS FOR" not in run("list_locks").out
    assert "WAITS FOR" not in run("list_locks", waiters=True, name="quiet").out


def test_list_locks_prints_the_waiters_as_json():
    hold("a")
    hold("b", alias="two")
    queue_up("a", metadata='{"task_name": "shop.charge"}')
    first, second = run_json("list_locks", waiters=True)
    assert set(first) == KEYS | {"waiters", "deadlock"}
    (waiter,) = first["waiters"]
    assert set(waiter) == {"owner", "waiter", "state", "since", "waited", "damaged"}
    assert waiter["waiter"]["task_name"] == "shop.charge"
    assert (waiter["owner"], waiter["state"]) == ("waiter 0", "alive")
    assert dt.datetime.fromisoformat(waiter["since"]).tzinfo
    assert (second["waiters"], second["deadlock"]) == ([], None)


def test_list_locks_lists_the_locks_of_an_alias_whose_waiters_are_not_told(monkeypatch):
    def away(name, limit):
        raise BackendUnavailable("nobody answers", name, "one")

    hold("a")
    queue_up("a")
    monkeypatch.setattr(locks["one"], "waiters", away)
    out = io.StringIO()
    with pytest.raises(CommandError, match="nobody answers") as caught:
        call_command("list_locks", waiters=True, stdout=out)
    assert out.getvalue().splitlines()[1].startswith("a ")
    assert caught.value.returncode == 1


def test_list_locks_prints_an_empty_list_as_json():
    assert run_json("list_locks") == []


def test_list_locks_can_be_limited_to_one_alias():
    hold("a")
    hold("b", alias="two")
    assert [lock["name"] for lock in run_json("list_locks", using="two")] == ["b"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("invoice:*", ["invoice:1", "invoice:[x]"]),
        ("*:1", ["invoice:1", "order:1"]),
        ("invoice:[x]", ["invoice:[x]"]),
        ("invoice", []),
        ("*", ["invoice:1", "invoice:[x]", "order:1"]),
        ("i*c*1", ["invoice:1"]),
        ("INVOICE:*", []),
    ],
)
def test_only_the_star_is_special_in_a_name_pattern(pattern, names):
    for number, name in enumerate(["invoice:1", "invoice:[x]", "order:1"]):
        hold(name, owner=f"owner-{number}")
    assert [lock["name"] for lock in run_json("list_locks", name=pattern)] == names


@pytest.mark.parametrize(
    ("pattern", "prefix", "contains"),
    [
        ("invoice:1", "invoice:1", "invoice:1"),
        ("a*:shipped*", "a", ":shipped"),
        ("*", "", ""),
        (None, "", ""),
    ],
)
def test_backends_filter_by_the_fixed_parts_of_a_pattern(monkeypatch, pattern, prefix, contains):
    asked, original = [], LocalBackend.page

    def spy(self, query, **bounds):
        asked.append((query.prefix, query.contains))
        return original(self, query, **bounds)

    monkeypatch.setattr(LocalBackend, "page", spy)
    run_json("list_locks", name=pattern)
    assert asked == [(prefix, contains)] * 2


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"task": "shop.*"}, ["a", "b"]),
        ({"task": "shop.charge"}, ["a"]),
        ({"task": "*"}, ["a", "b"]),
        ({"task": "*.refund", "name": "b"}, ["b"]),
        ({"task": "charge"}, []),
        ({"host": "elsewhere"}, []),
        ({"host": process.current().host, "name": "c"}, ["c"]),
        ({"host": f"{process.current().host[:1]}*"}, ["a", "b", "c"]),
        ({"older_than": 0.0}, ["a", "b", "c"]),
        ({"older_than": 3600.0}, []),
    ],
)
def test_list_locks_can_be_limited_to_a_host_a_task_and_an_age(options, names):
    hold("a", metadata='{"task_name": "shop.charge"}')
    hold("b", metadata='{"task_name": "shop.refund"}')
    hold("c", metadata='{"path": "shop.charge"}')
    assert [lock["name"] for lock in run_json("list_locks", **options)] == names
    if not names:
        assert run("list_locks", **options).out.startswith("No held lock matches --")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_list_locks_refuses_a_wrong_age(seconds):
    assert exit_code("list_locks", older_than=seconds) == 2


def test_with_an_alias_that_does_not_answer_the_others_are_shown_and_the_exit_code_is_1(settings):
    settings.DLOCKS = {
        "down": {"BACKEND": f"{__name__}.DownBackend"},
        "up": {"BACKEND": LOCAL},
    }
    locks.reset()
    hold("order:1", alias="up")
    out = io.StringIO()
    with pytest.raises(CommandError, match="nobody answers") as caught:
        call_command("list_locks", format="json", stdout=out)
    assert caught.value.returncode == 1
    lock, error = json.loads(out.getvalue())
    assert lock["name"] == "order:1"
    assert set(error) == {"alias", "error"}
    assert error["alias"] == "down"
    assert "nobody answers" in error["error"]


def test_an_alias_with_wrong_settings_gives_exit_code_1(settings):
    settings.DLOCKS = {"one": {"BACKEND": "no.such.Backend"}}
    locks.reset()
    assert exit_code("list_locks") == 1


@pytest.mark.parametrize("command", ["list_locks", "clear_stale_locks"])
def test_an_unknown_alias_is_a_usage_error(command):
    assert exit_code(command, using="three") == 2


def test_escape_sequences_in_a_name_do_not_reach_the_terminal():
    hold("a", metadata='{"path": "/\\u001b[2J"}')
    out = run("list_locks").out
    assert "\x1b" not in out
    assert "/\\x1b[2J" in out


# -- clear_stale_locks --------------------------------------------------------------------


@pytest.mark.django_db
def test_clear_stale_locks_frees_the_lock_of_a_dead_process_and_records_it():
    lease = hold("order:1", metadata='{"task_name": "shop.charge", "user": "ada"}')
    say_goodbye()
    assert [lock["name"] for lock in run_json("clear_stale_locks")] == ["order:1"]
    assert locks["one"].get("order:1") is None
    renewal = Renewal("order:1", "owner", 30.0)
    (told,) = locks["one"].renew([renewal], process="p", deadline=clock.now() + 1)
    assert told.outcome == "broken"
    event = LockEvent.objects.get(name="order:1")
    assert (event.event, event.name, event.alias) == ("broken", "order:1", "one")
    assert (event.reason, event.owner, event.token) == ("command", "owner", lease.token)
    assert event.detail["task_name"] == "shop.charge"
    assert "user" not in event.detail


@pytest.mark.django_db
def test_clear_stale_locks_needs_no_database(monkeypatch):
    nowhere = ConnectionHandler({"default": {}})
    monkeypatch.setattr(audit, "connections", nowhere)
    for name in ("order:1", "order:2"):
        hold(name)
    say_goodbye()
    assert {lock["name"] for lock in run_json("clear_stale_locks")} == {"order:1", "order:2"}
    assert not LockEvent.objects.exists()


@pytest.mark.django_db
@pytest.mark.usefixtures("lock_events")
def test_clear_stale_locks_sends_broken_before_it_ends():
    hold("order:1")
    say_goodbye()
    sent, gate = [], threading.Event()

    def receiver(sender, **facts):
        # The command must wait for it.
        gate.wait(30)
        sent.append((sender.__name__, facts["name"], facts["reason"], facts["alias"]))

    signals.broken.connect(receiver)
    threading.Timer(0.2, gate.set).start()
    try:
        run("clear_stale_locks")
    finally:
        signals.broken.disconnect(receiver)
    assert sent == [("Lock", "order:1", "command", "one")]
    # The command has written the row; the package's own receivers write no second one.
    assert LockEvent.objects.filter(name="order:1").count() == 1


def test_clear_stale_locks_keeps_the_lock_of_a_living_holder():
    hold("order:1")
    assert run("clear_stale_locks").out == (
        "Nothing was cleared. 1 lock matches, but none is stale; list_locks shows the state of "
        "each holder.\n"
    )
    assert locks["one"].get("order:1") is not None


def test_a_dry_run_changes_nothing():
    hold("order:1")
    say_goodbye()
    out = run("clear_stale_locks", dry_run=True).out
    assert "order:1" in out
    assert "1 would be cleared." in out
    assert locks["one"].get("order:1") is not None


def test_a_lock_whose_owner_changed_after_the_listing_is_not_cleared(settings):
    settings.DLOCKS = {"one": {"BACKEND": f"{__name__}.BreaksNothing"}}
    locks.reset()
    hold("order:1")
    say_goodbye()
    assert run_json("clear_stale_locks") == []
    assert locks["one"].get("order:1") is not None


@pytest.mark.django_db
@pytest.mark.parametrize("option", [{"task": "shop.*"}, {"host": process.current().host}])
def test_force_clears_only_the_locks_of_the_host_or_task(option):
    hold("a", metadata='{"task_name": "shop.charge"}')
    hold("b", metadata='{"task_name": "mail.send"}')
    cleared = run_json("clear_stale_locks", force=True, name="a", **option)
    assert [lock["name"] for lock in cleared] == ["a"]
    assert len(run_json("clear_stale_locks", force=True, dry_run=True, **option)) == (
        0 if "task" in option else 1
    )


def test_force_for_all_tasks_keeps_the_locks_of_other_holders():
    hold("a", metadata='{"task_name": "shop.charge"}')
    hold("b")
    hold("c", metadata='{"task_name": ["no", "name"]}')
    found = run_json("clear_stale_locks", task="*", force=True, dry_run=True)
    assert [lock["name"] for lock in found] == ["a"]


def test_a_lock_that_names_no_host_matches_no_pattern_for_hosts():
    assert Wanted(host="*").matcher()(info())
    assert not Wanted(host="*").matcher()(info(process=None))
    assert Wanted().matcher()(info(process=None))


@pytest.mark.django_db
def test_force_clears_only_the_locks_that_match_the_pattern():
    hold("order:1", owner="a")
    hold("order:2", owner="b")
    hold("invoice:1", owner="c")
    cleared = run_json("clear_stale_locks", force=True, name="order:*")
    assert [lock["name"] for lock in cleared] == ["order:1", "order:2"]
    assert [info.name for info in locks["one"].list()] == ["invoice:1"]


@pytest.mark.parametrize(
    "options",
    [{"force": True}, {"silent_for": -1.0}, {"older_than": -1.0}, {"older_than": float("nan")}],
)
def test_contradictory_or_impossible_options_are_usage_errors(options):
    hold("order:1")
    assert exit_code("clear_stale_locks", **options) == 2
    assert locks["one"].get("order:1") is not None


@pytest.mark.django_db
def test_older_than_alone_clears_only_leases_without_a_process():
    hold("order:1", owner="a")
    hold("order:2", owner="b", kind="parked")
    assert [lock["name"] for lock in run_json("clear_stale_locks", older_than=0.0)] == ["order:2"]


@pytest.mark.django_db
def test_locks_are_cleared_even_if_the_database_does_not_answer(monkeypatch):
    def refuse(*args, **facts):
        raise DatabaseError("no database")

    monkeypatch.setattr("django_dlock.operators.audit.record", refuse)
    hold("order:1")
    say_goodbye()
    out = io.StringIO()
    with pytest.raises(CommandError, match="'order:1': no database") as failed:
        call_command("clear_stale_locks", stdout=out)
    assert failed.value.returncode == 1
    assert "1 cleared." in out.getvalue()
    assert locks["one"].get("order:1") is None


def test_clearing_fails_if_an_alias_does_not_answer(settings):
    settings.DLOCKS = {"down": {"BACKEND": f"{__name__}.DownBackend"}}
    locks.reset()
    assert exit_code("clear_stale_locks") == 1


def test_a_dry_run_without_an_answer_does_not_say_that_nothing_is_stale(settings):
    settings.DLOCKS = {"down": {"BACKEND": f"{__name__}.DownBackend"}, "up": {"BACKEND": LOCAL}}
    locks.reset()
    out = io.StringIO()
    with pytest.raises(CommandError, match="nobody answers"):
        call_command("clear_stale_locks", dry_run=True, stdout=out)
    assert out.getvalue() == (
        "Of the aliases that answered: Nothing would be cleared. No lock is held.\n"
    )


@pytest.mark.parametrize(
    ("up", "told"),
    [
        ({}, "No answer."),
        ({"up": {"BACKEND": LOCAL}}, "Of the aliases that answered: No lock is held."),
    ],
)
def test_list_locks_tells_no_answer_from_no_lock(settings, up, told):
    settings.DLOCKS = {"down": {"BACKEND": f"{__name__}.DownBackend"}, **up}
    locks.reset()
    out = io.StringIO()
    with pytest.raises(CommandError, match="nobody answers"):
        call_command("list_locks", stdout=out)
    assert out.getvalue().strip() == told


def info(**facts):
    values = {
        "name": "n",
        "alias": "one",
        "kind": "held",
        "owner": "o",
        "token": 1,
        "acquired_at": timezone.now(),
        "age": 100.0,
        "ttl": 30.0,
        "renewals": 0,
        "waiting": 0,
        "process": process.current(),
        "holder_state": "alive",
        "silent_for": 0.0,
        **facts,
    }
    return LeaseInfo(**values)


@pytest.mark.parametrize(
    ("facts", "options", "stale"),
    [
        ({}, {}, False),
        ({"holder_state": "dead"}, {}, True),
        ({"ttl": None}, {}, True),
        ({"holder_state": "silent", "silent_for": 60.0}, {}, False),
        ({"holder_state": "silent", "silent_for": 60.0}, {"silent_for": 60.0}, True),
        ({"holder_state": "silent", "silent_for": 60.0}, {"silent_for": 61.0}, False),
        ({"holder_state": "silent", "silent_for": None}, {"silent_for": 0.0}, False),
        ({"holder_state": "silent", "silent_for": 60.0}, {"older_than": 50.0}, False),
        ({"silent_for": 60.0}, {"silent_for": 10.0}, False),
        ({}, {"older_than": 50.0}, False),
        ({}, {"older_than": 50.0, "force": True}, True),
        ({}, {"older_than": 101.0, "force": True}, False),
        ({}, {"name": "n", "force": True}, True),
        # A store that knows the process may not know whether it lives.
        ({"holder_state": "unknown"}, {"older_than": 50.0}, False),
        ({"holder_state": "unknown"}, {"older_than": 50.0, "force": True}, True),
        ({"holder_state": "unknown", "process": None}, {"older_than": 50.0}, True),
        ({"holder_state": "unknown", "kind": "parked"}, {}, False),
        ({"holder_state": "unknown", "kind": "parked"}, {"older_than": 50.0}, True),
    ],
)
def test_which_locks_are_stale(facts, options, stale):
    defaults = {"silent_for": None, "older_than": None, "force": False, "name": None}
    assert _is_stale(info(**facts), {**defaults, **options}) is stale


# -- purge_idempotency_records ------------------------------------------------------------


def make_records(expired, kept):
    now = timezone.now()
    for number in range(expired + kept):
        age = dt.timedelta(days=1 if number >= expired else -1)
        IdempotencyRecord.objects.create(
            digest=IdempotencyRecord.digest_of("shop", str(number)),
            scope="shop",
            key=str(number),
            state="succeeded",
            attempt=1,
            owner="o",
            created_at=now,
            started_at=now,
            expires_at=now + age,
        )


@pytest.mark.django_db
def test_purging_deletes_expired_records_in_batches():
    make_records(expired=5, kept=2)
    answer = run("purge_idempotency_records", batch_size=2)
    assert answer.out == "5 expired records were deleted.\n"
    assert answer.err == ""
    assert IdempotencyRecord.objects.count() == 2


@pytest.mark.django_db
def test_purging_can_print_json():
    make_records(expired=1, kept=0)
    assert run_json("purge_idempotency_records", using="default", verbosity=0) == {"deleted": 1}


@pytest.mark.parametrize("options", [{"using": "nowhere"}, {"batch_size": 0}])
def test_purging_refuses_wrong_usage(options):
    assert exit_code("purge_idempotency_records", **options) == 2


@pytest.mark.django_db
def test_purging_fails_with_exit_code_1_when_the_database_does_not_answer(monkeypatch):
    def purge(**options):
        yield 3
        raise DatabaseError("gone")

    monkeypatch.setattr("django_dlock.records.retention.purge", purge)
    out = io.StringIO()
    with pytest.raises(CommandError) as failed:
        call_command("purge_idempotency_records", format="json", stdout=out)
    assert failed.value.returncode == 1
    assert json.loads(out.getvalue()) == {"deleted": 3, "error": "gone"}


def test_the_exit_code_reaches_the_shell():
    """``call_command`` raises; a shell sees only the exit code."""
    from django.core.management import execute_from_command_line

    with pytest.raises(SystemExit) as caught:
        execute_from_command_line(["manage.py", "list_locks", "--using", "three"])
    assert caught.value.code == 2


# -- purge_lock_events ---------------------------------------------------------------------


@pytest.mark.django_db
def test_purging_lock_events_keeps_the_younger_ones():
    now = timezone.now()
    for days in (1, 20, 40, 100, 200):
        LockEvent.objects.create(
            when=now - dt.timedelta(days=days), event="lost", alias="one", name=f"{days}"
        )
    assert run("purge_lock_events", verbosity=0).out == "2 lock events were deleted.\n"
    answer = run("purge_lock_events", older_than=30, batch_size=1)
    assert answer.out == "1 lock events were deleted.\n"
    # Meanwhile, losses of other tests' locks may be recorded.
    left = LockEvent.objects.filter(alias="one")
    assert set(left.values_list("name", flat=True)) == {"1", "20"}


class EventsElsewhere:
    def db_for_write(self, model, **hints):
        return "events" if model is LockEvent else None


@override_settings(DATABASE_ROUTERS=[f"{__name__}.EventsElsewhere"])
def test_events_are_purged_in_their_own_database():
    with pytest.raises(CommandError, match="There is no database 'events'"):
        run("purge_lock_events")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_publishing_follow_ups_refuses_wrong_usage(seconds):
    assert exit_code("publish_pending_followups", older_than=seconds) == 2


def test_without_celery_there_are_no_follow_ups_to_publish(monkeypatch):
    for module in ("django_dlock.celery", "django_dlock.celery.publishing"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "celery", None)
    with pytest.raises(CommandError, match=r"install django-dlock\[celery\]") as caught:
        run("publish_pending_followups")
    assert caught.value.returncode == 1


@pytest.mark.parametrize("days", [-1.0, float("nan"), float("inf")])
def test_purging_lock_events_refuses_wrong_usage(days):
    assert exit_code("purge_lock_events", older_than=days) == 2


def test_a_command_that_another_one_calls_escapes_for_the_output_of_that_one():
    hold("café")
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, "ascii", write_through=True)
    call_command("list_locks", stdout=OutputWrapper(OutputWrapper(ascii_only)))
    assert b"caf\\xe9 " in raw.getvalue()


# -- errors as JSON -----------------------------------------------------------------------


def shell(*arguments):
    """As ``manage.py`` runs a command, with its exit code."""
    from django.core.management import execute_from_command_line

    with pytest.raises(SystemExit) as ended:
        execute_from_command_line(["manage.py", *arguments])
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["clear_stale_locks", "--force"], "--force alone"),
        (["list_locks", "--older-than", "-1"], "--older-than is -1"),
        (["diagnose_locks", "--nothing"], "unrecognized arguments: --nothing"),
        (["switch_locks", "--using", "nowhere"], "There is no alias"),
        (["purge_lock_events", "--batch-size", "0"], "must be at least 1"),
        (["purge_idempotency_records", "--argument", "x"], "NAME=VALUE"),
        (["purge_fences", "--older-than", "-1"], "it must be 0 to"),
        (["publish_pending_followups", "--older-than", "-1"], "--older-than is -1"),
    ],
)
def test_wrong_usage_is_told_as_json(capsys, arguments, told):
    assert shell(*arguments, "--format", "json") == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    (error,) = found if isinstance(found, list) else [found]
    assert told in error["error"]
    assert isinstance(found, list) == (arguments[0] in {"list_locks", "clear_stale_locks"})
    assert told in err


@pytest.mark.django_db
@pytest.mark.parametrize(
    "command",
    ["purge_lock_events", "purge_idempotency_records", "purge_fences", "publish_pending_followups"],
)
def test_an_error_of_the_database_is_told_as_json(capsys, monkeypatch, command):
    def fails(*args, **options):
        raise DatabaseError("gone")

    monkeypatch.setattr("django.db.models.query.QuerySet._fetch_all", fails)
    assert shell(command, "--format", "json") == 1
    out, err = capsys.readouterr()
    assert "gone" in json.loads(out)["error"]
    assert "gone" in err


@pytest.mark.parametrize(
    ("raised", "told"), [(None, "Not everything was erased."), (DatabaseError("x"), "Stopped: x")]
)
def test_what_is_not_erased_is_told_as_json(capsys, monkeypatch, raised, told):
    def erase(*args, **options):
        done = Erasure()
        done.kept["records_in_progress"] += 1
        yield done
        if raised is not None:
            raise raised

    monkeypatch.setattr("django_dlock.management.erasing.erase", erase)
    assert shell("purge_idempotency_records", "--name", "x", "--format", "json") == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["error"] == told
    assert report["kept"]["records_in_progress"] == 1
    assert told in err


@pytest.mark.parametrize("command", ["list_locks", "diagnose_locks", "switch_locks"])
def test_wrong_settings_are_told_as_json(capsys, settings, command):
    settings.DLOCKS = []
    locks.reset()
    assert shell(command, "--format", "json") == 1
    found = json.loads(capsys.readouterr().out)
    (error,) = found if isinstance(found, list) else [found]
    assert error["error"].startswith("DLOCKS is []")
