"""What tasks with private arguments leave in records, logs and messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from django.core import serializers

from django_dlock import keys, locks
from django_dlock.celery.publishing import rerun
from django_dlock.models import FollowUp, IdempotencyRecord
from tests.support.deliveries import in_memory, recorded, task, work

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "4111-1111"
HIDDEN = {"argsrepr": "('***',)", "kwargsrepr": "{'note': '***'}"}


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        app.set_current()
        yield app
    locks.reset()


def fail(card: str) -> None:
    raise ValueError(f"{card} was declined")


class Gone(BaseException):
    """Not an ``Exception``, so the message is requeued."""


def raises(self: Any, order: int, card: str) -> None:
    fail(card)


def retries(self: Any, order: int, card: str) -> None:
    try:
        fail(card)
    except ValueError as error:
        self.retry(exc=error, countdown=0)


def goes(self: Any, order: int, card: str) -> None:
    raise Gone(f"{card} is gone")


def everything_kept() -> str:
    """All rows about records, as text."""
    rows = (*IdempotencyRecord.objects.all(), *FollowUp.objects.all())
    return serializers.serialize("json", rows)


@pytest.mark.parametrize(
    ("body", "kind", "function"),
    [
        (raises, "ValueError(…)", "fail"),
        (retries, "Retry(ValueError(…))", "retries"),
        (goes, "BodyInterrupted('The body ended with Gone(…) at ", ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_error_of_private_arguments_keeps_type_and_place(app, caplog, body, kind, function):
    made = recorded(app, body, store_arguments=False, max_attempts=3)
    with caplog.at_level(logging.DEBUG, "django_dlock"):
        sent = made.delay(1, SECRET)
        work(app)
    error = IdempotencyRecord.objects.get().error
    assert error.startswith(kind)
    if function:
        assert "test_task_privacy.py:" in error
        assert error.endswith(f" in {function}")
    assert SECRET not in everything_kept()
    ours = [line for line in caplog.records if line.name == "django_dlock"]
    assert SECRET not in "\n".join(map(logging.Formatter().format, ours))
    if body is goes:
        # Celery itself stores the errors of other bodies; this one is ours.
        assert SECRET not in repr(app.backend.get_task_meta(sent.id))


def test_the_last_of_too_many_deaths_of_a_private_task_is_not_quoted(app):
    made = recorded(app, goes, store_arguments=False, max_attempts=1)
    sent = made.delay(1, SECRET)
    work(app)
    assert IdempotencyRecord.objects.get().state == "failed"
    assert SECRET not in everything_kept()
    assert SECRET not in repr(app.backend.get_task_meta(sent.id))


def test_a_task_without_a_record_does_not_quote_private_arguments_either(app, caplog):
    made = task(app, goes, max_attempts=1, store_arguments=False)
    sent = made.delay(1, SECRET)
    with caplog.at_level(logging.DEBUG, "django_dlock"):
        work(app)
    assert SECRET not in repr(app.backend.get_task_meta(sent.id))
    ours = [line for line in caplog.records if line.name == "django_dlock"]
    assert SECRET not in "\n".join(map(logging.Formatter().format, ours))


def test_an_error_after_the_commit_of_private_arguments_is_logged_without_its_text(
    app, caplog, monkeypatch
):
    from django.db import transaction

    def body(self: Any, order: int, card: str) -> None:
        transaction.on_commit(lambda: fail(card))

    recorded(app, body, store_arguments=False).delay(1, SECRET)
    work(app)
    lines = [line for line in caplog.records if line.name == "django_dlock"]
    assert any("recorded as succeeded" in line.getMessage() for line in lines)
    text = "\n".join(map(logging.Formatter().format, lines))
    assert SECRET not in text
    assert "ValueError(…) at " in text


def test_a_key_that_raises_before_a_retry_is_not_quoted(app, caplog):
    calls = []

    def key(order: int, card: str) -> str:
        calls.append(order)
        if len(calls) > 1:
            fail(card)
        return "order:1"

    def body(self: Any, order: int, card: str) -> None:
        self.retry(args=(2, card), countdown=0)

    task(app, body, lock_key=key, lock_across_retries=True, store_arguments=False).delay(1, SECRET)
    work(app)
    lines = [line for line in caplog.records if line.name == "django_dlock"]
    text = "\n".join(map(logging.Formatter().format, lines))
    assert "the lock is not kept for the retry: ValueError(…) at " in text
    assert SECRET not in text


def test_the_text_of_an_error_is_kept_if_arguments_are(app):
    recorded(app, raises).delay(1, SECRET)
    work(app)
    assert IdempotencyRecord.objects.get().error == f"ValueError('{SECRET} was declined')"


# -- the words of the publisher ------------------------------------------------------------


def sent_with(app: Celery, made: Any, **options: Any) -> Any:
    made.apply_async((1,), {"note": SECRET}, **options)
    return work(app)


def test_a_rerun_shows_arguments_as_the_publisher_did(app):
    made = recorded(app)
    sent_with(app, made, **HIDDEN)
    record = IdempotencyRecord.objects.get()
    follow_up = rerun.forget_and_write(record)
    assert rerun.publish(follow_up)
    message = work(app)
    assert message.payload[:2] == [[1], {"note": SECRET}]
    assert {name: message.headers[name] for name in HIDDEN} == HIDDEN


def test_only_words_that_the_publisher_has_chosen_are_stored(app):
    made = recorded(app, None)
    sent_with(app, made)
    assert "repr" not in (IdempotencyRecord.objects.get().message or "repr")


def test_a_retry_shows_arguments_as_the_publisher_did(app):
    def body(self: Any, order: int, note: str = "") -> None:
        if not self.request.retries:
            self.retry(countdown=0)

    made = recorded(app, body)
    sent_with(app, made, **HIDDEN)
    message = work(app)
    assert message.headers["retries"] == 1
    assert {name: message.headers[name] for name in HIDDEN} == HIDDEN


def test_a_follow_up_shows_arguments_as_the_publisher_did(app):
    def note(text: str) -> None: ...

    mail = app.task(name="mail", shared=False)(note)

    def body(self: Any, order: int) -> None:
        self.current_run.send(mail.signature((SECRET,), argsrepr="('***',)"))

    recorded(app, body).delay(1)
    work(app)
    assert work(app).headers["argsrepr"] == "('***',)"


# -- errors about keys ---------------------------------------------------------------------


class Card:
    """Has no stable form."""

    def __repr__(self) -> str:
        return f"<Card {SECRET}>"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("card:{card}", Card()),
        ("card:{card}", 4111.1111),
        ("card:{card:d}", SECRET),
        ("card:{card[0]}", Card()),
        (["card"], Card()),
        (["card"], {"nested": [Card()]}),
        (keys.ALL_ARGUMENTS, Card()),
    ],
)
def test_an_error_about_a_key_names_the_argument_and_not_its_value(key, value):
    import inspect

    made = keys.compile_key(
        key, inspect.signature(lambda card: None), what="lock_key of task shop.charge"
    )
    with pytest.raises(TypeError) as caught:
        made([value], {})
    texts = []
    error: BaseException | None = caught.value
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    assert "card" in texts[0]
    assert not any(SECRET in text or "4111" in text for text in texts)
