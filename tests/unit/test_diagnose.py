"""``diagnose_locks`` with backends that fail in one way each."""

from __future__ import annotations

import io
import json
import threading
import time
from types import SimpleNamespace

import pytest
from django.core import checks as django_checks
from django.core.management import CommandError, call_command
from django.db import OperationalError

from django_dlock import checks, clock, locks
from django_dlock.backends.base import Fact
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendRefused, BackendUnavailable
from django_dlock.lease import Contention, Lease, RenewalResult
from django_dlock.management import diagnosis
from django_dlock.operators import findings

LOCAL = "django_dlock.backends.local.LocalBackend"


class Shared(LocalBackend):
    """As if other processes saw its leases."""

    is_shared = True


class Down(Shared):
    def locked(self, name, *, deadline):
        raise BackendUnavailable("nobody answers", "", self.alias)

    def store_problems(self):
        pytest.fail("it was asked again, which takes another timeout")


class Refuses(Shared):
    def locked(self, name, *, deadline):
        raise BackendRefused("wrong password", "", self.alias)


class Slow(Shared):
    def locked(self, name, *, deadline):
        time.sleep(0.08)
        return super().locked(name, deadline=deadline)


class GrantsTwice(Shared):
    def acquire(self, request, *, deadline):
        return Lease(request.name, request.owner, 1, request.ttl, clock.now())


class Forgets(Shared):
    def renew(self, renewals, *, process, deadline):
        return [RenewalResult("refused", 0.0) for _ in renewals]

    def release(self, name, owner, *, min_hold, deadline):
        super().release(name, owner, min_hold=min_hold, deadline=deadline)
        return "refused"


class DiesInBetween(Shared):
    cancelled: list[str] = []

    def renew(self, renewals, *, process, deadline):
        raise BackendUnavailable("gone", "", self.alias)

    def cancel_acquire(self, request, *, deadline):
        super().cancel_acquire(request, deadline=deadline)
        self.cancelled.append(request.owner)


class InThePast(Shared):
    def acquire(self, request, *, deadline):
        answer = super().acquire(request, deadline=deadline)
        if isinstance(answer, Contention):
            return answer._replace(now=answer.now - 3600)
        return answer


class Taken(Shared):
    def acquire(self, request, *, deadline):
        return Contention("another", "held", 30.0, time.time())


class Broken(Shared):
    def facts(self, *, deadline):
        raise ZeroDivisionError("of another package")


class Tells(Shared):
    def facts(self, *, deadline):
        return [Fact("server", "Store\x1b[2J 7"), Fact("memory", "full", "Empty it.")]


class Hangs(Shared):
    release_it = threading.Event()

    def facts(self, *, deadline):
        self.release_it.wait(30)
        return ()


@pytest.fixture(autouse=True)
def _no_projects_findings(monkeypatch):
    """Leave out findings about the project; tests of these findings put the checks back."""
    monkeypatch.setattr(checks, "check_project", lambda: iter(()))
    monkeypatch.setattr(checks, "check_tasks", list)
    monkeypatch.setattr(checks, "check_migrations", lambda databases: [])
    monkeypatch.setattr(checks, "check_records", lambda databases: [])


def path(backend):
    return backend if isinstance(backend, str) else f"{__name__}.{backend.__name__}"


@pytest.fixture
def aliases(settings):
    def configure(**backends):
        settings.DLOCKS = {
            alias: {
                "BACKEND": backend
                if isinstance(backend, str)
                else f"{__name__}.{backend.__name__}",
                "TTL": 2.0,
                "OPTIONS": {"command_timeout": 0.2},
            }
            for alias, backend in backends.items()
        }
        locks.reset()

    yield configure
    locks.reset()


def diagnose(**options):
    out = io.StringIO()
    code = 0
    try:
        call_command("diagnose_locks", stdout=out, **options)
    except CommandError as error:
        code = error.returncode
    return SimpleNamespace(out=out.getvalue(), code=code)


def found(**options):
    """Exit code, and the findings of the JSON output by alias and topic."""
    result = diagnose(format="json", **options)
    report = json.loads(result.out)
    by_topic = {(each["alias"], each["topic"]): each for each in report["findings"]}
    return result.code, by_topic


def test_a_store_without_a_fault_gives_no_warning_and_exit_code_0(aliases):
    aliases(one=Shared)
    code, by_topic = found(fail_level="WARNING")
    assert code == 0
    assert {finding["severity"] for finding in by_topic.values()} == {"ok"}
    assert list(by_topic) == [("one", "answer"), ("one", "cycle"), ("one", "clock")]
    assert by_topic["one", "answer"]["values"]["round_trips"] == findings.ROUND_TRIPS + 1
    assert abs(by_topic["one", "clock"]["values"]["ahead_seconds"]) < 1
    assert locks["one"].get(findings.NAME) is None


def test_the_text_names_each_alias_once_and_ends_with_the_counts(aliases):
    aliases(one=Shared, two=Tells)
    out = diagnose().out
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "one (Shared)",
        "two (Tells)",
        "0 errors, 1 warning.",
    ]
    assert "Empty it." in out
    assert "\x1b" not in out


def test_colours_are_for_terminals(aliases, monkeypatch):
    aliases(one=Shared)
    assert "\x1b[" in diagnose(force_color=True).out


@pytest.mark.parametrize(
    ("backend", "told", "hint"),
    [(Down, "nobody answers", "Start the server"), (Refuses, "wrong password", "user, password")],
)
def test_an_alias_that_does_not_answer_is_one_error_and_the_others_are_shown(
    aliases, backend, told, hint
):
    aliases(down=backend, up=Shared)
    code, by_topic = found()
    assert code == 1
    assert [topic for alias, topic in by_topic if alias == "down"] == ["answer"]
    assert by_topic["down", "answer"]["severity"] == "error"
    assert told in by_topic["down", "answer"]["message"]
    assert hint in by_topic["down", "answer"]["hint"]
    assert by_topic["up", "cycle"]["severity"] == "ok"


def test_one_alias_can_be_diagnosed_alone(aliases):
    aliases(down=Down, up=Shared)
    code, by_topic = found(using="up")
    assert code == 0
    assert {alias for alias, _ in by_topic} == {"up"}


def test_an_unknown_alias_is_wrong_usage(aliases):
    aliases(one=Shared)
    assert diagnose(using="two").code == 2


def test_wrong_settings_of_one_alias_are_an_error_with_the_id_of_the_check(aliases):
    aliases(wrong="no.such.Backend", up=Shared)
    code, by_topic = found()
    assert code == 1
    assert by_topic["wrong", "django_dlock.E008"]["severity"] == "error"
    assert by_topic["up", "answer"]["severity"] == "ok"


def test_read_only_takes_no_lock(aliases, monkeypatch):
    aliases(one=Shared)
    monkeypatch.setattr(Shared, "acquire", lambda *args, **kwargs: pytest.fail("it was called"))
    _, by_topic = found(read_only=True)
    assert list(by_topic) == [("one", "answer")]


def test_answers_that_take_a_third_of_the_timeout_are_a_warning(aliases):
    aliases(slow=Slow)
    code, by_topic = found(read_only=True)
    assert code == 0
    answer = by_topic["slow", "answer"]
    assert answer["severity"] == "warning"
    assert "command_timeout" in answer["hint"]
    # All of them together take no longer than about one timeout.
    assert answer["values"]["round_trips"] <= 3


def test_warnings_fail_only_if_asked_for(aliases):
    aliases(one=Tells)
    assert diagnose().code == 0
    assert diagnose(fail_level="WARNING").code == 1


def test_two_owners_of_one_name_are_an_error(aliases):
    aliases(one=GrantsTwice)
    result = diagnose()
    assert result.code == 1
    assert "the same name was granted to two owners" in result.out


def test_a_store_that_forgets_leases_is_an_error(aliases):
    aliases(one=Forgets)
    code, _ = found()
    out = diagnose().out
    assert code == 1
    assert "not renewed: refused" in out
    assert "not released: refused" in out


def test_a_lock_whose_renewal_is_not_answered_is_cancelled(aliases):
    DiesInBetween.cancelled.clear()
    aliases(one=DiesInBetween)
    code, by_topic = found()
    assert code == 1
    assert "gone" in by_topic["one", "cycle"]["message"]
    patience = time.monotonic() + 10
    while not DiesInBetween.cancelled and time.monotonic() < patience:
        time.sleep(0.01)
    assert locks["one"].get(findings.NAME) is None


def test_a_clock_that_differs_is_a_warning_that_says_by_how_much(aliases):
    aliases(one=InThePast)
    _, by_topic = found()
    told = by_topic["one", "clock"]
    assert told["severity"] == "warning"
    assert told["values"]["ahead_seconds"] == pytest.approx(-3600, abs=1)
    assert "3600" in told["message"]
    assert "behind" in told["message"]


def test_a_lock_that_another_diagnosis_has_is_no_error(aliases):
    aliases(one=Taken)
    code, by_topic = found()
    assert code == 0
    assert by_topic["one", "cycle"]["severity"] == "warning"


def test_an_unexpected_error_of_a_backend_hides_no_other_alias(aliases):
    aliases(one=Broken, two=Shared)
    code, by_topic = found()
    assert code == 1
    assert "ZeroDivisionError" in by_topic["one", "answer"]["message"]
    assert by_topic["one", "cycle"]["severity"] == "ok"
    assert by_topic["two", "answer"]["severity"] == "ok"


def test_a_backend_that_hangs_ends_with_a_limit(aliases):
    aliases(one=Hangs, two=Shared)
    try:
        code, by_topic = found()
    finally:
        Hangs.release_it.set()
    assert code == 1
    assert "no answer within 2 s" in by_topic["one", "answer"]["message"]
    assert by_topic["one", "cycle"]["severity"] == "ok"
    assert by_topic["two", "answer"]["severity"] == "ok"


def test_the_findings_of_the_deploy_checks_are_reported(aliases):
    aliases(one=LOCAL)
    code, by_topic = found()
    assert code == 0
    assert by_topic["one", "django_dlock.W002"]["severity"] == "warning"
    assert "W002" in diagnose().out


def test_a_silenced_check_is_not_reported(aliases, settings):
    settings.SILENCED_SYSTEM_CHECKS = ["django_dlock.W002"]
    aliases(one=LOCAL)
    assert ("one", "django_dlock.W002") not in found()[1]


def test_the_findings_of_tasks_and_of_the_project_are_reported(aliases, monkeypatch):
    aliases(one=Shared)
    said = [
        django_checks.Error("no", hint="do", id="django_dlock.E101"),
        django_checks.Info("by the way", id="django_dlock.I001"),
    ]
    monkeypatch.setattr(checks, "check_tasks", lambda: said)
    code, by_topic = found()
    assert code == 1
    assert by_topic["", "django_dlock.E101"]["severity"] == "error"
    assert by_topic["", "django_dlock.I001"]["severity"] == "ok"


@pytest.mark.parametrize("fault", ["down", "hangs"])
def test_a_database_that_does_not_answer_is_an_error(aliases, monkeypatch, fault):
    aliases(one=Shared)
    over = threading.Event()

    def ask(databases):
        if fault == "down":
            raise OperationalError("nobody there")
        over.wait(30)
        return []

    monkeypatch.setattr(checks, "check_migrations", ask)
    # The real one is longer than a unit test should take.
    monkeypatch.setattr(diagnosis, "DATABASE_LIMIT", 0.2)
    try:
        code, by_topic = found()
    finally:
        over.set()
    assert code == 1
    told = by_topic["", "database"]
    assert ("nobody there" if fault == "down" else "no answer within 0.2 s") in told["message"]
    assert "DATABASES['default']" in told["hint"]
    assert by_topic["one", "answer"]["severity"] == "ok"
