"""Tasks of several tenants on workers that know no tenant: the message tells whose they are."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, current_app, group
from django.core.management import call_command
from django.test import override_settings
from kombu.exceptions import OperationalError

from django_dlock import Lock, locks, tenancy
from django_dlock.celery.publishing import follow_ups, rerun
from django_dlock.celery.publishing.header import HEADER
from django_dlock.celery.worker.lock_recovery import Recovery, Suspect
from django_dlock.models import FollowUp, IdempotencyRecord
from django_dlock.process import identity_of
from testproject.shop.models import Effect
from tests.support.deliveries import effects, in_memory, recorded, states, task, waiting, work
from tests.support.tenants import active, scoped

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app, scoped():
        yield app


@pytest.fixture
def current(app: Celery) -> Iterator[None]:
    """Makes the app the current one of the process, where commands find it."""
    before = current_app._get_current_object()
    app.set_current()
    yield
    before.set_current()


def scope_of(message: Any) -> str:
    return message.headers.get(HEADER, {}).get("scope", "")


def records() -> list[tuple[str, str]]:
    found = IdempotencyRecord.objects.order_by("scope", "key")
    return list(found.values_list("scope", "lock_name"))


def names_in_body(app: Celery, **options: Any) -> tuple[Any, list[str]]:
    """A task that notes the name under which its body would lock ``x``."""
    seen: list[str] = []

    def body(self, order):
        seen.append(Lock("x").name)
        return order

    return task(app, body, **options), seen


# -- locks and records -----------------------------------------------------------------------


def test_g12_work_of_one_tenant_is_no_duplicate_of_anothers(app):
    made = recorded(app)
    for who in ("a", "b", ""):
        with active(who):
            made.delay(1)
            made.delay(1)
    for _ in range(6):
        work(app)
    assert effects() == 3
    assert records() == [
        (f"[a]{made.name}", "[a]order:1"),
        (f"[b]{made.name}", "[b]order:1"),
        (made.name, "order:1"),
    ]


def test_g1_a_body_meets_the_locks_of_its_tenant_only(app):
    met: list[bool] = []

    def body(self, order):
        met.append(Lock("order:1").locked())
        met.append(self.current_run.lock.name == Lock("order:1").name == "[a]order:1")

    made, others = task(app, body, if_contended="skip"), Lock("order:1")
    with active("a"):
        made.delay(1)
    with active("b"):
        others.acquire()
    work(app)
    others.release()
    assert met == [True, True]


def test_a_tenant_that_the_worker_has_active_counts_more_than_the_message(app):
    made, seen = names_in_body(app)
    with active("a"):
        made.delay(1)
    with active("b"):
        work(app)
    assert seen == ["[b]x"]


def test_the_scope_ends_with_the_task(app):
    made, seen = names_in_body(app)
    with active("a"):
        made.delay(1)
    made.delay(1)
    work(app)
    assert tenancy.current() == ""
    work(app)
    assert seen == ["[a]x", "x"]


def test_current_run_tells_the_full_scope_for_other_services(app):
    seen: list[str] = []

    def body(self, order):
        seen.append(f"{self.current_run.scope}/{self.current_run.key}")

    made = recorded(app, body)
    for who in ("a", "b"):
        with active(who):
            made.delay(1)
        work(app)
    assert seen == [f"[a]{made.name}/1", f"[b]{made.name}/1"]


def test_an_eager_task_belongs_to_its_caller(app):
    made, seen = names_in_body(app)
    with active("a"):
        made.apply((1,))
    with tenancy.of_message("b"):
        made.apply((1,))
    assert seen == ["[a]x", "[b]x"]


def test_a_record_is_forgotten_for_the_active_tenant(app):
    made = recorded(app)
    for who in ("a", "b"):
        with active(who):
            made.delay(1)
        work(app)
    forget = IdempotencyRecord.objects.forget
    assert not forget(made.name, "1")
    with active("a"):
        assert IdempotencyRecord.objects.for_key(made.name, "1").get().scope == f"[a]{made.name}"
        assert forget(made.name, "1")
        assert forget(f"[b]{made.name}", "1")
    assert records() == []


# -- messages --------------------------------------------------------------------------------


def test_a_requeued_copy_keeps_the_scope(app):
    made, seen = names_in_body(app)
    with active("a"):
        made.apply_async((1,), headers={"schema": "a"})
        with Lock("order:1"), active(""):
            work(app)
    message = work(app)
    assert (scope_of(message), message.headers["schema"]) == ("a", "a")
    assert message.headers[HEADER]["count"] == 1
    assert seen == ["[a]x"]


@pytest.mark.parametrize("made_by", [task, recorded])
def test_a_retry_keeps_the_scope(app, made_by):
    seen: list[str] = []

    def body(self, order):
        seen.append(self.current_run.lock.name)
        if not self.request.retries:
            raise self.retry(countdown=0)

    with active("a"):
        made_by(app, body).delay(1)
    work(app)
    assert scope_of(work(app)) == "a"
    assert seen == ["[a]order:1"] * 2


def test_a_retry_takes_over_its_parked_lease(app):
    def body(self, order):
        if not self.request.retries:
            raise self.retry(countdown=0)

    made = task(app, body, lock_across_retries=True)
    with active("a"):
        made.delay(1)
    work(app)
    assert [(info.name, info.kind) for info in locks["default"].list()] == [
        ("[a]order:1", "parked")
    ]
    work(app)
    assert locks["default"].list() == []


def test_what_follows_a_task_has_its_scope(app):
    made, seen = names_in_body(app)

    @app.task(name="plain", shared=False)
    def plain(order):
        return order

    with active("a"):
        chain(plain.s(1), made.s(), plain.s(), made.s()).apply_async(link=made.si(2))
        group(made.s(3), made.s(4)).apply_async()
    scopes = [scope_of(work(app)) for _ in range(7)]
    assert waiting(app) is None
    assert set(scopes) == {"a"}
    assert len(seen) == 5
    assert set(seen) == {"[a]x"}


def test_the_body_of_a_chord_has_the_scope_of_its_members(app):
    made, seen = names_in_body(app)
    with active("a"):
        chord([made.s(1), made.s(2)], made.si(3)).apply_async()
    assert [scope_of(work(app)) for _ in range(3)] == ["a"] * 3
    assert seen == ["[a]x"] * 3


@pytest.mark.parametrize("many", ["map", "starmap", "chunks"])
def test_items_have_the_scope_of_their_message(app, many):
    made, seen = names_in_body(app)
    with active("a"):
        if many == "map":
            made.map([1, 2]).apply_async()
        elif many == "starmap":
            made.starmap([(1,), (2,)]).apply_async()
        else:
            made.chunks([(1,), (2,)], 2).apply_async()
    work(app)
    assert seen == ["[a]x"] * 2


def test_what_a_body_publishes_has_its_scope(app):
    made, seen = names_in_body(app)

    def body(self, order):
        made.delay(order)
        app.send_task(made.name, (order,))
        with active("b"):
            made.delay(order)

    with active("a"):
        task(app, body).delay(1)
    for _ in range(4):
        work(app)
    assert seen == ["[a]x", "[a]x", "[b]x"]


def test_without_the_setting_a_message_has_no_header(app):
    made, _ = names_in_body(app)
    made.delay(1)
    assert HEADER not in work(app).headers


def test_g1_a_worker_without_the_setting_knows_no_scope_in_its_first_message_either(app):
    seen: list[list[str]] = []

    def body(self, order):
        seen.append([info.name for info in locks["default"].list()])

    made = task(app, body)
    with active("a"):
        made.delay(1)
        made.delay(1)
    with override_settings(DLOCK_SCOPE=None):
        assert scope_of(work(app)) == "a"
        work(app)
    assert seen == [["order:1"]] * 2


@pytest.mark.parametrize("forged", ["a]b", "x" * 101, 1, "a\nb"])
def test_a_forged_scope_makes_the_header_count_as_none(app, caplog, forged):
    made, seen = names_in_body(app)
    app.send_task(made.name, (1,), headers={HEADER: {"scope": forged}})
    work(app)
    assert seen == ["x"]
    assert "scope is" in caplog.text


def test_an_error_of_the_function_publishes_nothing(app):
    made, _ = names_in_body(app)
    with active(LookupError("no tenant")), pytest.raises(LookupError):
        made.delay(1)
    assert waiting(app) is None


def test_the_lease_of_a_dead_delivery_is_found_by_the_scope_of_its_message(app, monkeypatch):
    made, _ = names_in_body(app)
    broken: list[str] = []
    monkeypatch.setattr(Recovery, "_break", lambda self, name: broken.append(name))
    monkeypatch.setattr("django_dlock.celery.worker.lock_recovery._dies", lambda process: True)
    found = Suspect(made, "id", made.dlock_options.lock_key, (1,), {}, "owner", identity_of(1), "a")
    recovery = Recovery(found)
    recovery.start()
    recovery.go()
    assert recovery.wait(10)
    assert broken == ["[a]order:1"]


# -- unique_until ----------------------------------------------------------------------------


def test_a_pending_task_of_one_tenant_drops_no_other_tenants(app):
    made = task(app, unique_until="done")
    sent = {}
    for who in ("a", "b", ""):
        with active(who):
            sent[who] = made.delay(1)
            assert made.delay(1).id == sent[who].id
    assert len({result.id for result in sent.values()}) == 3
    for _ in range(3):
        work(app)
    assert waiting(app) is None
    assert locks["default"].list() == []


# -- later, by somebody else -----------------------------------------------------------------


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize("clicks", ["", "b"])
@pytest.mark.parametrize("unique", [None, "done"])
def test_run_again_keeps_scope_and_headers_of_the_message(app, clicks, unique):
    def fails(self, order):
        Effect.objects.create(order_number=order, by="fails")
        raise ValueError

    made = recorded(app, fails, atomic=False, unique_until=unique)
    with active("a"):
        made.apply_async((1,), headers={"schema": "a", "x-death": [{"count": 1}]})
    first = work(app)
    with active(clicks):
        row = rerun.forget_and_write(IdempotencyRecord.objects.get())
        assert row is not None
        assert rerun.publish(row)
    again = work(app)
    assert (scope_of(again), again.headers["schema"]) == ("a", "a")
    assert "x-death" in first.headers
    assert "x-death" not in again.headers
    assert again.headers[HEADER].get("count", 0) == 0
    assert records() == [(f"[a]{made.name}", "[a]order:1")]
    assert effects() == 2


@pytest.mark.parametrize("options", [{"store_arguments": False}, {}])
def test_headers_are_stored_with_the_arguments_or_not_at_all(app, options):
    made = recorded(app, **options)
    with active("a"):
        made.apply_async((1,), headers={"schema": "secret"})
    work(app)
    message = IdempotencyRecord.objects.get().message
    assert (
        message is None
        if options
        else json.loads(message)["options"]["headers"]
        == {
            "schema": "secret",
            HEADER: {"scope": "a"},
        }
    )


def test_headers_that_are_too_long_leave_nothing_to_run_again(app):
    made = recorded(app)
    made.apply_async((1,), headers={"schema": "x" * rerun.MAX_MESSAGE})
    work(app)
    assert states() == ["succeeded"]
    assert IdempotencyRecord.objects.get().message is None


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize("publisher", ["", "b"])
@pytest.mark.parametrize("kind", ["send", "replace", "canvas"])
def test_late_follow_ups_keep_scope_and_headers_of_their_run(app, monkeypatch, publisher, kind):
    made, seen = names_in_body(app)

    def body(self, order):
        if kind == "send":
            self.current_run.send(made.s(order).set(headers={"own": "1", HEADER: {"count": 9}}))
        else:
            raise self.replace(made.s(order) if kind == "replace" else made.s(1) | made.s())

    with monkeypatch.context() as patched:

        def refuse(self: Any) -> None:
            raise follow_ups.Unpublished("the broker is away")

        patched.setattr(follow_ups.FollowUps, "publish", refuse)
        with active("a"):
            recorded(app, body).apply_async((1,), headers={"schema": "a"})
        work(app)
    # The worker's own message comes again; it is lost here.
    assert waiting(app) is not None
    with active(publisher):
        call_command("publish_pending_followups", older_than=0.0, stdout=io.StringIO())
    message = work(app)
    assert (scope_of(message), message.headers["schema"]) == ("a", "a")
    if kind == "send":
        assert message.headers["own"] == "1"
        assert message.headers[HEADER].get("count", 0) == 0
    if kind == "canvas":
        assert scope_of(work(app)) == "a"
    assert set(seen) == {"[a]x"}
    assert not FollowUp.objects.filter(published_at=None).exists()


@pytest.mark.usefixtures("current")
def test_late_follow_ups_of_no_tenant_get_none(app, monkeypatch):
    made, seen = names_in_body(app)

    def body(self, order):
        self.current_run.send(made.s(order))

    def refuse(*args: Any, **options: Any) -> Any:
        raise OperationalError("the broker is away")

    with monkeypatch.context() as patched:
        patched.setattr(follow_ups, "confirming", refuse)
        recorded(app, body).delay(1)
        work(app)
    assert waiting(app) is not None
    with active("b"):
        call_command("publish_pending_followups", older_than=0.0, stdout=io.StringIO())
    work(app)
    assert seen == ["x"]
