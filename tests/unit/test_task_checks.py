"""``manage.py check`` for tasks: pairs of settings that conflict."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from django.core.checks import CheckMessage

from django_dlock import LockedTask
from django_dlock.celery.checks import check_tasks

RECORDED = {"idempotency_key": "{order}"}


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app that is current, as it is in a project."""
    from celery import current_app

    before = current_app._get_current_object()
    made = Celery("checked", broker="redis://127.0.0.1:1/0")
    made.conf.worker_prefetch_multiplier = 1
    made.set_current()
    yield made
    before.set_current()


def body(self, order: int) -> None:
    """Never called."""


def warned(app: Celery, **options: object) -> list[str]:
    """The numbers of the warnings about one task."""
    return [warning.id.removeprefix("django_dlock.") for warning in messages(app, **options)]


def messages(app: Celery, **options: object) -> list[CheckMessage]:
    """The warnings about one task."""
    app.tasks.pop("tests.checked", None)
    options = {"base": LockedTask, "bind": True, "lock_key": "order:{order}", **options}
    app.task(name="tests.checked", lazy=False, **options)(body)
    return check_tasks()


@pytest.mark.parametrize(
    "options",
    [
        {},
        RECORDED,
        {"if_contended": "skip", "lock_min_hold": 5},
        {"if_contended": "wait", "lock_wait": 30},
        # It does not wait.
        {"lock_wait": 120},
    ],
)
def test_a_correct_task_gives_no_warning(app, options):
    assert warned(app, time_limit=60, **options) == []


@pytest.mark.parametrize(
    ("number", "options"),
    [
        ("W101", {"acks_late": False}),
        ("W101", {"reject_on_worker_lost": False}),
        ("W102", {"acks_on_failure_or_timeout": False}),
        ("W103", {"time_limit": 7200, "contention_timeout": 7200}),
        ("W103", {"soft_time_limit": 7200, "contention_timeout": 7200}),
        ("W105", {"default_retry_delay": 3600}),
        ("W105", {"autoretry_for": (OSError,), "retry_kwargs": {"countdown": 4000}}),
        (
            "W105",
            {"autoretry_for": (OSError,), "retry_backoff": 1, "retry_backoff_max": 4000},
        ),
        ("W106", {**RECORDED, "idempotency_ttl": 7200, "contention_timeout": 7200}),
        ("W107", {"time_limit": 60, "lock_max_hold": 30}),
        ("W108", {"time_limit": 60, "contention_timeout": 59}),
        ("W109", {"time_limit": 1801}),
        ("W111", {"lock_min_hold": 5}),
        ("W112", {"contention_timeout": 30}),
        ("W116", {"contention_timeout": 3600}),
        ("W112", {"contention_timeout": 40, "lock_ttl": 40}),
        ("W113", {"unique_until": "start", "if_contended": "skip"}),
        ("W113", {"unique_until": "start", "if_contended": "fail"}),
        ("W114", {"unique_until": "done", "unique_ttl": 60, "time_limit": 60}),
        ("W119", {"if_contended": "wait", "lock_wait": 60, "soft_time_limit": 60}),
        ("W119", {"if_contended": "wait", "lock_wait": 30, "soft_time_limit": 9, "time_limit": 60}),
        ("W119", {"if_contended": "wait", "lock_wait": None, "time_limit": 60}),
        # The alias waits for ten seconds.
        ("W119", {"if_contended": "wait", "time_limit": 10}),
    ],
)
def test_a_conflicting_pair_is_named(app, number, options):
    assert warned(app, **options) == [number]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"default_retry_delay": 3600}, "lower default_retry_delay"),
        ({"retry_kwargs": {"countdown": 4000}}, "lower retry_kwargs['countdown']"),
        (
            {"autoretry_for": (OSError,), "retry_backoff": 1, "retry_backoff_max": 4000},
            "lower retry_backoff_max",
        ),
    ],
)
def test_the_hint_names_the_option_that_delays_a_retry(app, options, named):
    [found] = messages(app, **options)
    assert named in found.hint


def test_a_short_contention_timeout_is_told_of_the_visibility_timeout_only_if_it_is_else_right(app):
    """It is far below the visibility timeout in all three."""
    assert warned(app, time_limit=60, contention_timeout=29) == ["W108", "W112"]
    assert warned(app, time_limit=60, contention_timeout=59) == ["W108"]
    assert warned(app, contention_timeout=60) == ["W116"]


def test_g14_retention_shorter_than_the_visibility_timeout_is_a_warning(app):
    options = {**RECORDED, "contention_timeout": 60}
    assert warned(app, idempotency_ttl=3600, **options) == ["W104", "W116"]
    assert warned(app, idempotency_ttl=3601, **options) == ["W116"]


def test_records_that_expire_before_the_retry_are_named(app):
    app.conf.broker_url = "amqp://"
    options = {**RECORDED, "idempotency_ttl": 100, "contention_timeout": 60}
    assert warned(app, **options) == ["W115"]
    assert warned(app, default_retry_delay=60, **options) == []


def test_the_visibility_timeout_is_the_brokers_own(app):
    app.conf.broker_transport_options = {"visibility_timeout": 10000}
    assert warned(app, time_limit=3000, default_retry_delay=3600) == []
    assert warned(app, time_limit=10000, contention_timeout=20000) == ["W103"]


def test_messages_that_wait_behind_a_long_task_are_counted(app):
    app.conf.worker_prefetch_multiplier = 4
    assert warned(app, time_limit=720) == []
    assert warned(app, time_limit=721) == ["W109"]


def test_the_visibility_timeout_is_half_as_long_on_sqs(app):
    app.conf.broker_url = "sqs://"
    assert warned(app, time_limit=1800) == ["W103"]


@pytest.mark.parametrize("url", [["amqp://one", "amqp://two"], "pyamqp://one;pyamqp://two"])
@pytest.mark.parametrize("setting", ["broker_url", "broker_read_url"])
def test_the_broker_is_the_one_that_workers_read_from(app, setting, url):
    app.conf[setting] = url
    assert warned(app, time_limit=1800) == ["W110"]


def test_rabbitmq_has_a_consumer_timeout_instead(app):
    app.conf.broker_url = "amqp://"
    assert warned(app, time_limit=1799) == []
    assert warned(app, time_limit=1800) == ["W110"]
    assert warned(app, default_retry_delay=1800) == ["W110"]


@pytest.mark.parametrize("url", ["filesystem://", "sqla+sqlite:///broker.sqlite3"])
def test_g13_a_broker_that_loses_delivered_messages_is_named_once(app, url):
    if url.startswith("sqla"):
        pytest.importorskip("sqlalchemy")
    app.conf.broker_url = url
    more = {"base": LockedTask, "bind": True, "lazy": False, "shared": False, **RECORDED}
    app.task(name="tests.other", **more)(body)
    # Tasks imported by other tests may have a record, too.
    assert warned(app, time_limit=60, **RECORDED) == ["W117"]


@pytest.mark.parametrize("url", ["redis://", "amqp://", "sqs://", "memory://", "unheard-of://"])
def test_brokers_that_keep_unacknowledged_messages_give_no_warning(app, url):
    app.conf.broker_url = url
    assert warned(app, time_limit=60, **RECORDED) == []


def test_another_broker_has_neither_timeout(app):
    app.conf.broker_url = "memory://"
    assert warned(app, time_limit=3600, default_retry_delay=7200) == []


def test_the_lock_options_of_a_task_without_exclusion_are_not_checked(app):
    assert warned(app, lock_key=None, time_limit=60, contention_timeout=1) == []


def test_a_warning_names_the_task_both_settings_and_the_solution(app):
    assert warned(app, time_limit=60, lock_max_hold=30) == ["W107"]
    (warning,) = check_tasks()
    assert warning.obj == "tests.checked"
    assert "60 s" in warning.msg
    assert "lock_max_hold ends its lock after 30 s" in warning.msg
    assert "Raise lock_max_hold" in warning.hint
