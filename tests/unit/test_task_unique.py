"""``unique_until``: what is published, what is dropped, and when tasks can be published again."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.worker.request import Request
from celery.worker.state import revoked as revoked_tasks
from django import db
from django.db import transaction
from kombu.exceptions import OperationalError

from django_dlock import BackendUnavailable, PayloadMismatch, clock, locks
from django_dlock.backends.local import LocalBackend
from django_dlock.celery.publishing import requeue
from django_dlock.celery.publishing.requeue import HEADER
from django_dlock.celery.publishing.reservation import BEYOND, UNCONFIRMED
from django_dlock.lease import LeaseInfo, LeaseRequest
from tests.support import deliveries
from tests.support.deliveries import effects, held, in_memory, recorded, states, waiting, work
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

UNTIL = pytest.mark.parametrize("until", ["start", "done"])


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def task(app: Celery, function: Any = None, until: str = "start", **options: Any) -> Any:
    return deliveries.task(app, function, unique_until=until, **options)


def reserved() -> list[LeaseInfo]:
    return locks["default"].list(prefix="unique:")


def left() -> float:
    """Seconds for which the only reservation still drops others."""
    (found,) = reserved()
    assert found.ttl is not None
    return found.ttl - BEYOND


def messages(app: Celery) -> list[Any]:
    """All messages in the queue, which is emptied."""
    return list(iter(lambda: waiting(app), None))


def unavailable(*args: Any, **options: Any) -> Any:
    raise BackendUnavailable("no answer", "it", "default")


# -- publishing ----------------------------------------------------------------------------


@UNTIL
def test_a_task_that_is_pending_is_not_published_again(app, until, caplog):
    made = task(app, until=until)
    with caplog.at_level(logging.INFO):
        sent = [made.delay(1) for _ in range(3)]
    assert {each.id for each in sent} == {sent[0].id}
    assert f"pending already, as {sent[0].id}" in caplog.text
    work(app)
    assert waiting(app) is None
    assert sent[2].get(timeout=1) == 1
    assert reserved() == []


def test_other_arguments_and_other_tasks_are_not_the_same(app):
    one, other = task(app), task(app)
    assert len({each.id for each in (one.delay(1), one.delay(2), other.delay(1))}) == 3
    assert len(messages(app)) == 3


def test_queue_priority_and_countdown_make_no_other_task(app):
    made = task(app)
    sent = made.delay(1)
    for options in ({"priority": 3}, {"queue": "other"}, {"countdown": 9}, {"task_id": "mine"}):
        assert made.apply_async((1,), **options).id == sent.id
    assert made.s(1).apply_async().id == made.signature(kwargs={"order": 1}).delay().id == sent.id


def test_the_idempotency_key_is_enough(app):
    made = recorded(app, unique_until="done")
    assert made.delay(1).id == made.delay(1).id
    work(app)
    assert states() == ["succeeded"]
    assert reserved() == []


def test_g13_tasks_that_share_a_lock_have_separate_records_and_reservations(app):
    made = recorded(app, lock_key="account", unique_until="done")
    assert made.delay(1).id == made.delay(1).id != made.delay(2).id
    for _ in range(2):
        work(app)
    assert effects() == 2


def test_g14_another_payload_is_published_and_refused_and_not_dropped(app):
    made = recorded(app, unique_until="done", if_contended="wait")
    made.delay(1, "one")
    other = made.delay(1, "other")
    for _ in range(2):
        work(app)
    with pytest.raises(PayloadMismatch):
        other.get(timeout=1)


def test_the_name_of_a_reservation_does_not_tell_the_payload(app):
    """Whoever sees held locks could guess it."""
    made = recorded(app, unique_until="done")
    made.delay(4711)
    unkeyed = made.dlock_options.record.payload((4711,), {})
    assert [unkeyed in info.name for info in reserved()] == [False]


def test_the_reservation_is_not_the_lock(app):
    made = task(app, until="done")
    with held("order:1"):
        made.delay(1)
        assert [info.name for info in reserved()] == [f"unique:{made.name}:order:1"]
        assert [info.kind for info in reserved()] == ["reserved"]


def test_a_long_name_ends_in_a_digest(app):
    made = task(app, lock_key="{order}")
    made.name = "t" * 100
    app.tasks[made.name] = made
    first, second = made.delay("x" * 199 + "1"), made.delay("x" * 199 + "2")
    assert first.id != second.id
    assert {len(info.name) for info in reserved()} == {255}


def test_g13_task_and_key_are_kept_apart(app):
    one, other = task(app, lock_key="{order}"), task(app, lock_key="{order}")
    other.name = f"{one.name}:a"
    app.tasks[other.name] = other
    assert one.delay("a:1").id != other.delay("1").id
    assert len(messages(app)) == 2


def test_a_listing_shows_reservations(app):
    made = task(app)
    sent = made.delay(1)
    (info,) = reserved()
    assert info.metadata == {"task_name": made.name, "task_id": sent.id}
    assert info.holder_state == "unknown"


def test_eager_mode_reserves_nothing(app):
    app.conf.task_always_eager = True
    made = task(app)
    assert [made.delay(1).get(), made.delay(1).get()] == [1, 1]
    assert effects() == 2
    assert reserved() == []


def test_the_result_of_a_dropped_task_is_ignored_if_its_results_are(app):
    made = task(app, ignore_result=True)
    assert [made.delay(1).ignored, made.delay(1).ignored] == [True, True]


def test_a_call_without_a_valid_key_is_refused_at_once(app):
    made = task(app)
    with pytest.raises(TypeError, match="order"):
        made.delay(None)
    assert waiting(app) is None


# -- how long ------------------------------------------------------------------------------


def test_a_reservation_lasts_an_hour_by_default(app):
    task(app).delay(1)
    assert 3590 < left() <= 3601
    locks.reset()
    task(app, unique_ttl=dt.timedelta(seconds=50)).delay(1)
    assert 45 < left() <= 50.1


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"countdown": 500}, 600),
        ({"eta": dt.timedelta(seconds=500)}, 600),
        ({"countdown": -5}, 100),
        ({"expires": 40}, 40),
        ({"expires": dt.timedelta(seconds=40), "countdown": 10}, 40),
        ({"expires": "iso", "countdown": 10}, 40),
        ({"expires": 1000}, 100),
    ],
)
def test_a_countdown_is_added_and_an_expiry_ends_it(app, options, seconds):
    def moment(value: Any) -> Any:
        if value == "iso":
            return (app.now() + dt.timedelta(seconds=40)).isoformat()
        return app.now() + value if isinstance(value, dt.timedelta) else value

    given = {option: moment(value) for option, value in options.items()}
    task(app, unique_ttl=100).apply_async((1,), **given)
    assert seconds - 4 < left() <= seconds + 0.1


def test_an_expiry_of_the_task_counts_too(app):
    task(app, expires=70).delay(1)
    assert 65 < left() <= 70.1


def test_a_task_that_expires_at_once_reserves_nothing(app):
    made = task(app)
    made.apply_async((1,), expires=-1)
    assert reserved() == []
    made.delay(1)
    assert len(reserved()) == 1


def test_an_expired_reservation_drops_nothing(app):
    made = task(app, unique_ttl=0.05)
    sent = made.delay(1)
    eventually(lambda: made.delay(1).id != sent.id)


@UNTIL
@pytest.mark.parametrize("left_of_it", [BEYOND - 1, UNCONFIRMED - 1, 1])
def test_the_reservation_after_an_expired_one_drops_others_at_once(app, until, left_of_it):
    """Also while the expired reservation is still remembered."""
    made = task(app, until=until)
    first = made.delay(1)
    (known,) = reserved()
    locks["default"]._entries[known.name].until = clock.now() + left_of_it
    ids = {made.delay(1).id for _ in range(10)}
    assert len(ids) == 1
    assert first.id not in ids
    assert len(messages(app)) == 2


# -- publishing in case of doubt ---------------------------------------------------------


def reserve(made: Any, *, ttl: float = UNCONFIRMED, kind: Any = "reserved", owner: str = "n:id"):
    """As another publisher would that has not got any further."""
    name = f"unique:{made.name}:order:1"
    locks["default"].acquire(LeaseRequest(name, owner, ttl, kind), deadline=float("inf"))


def test_g13_an_unconfirmed_reservation_drops_nothing(app):
    made = task(app)
    reserve(made)
    sent = made.delay(1)
    assert sent.id != "id"
    assert work(app).headers.get(HEADER) is None
    assert sent.state == "SUCCESS"
    # It does not touch the other one's reservation.
    assert len(reserved()) == 1


@pytest.mark.parametrize("strange", [{"kind": "held"}, {"owner": "nobody"}, {"owner": "n:"}])
def test_g13_a_lease_that_is_no_reservation_drops_nothing(app, strange):
    made = task(app)
    reserve(made, ttl=1000, **strange)
    made.delay(1)
    assert len(messages(app)) == 1


def test_g13_a_publisher_that_is_slower_than_the_worker_confirms_nothing(app, monkeypatch):
    made = task(app)
    renew = LocalBackend.renew

    def late(self: LocalBackend, *args: Any, **options: Any) -> Any:
        if reserved():
            work(app)
        return renew(self, *args, **options)

    monkeypatch.setattr(LocalBackend, "renew", late)
    assert made.delay(1).state == "SUCCESS"
    assert reserved() == []
    assert made.delay(1).state == "SUCCESS"
    assert effects() == 2


def test_g13_a_publisher_that_was_paused_confirms_nothing(app, monkeypatch, caplog):
    """Its own reservation has expired, and another task has reserved the name."""
    made = task(app)
    renew = LocalBackend.renew

    here = threading.current_thread()

    def late(self: LocalBackend, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is not here:
            # The call of the watchdog.
            return renew(self, *args, **options)
        monkeypatch.setattr(LocalBackend, "renew", renew)
        (mine,) = reserved()
        self.break_(mine.name, owner=mine.owner)
        other.append(made.delay(1))
        return renew(self, *args, **options)

    other: list[Any] = []
    monkeypatch.setattr(LocalBackend, "renew", late)
    assert made.delay(1).id != other[0].id
    assert len(messages(app)) == 2
    assert made.delay(1).id == other[0].id
    assert "could not be confirmed" in caplog.text


def test_g13_while_the_backend_is_unreachable_tasks_are_published(app, monkeypatch, caplog):
    made = task(app)
    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "acquire", unavailable)
        first, second = made.delay(1), made.delay(1)
    assert first.id != second.id
    assert "without a reservation" in caplog.text
    assert len(messages(app)) == 2


def test_g13_without_an_answer_to_the_confirmation_a_task_is_published(app, monkeypatch, caplog):
    made = task(app)
    monkeypatch.setattr(LocalBackend, "renew", unavailable)
    first, second = made.delay(1), made.delay(1)
    assert first.id != second.id
    assert "may not be confirmed" in caplog.text
    assert len(messages(app)) == 2


def test_g13_a_failed_publish_leaves_nothing_behind(app, monkeypatch):
    made = task(app)

    def fail(*args: Any, **options: Any) -> Any:
        raise OperationalError("the broker is away")

    with monkeypatch.context() as patched:
        patched.setattr(app, "send_task", fail)
        with pytest.raises(OperationalError, match="broker is away"):
            made.delay(1)
    assert reserved() == []
    made.delay(1)
    assert len(messages(app)) == 1


@UNTIL
def test_g13_a_reservation_inside_a_transaction_must_not_drop_later_tasks(app, until):
    """The pending task may begin before the commit."""
    made = task(app, until=until)
    made.delay(1)
    with transaction.atomic():
        made.delay(1)
    assert len(messages(app)) == (2 if until == "start" else 1)


def test_g13_a_reservation_inside_a_manual_transaction_must_not_drop_later_tasks(app):
    made = task(app)
    made.delay(1)
    transaction.set_autocommit(False)
    try:
        made.delay(1)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert len(messages(app)) == 2


def test_on_commit_reserves_at_the_commit_and_never_at_a_rollback(app):
    made = task(app)
    with transaction.atomic():
        made.delay_on_commit(1)
        made.delay_on_commit(1)
        assert reserved() == []
    assert len(reserved()) == 1
    assert len(messages(app)) == 1
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        made.apply_async_on_commit((2,))
        raise ZeroDivisionError
    assert [info.name[-1] for info in reserved()] == ["1"]
    assert waiting(app) is None


# -- release of reservations ---------------------------------------------------------------------


def test_with_start_the_reservation_ends_before_the_body_begins(app):
    seen = []

    def body(self, order):
        seen.append((reserved(), locks["default"].get("order:1") is not None))
        if len(seen) == 1:
            made.apply_async((order,), task_id="next")

    made = task(app, body)
    made.delay(1)
    work(app)
    work(app)
    assert seen == [([], True), ([], True)]
    assert waiting(app) is None


def test_with_done_the_reservation_lasts_until_the_end(app):

    def body(self, order):
        elsewhere(lambda: follower.append(made.delay(order).id))

    made, follower = task(app, body, "done"), []
    sent = made.delay(1)
    work(app)
    assert follower == [sent.id]
    assert messages(app) == reserved() == []


def elsewhere(function: Callable[[], object]) -> None:
    """Call it as code outside of any task does."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_g13_the_body_does_not_begin_while_others_may_be_dropped(app, monkeypatch):
    """Otherwise nobody would see what their publishers wrote."""
    made = task(app)
    sent = made.delay(1)
    release = LocalBackend.release

    def refuse(self: LocalBackend, name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("unique:"):
            unavailable()
        return release(self, name, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "release", refuse)
        work(app)
    assert (sent.state, effects()) == ("RETRY", 0)
    # It is still pending.
    assert made.delay(1).id == sent.id
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)
    assert reserved() == []


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_the_reservation_of_a_task_that_will_not_run_is_released_in_the_background(
    app, monkeypatch, policy
):
    made = task(app, if_unavailable=policy)
    made.delay(1)
    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "acquire", unavailable)
        patched.setattr(LocalBackend, "release", unavailable)
        work(app)
    eventually(lambda: reserved() == [])


@UNTIL
def test_g13_the_reservation_is_kept_while_its_message_is_requeued(app, until):
    made = task(app, until=until)
    with held("order:1"):
        sent = made.delay(1)
        for _ in range(2):
            work(app)
            assert made.delay(1).id == sent.id
    work(app)
    assert effects() == 1
    assert messages(app) == reserved() == []


def test_a_message_that_cannot_be_requeued_keeps_its_reservation_only_if_returned(app, monkeypatch):
    def fail(*args: Any, **options: Any) -> Any:
        raise OperationalError("the broker is away")

    monkeypatch.setattr(requeue, "REJECT_PAUSE", 0.0)
    made, early = task(app), task(app, acks_late=False)
    with held("order:1"):
        for each, kept in ((made, 1), (early, 0)):
            each.delay(1)
            with monkeypatch.context() as patched:
                patched.setattr(app, "send_task", fail)
                work(app)
            assert len(reserved()) == kept
            locks.reset()


def raises(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


ENDS = {
    "return": (lambda: None, 0),
    "raise": (lambda: 1 / 0, 0),
    "ignore": (raises(Ignore()), 0),
    "reject": (raises(Reject("no")), 0),
    "requeue": (raises(Reject("no", requeue=True)), 1),
    "retry without a message": (raises(Retry()), 0),
    "soft limit": (raises(SoftTimeLimitExceeded()), 0),
    "stop": (raises(SystemExit()), 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_with_done_the_reservation_is_released_only_at_the_outcome(app, end):
    act, kept = ENDS[end]

    def body(self, order):
        assert len(reserved()) == 1
        act()

    task(app, body, "done").delay(1)
    with contextlib.suppress(SystemExit):
        work(app)
    assert len(reserved()) == kept


@pytest.mark.parametrize("end", ["requeue", "stop"])
def test_g13_a_message_that_was_acknowledged_early_does_not_come_again(app, end):
    def body(self, order):
        ENDS[end][0]()

    task(app, body, "done", acks_late=False).delay(1)
    with contextlib.suppress(SystemExit):
        work(app)
    assert reserved() == []


def test_with_done_the_reservation_is_released_after_the_lock(app, monkeypatch):
    """A duplicate published next finds the lock free and the effects committed."""
    seen = []
    release = LocalBackend.release

    def watched(self: LocalBackend, name: str, *args: Any, **options: Any) -> Any:
        seen.append((name[:6], states()))
        return release(self, name, *args, **options)

    recorded(app, unique_until="done").delay(1)
    monkeypatch.setattr(LocalBackend, "release", watched)
    work(app)
    assert seen == [("order:", ["succeeded"]), ("unique", ["succeeded"])]


@UNTIL
@pytest.mark.parametrize("policy", ["skip", "fail", "requeue"])
def test_a_task_that_does_not_get_its_lock_in_time_releases_its_reservation(app, until, policy):
    made = task(app, until=until, if_contended=policy, contention_timeout=0)
    with held("order:1"):
        sent = made.delay(1)
        work(app)
        while sent.state == "RETRY":
            work(app)
    assert sent.state == ("SUCCESS" if policy == "skip" else "FAILURE")
    assert reserved() == []


@UNTIL
def test_a_duplicate_of_the_record_releases_its_reservation(app, until):
    made = recorded(app, unique_until=until)
    for _ in range(2):
        made.delay(1)
        work(app)
        assert reserved() == []
    assert effects() == 1


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_task_that_is_revoked_or_expires_releases_its_reservation(app, how):
    made = task(app)
    sent = made.apply_async((1,), expires=60)
    message = waiting(app)
    if how == "expired":
        message.headers["expires"] = "2000-01-01T00:00:00+00:00"
    else:
        revoked_tasks.add(sent.id)
    assert Request(message, app=app, task=made, on_ack=lambda *_: None).revoked()
    eventually(lambda: reserved() == [])


def test_a_task_without_the_option_releases_reservations_in_its_old_messages(app):
    made = task(app)
    made.delay(1)
    del made.dlock_options
    type(made).unique_until = None
    work(app)
    assert reserved() == []


# -- the task itself -----------------------------------------------------------------------


@pytest.mark.parametrize("parks", [False, True])
def test_a_retry_is_not_dropped_by_its_own_reservation(app, parks):
    def body(self, order):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return order

    made = task(app, body, "done", lock_across_retries=parks)
    sent = made.delay(1)
    for _ in range(2):
        work(app)
        assert made.delay(1).id == sent.id
        assert sent.state == "RETRY"
    work(app)
    assert sent.state == "SUCCESS"
    assert messages(app) == reserved() == []


def test_a_retry_after_start_reserves_nothing(app):
    def body(self, order):
        if not self.request.retries:
            raise self.retry(countdown=0)

    made = task(app, body)
    made.delay(1)
    work(app)
    assert reserved() == []
    assert work(app).headers["retries"] == 1
    assert waiting(app) is None


def test_exhausted_retries_release_the_reservation(app):
    def body(self, order):
        raise self.retry(countdown=0, max_retries=1)

    sent = task(app, body, "done").delay(1)
    work(app), work(app)
    assert sent.state == "FAILURE"
    assert messages(app) == reserved() == []


def test_a_retry_with_other_arguments_releases_the_reservation_of_the_first_ones(app):
    def body(self, order):
        if not self.request.retries:
            raise self.retry((2,), countdown=0)

    made = task(app, body, "done")
    made.delay(1)
    work(app)
    assert reserved() == []
    assert made.delay(1).id != made.delay(2).id
    assert len(messages(app)) == 3


def test_g13_a_retry_whose_key_asks_a_database_that_is_away_returns_the_message(app, monkeypatch):
    away: list[bool] = []

    def key(order):
        if away:
            raise db.OperationalError("the connection is closed")
        return str(order)

    def body(self, order):
        away.append(True)
        raise self.retry(countdown=0)

    made = task(app, body, "done", lock_key=key)
    monkeypatch.setattr(requeue, "REJECT_PAUSE", 0)
    made.delay(1)
    message = waiting(app)
    outcome = Request(message, app=app, task=made, on_reject=lambda *_: None).execute()
    assert isinstance(outcome.exception.exc, Reject)
    assert outcome.exception.exc.requeue


def test_a_task_can_publish_a_replacement_of_itself(app):
    def body(self, order, note=""):
        if not note:
            raise self.replace(self.s(order, note="second"))
        return note

    sent = task(app, body, "done").delay(1)
    work(app), work(app)
    assert sent.get(timeout=1) == "second"
    assert messages(app) == reserved() == []


def test_a_body_may_publish_its_successor(app):
    def body(self, order):
        if self.request.id == sent.id:
            successor.append(self.delay(order).id)

    successor: list[str] = []
    made = task(app, body, "done")
    sent = made.delay(1)
    work(app)
    assert work(app).headers["id"] == successor[0] != sent.id


def test_a_message_of_the_same_id_is_published_again(app):
    """By a tool that republishes messages that a broker has lost."""
    made = task(app)
    sent = made.delay(1)
    assert made.apply_async((1,), task_id=sent.id).id == sent.id
    assert len(messages(app)) == 2


def test_a_published_task_knows_the_task_that_published_it(app):
    made = task(app)
    pending = made.delay(1)

    def parent(self, order):
        made.delay(1)

    sent = task(app, parent).delay(2)
    waiting(app), work(app)
    assert [child.id for child in sent.children] == [pending.id]


def test_headers_of_the_caller_are_kept_and_those_of_another_delivery_are_not(app):
    made = task(app)
    reserve(made)
    foreign = {"mine": "kept", HEADER: {"count": 1, "since": None, "reserved": "n:other"}}
    made.apply_async((1,), headers=foreign)
    message = waiting(app)
    assert message.headers["mine"] == "kept"
    assert HEADER not in message.headers


# -- a canvas ------------------------------------------------------------------------------


@UNTIL
@pytest.mark.parametrize(
    "make",
    [
        lambda made, other: chain(made.si(1), other.si(2)),
        lambda made, other: chain(other.si(2), made.si(1)),
        lambda made, other: group(made.si(1), made.si(1)),
        lambda made, other: chord([other.si(2)], made.si(1)),
        lambda made, other: other.si(2).set(link=made.si(1)),
        lambda made, other: other.si(9).set(link_error=made.si(1)),
        lambda made, other: made.si(1).set(link=other.si(2)),
        lambda made, other: made.si(1).set(link_error=other.si(2)),
    ],
    ids=["first", "last", "group", "body", "link", "errback", "linked", "with an errback"],
)
def test_in_a_canvas_every_message_is_published(app, until, make):
    made, ran = task(app, until=until, function=ran_by), []

    @app.task(shared=False, name=f"other-{until}")
    def other(order):
        if order == 9:
            raise ZeroDivisionError

    reserve(made, ttl=1000)
    before = made.delay(1)
    assert before.id == "id"
    make(made, other).apply_async()
    while (message := waiting(app)) is not None:
        ran.append(message.headers["task"])
        Request(message, app=app, task=app.tasks[ran[-1]], on_ack=lambda *_: None).execute()
    assert made.name in ran
    assert len(ran) >= 1


def ran_by(self, order):
    return order
