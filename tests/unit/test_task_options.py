"""Options of ``LockedTask``: what is refused when a task is registered."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
from decimal import Decimal

import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from celery.exceptions import NotRegistered
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from django.utils.functional import SimpleLazyObject

from django_dlock import LockedTask
from django_dlock.backends.local import LocalBackend

numbers = itertools.count()


@pytest.fixture
def app() -> Celery:
    return Celery("options", broker="memory://", set_as_current=False)


def body(order_id, full=False):
    return order_id


def task(app: Celery, function=body, **options):
    options = {"name": f"t{next(numbers)}", "shared": False, "base": LockedTask, **options}
    return app.task(**options)(function)


def key(made: LockedTask, *args, **kwargs) -> str:
    return made.dlock_options.lock_key(args, kwargs)


class Plain(LocalBackend):
    """Can only grant, renew and release."""

    capabilities = frozenset()


@pytest.mark.parametrize(
    ("options", "capability"),
    [
        ({"lock_min_hold": 5}, "min_hold"),
        ({"lock_across_retries": True}, "parking"),
        ({"unique_until": "done"}, "reservations"),
    ],
)
def test_an_option_that_the_alias_does_not_support_is_refused(app, options, capability):
    (option,) = options
    with override_settings(DLOCKS={"plain": {"BACKEND": f"{__name__}.Plain"}}):
        made = task(app, lock_using="plain", **options)
        with pytest.raises(ImproperlyConfigured, match=f"{option} .*'{capability}'.*'plain'"):
            made.name  # noqa: B018
        assert task(app, lock_using="plain").name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock_key": "o:{order}"}, "order_id"),
        ({"lock_key": ["order"]}, "order_id"),
        ({"lock_key": 7}, "lock_key"),
        ({"idempotency_key": "{order}"}, "order_id"),
        ({"idempotency_key": "{order_id}", "idempotency_payload": ["x"]}, "idempotency_payload"),
        ({"idempotency_key": "{order_id}", "idempotency_payload": "full"}, "list"),
        ({"if_contended": "retry"}, "'requeue', 'wait', 'skip' or 'fail'"),
        ({"if_unavailable": "ignore"}, "'local'"),
        ({"if_lost": "die"}, "'abort' or 'finish'"),
        ({"if_duplicate": "x"}, "'return'"),
        ({"lock_ttl": "30"}, "lock_ttl"),
        ({"lock_ttl": 0.05}, "lock_ttl"),
        ({"lock_using": "elsewhere"}, "DLOCKS does not define; it defines 'default'"),
        ({"lock_max_hold": -1}, "lock_max_hold"),
        ({"atomic": 1, "idempotency_key": "{order_id}"}, "True or False"),
        ({"atomic": True}, "idempotency_key"),
        ({"idempotency_scope": "s"}, "idempotency_key"),
        ({"idempotency_key": "{order_id}", "idempotency_ttl": 0}, "idempotency_ttl"),
        ({"idempotency_key": "{order_id}", "idempotency_using": "x"}, "DATABASES"),
        ({"idempotency_key": "{order_id}", "max_attempts": 0}, "max_attempts"),
        ({"idempotency_key": "{order_id}", "lock_key": None}, "no exclusion"),
        ({"idempotency_key": "{order_id}", "acks_late": False}, "acks_late"),
        (
            {"idempotency_key": "{order_id}", "reject_on_worker_lost": False},
            "reject_on_worker_lost",
        ),
        ({"lock_key": None, "lock_ttl": 30}, "no exclusion"),
        ({"lock_across_retries": True, "lock_key": None}, "no exclusion"),
        ({"unique_until": "end"}, "'start' or 'done'"),
        ({"unique_until": True}, "'start' or 'done'"),
        ({"unique_until": "done", "unique_ttl": 0}, "more than 0 and at most"),
        ({"unique_until": "done", "unique_ttl": "1h"}, "timedelta"),
        ({"unique_until": "done", "lock_key": None}, "no exclusion"),
        ({"unique_ttl": 60}, "needs unique_until='start' or 'done'"),
        ({"lock_tll": 30}, "did you mean 'lock_ttl'"),
        ({"lockkey": "{order_id}"}, "did you mean 'lock_key'"),
        ({"lcok_key": "{order_id}"}, "did you mean 'lock_key'"),
        ({"idempotent_key": "{order_id}"}, "did you mean 'idempotency_key'"),
        ({"idempotent_key": body}, "did you mean 'idempotency_key'"),
        ({"idempotency": "{order_id}"}, "use idempotency_key"),
        ({"idempotent": True}, "use idempotency_key"),
        ({"idempotent": "{order_id}"}, "use idempotency_key"),
        ({"lock": "order:{order_id}"}, "use lock_key"),
        ({"lock": True}, "use lock_key"),
        ({"atomik": True}, "did you mean 'atomic'"),
        ({"max_attempt": 3}, "did you mean 'max_attempts'"),
        ({"store_argument": False}, "did you mean 'store_arguments'"),
        ({"store_results": False}, "did you mean 'store_result'"),
        ({"contention_timout": 60}, "did you mean 'contention_timeout'"),
        ({"ttl": 30}, "use lock_ttl"),
        ({"wait": 5}, "use lock_wait"),
        ({"max_hold": 60}, "use lock_max_hold"),
        ({"min_hold": 60}, "use lock_min_hold"),
        ({"renew": False}, "always renewed"),
        ({"reentrant": True}, "takes no such option"),
        ({"hold_until": "commit"}, "until its transaction has ended"),
        ({"on_lost": body}, "use if_lost"),
        ({"lock_on_lost": body}, "use if_lost"),
        ({"lock_ttl": 1}, r"at least 3 times .* alias 'default', 3 s: raise lock_ttl, or lower"),
    ],
)
def test_a_wrong_option_is_refused_by_name(app, options, message):
    made = task(app, **options)
    with pytest.raises(ImproperlyConfigured, match=message) as caught:
        made.name  # noqa: B018 - a proxy: this is when Celery makes the task
    assert any(option in str(caught.value) for option in options)


@pytest.mark.parametrize(
    "attribute",
    [
        *("queue_name", "model", "store", "key", "retries", "results", "unit", "metadata"),
        *("ttl_seconds", "max_items", "max_attempts_total", "atomic_group", "using"),
        *("connection_timeout", "connect_timeout", "block_key", "lookup_key", "stock_key"),
        *("automatic", "idempotent", "is_lost", "_atomik", "retry_kwargs", "retry_backoff_max"),
        *("compression", "mandatory", "immediate"),
    ],
)
def test_an_attribute_of_the_users_own_is_accepted(app, attribute):
    assert task(app, **{attribute: 7}).name

    class Base(LockedTask):
        abstract = True

    setattr(Base, attribute, 7)
    assert task(app, base=Base).name


def test_the_attributes_of_a_base_class_are_checked_too(app):
    class Base(LockedTask):
        abstract = True
        atomik = True

    with pytest.raises(ImproperlyConfigured, match=r"atomik of task 't\d+'.*'atomic'"):
        task(app, base=Base).name  # noqa: B018


def test_a_class_may_have_attributes_named_like_options_of_lock(app):
    class Base(LockedTask):
        abstract = True
        ttl, wait = 60, 5

    assert task(app, base=Base).name


ONCE = {"graceful": True, "keys": ["order_id"], "timeout": 60}


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("once", ONCE, "unique_until='done'.*lock_key.*unique_ttl"),
        ("unlock_before_run", True, "unique_until='start'"),
        ("unique_on", ["order_id"], "unique_until='done' and lock_key"),
        ("lock_expiry", 60, "unique_ttl"),
        ("raise_on_duplicate", True, "compare its id"),
        ("unique_key", body, "lock_key"),
        ("significant_kwargs", ["order_id"], "lock_key"),
        ("lock_name", "order", "lock_key"),
        ("lock_timeout", 60, "lock_ttl"),
    ],
)
def test_an_option_left_over_from_another_package_is_refused(app, option, value, instead):
    with pytest.raises(ImproperlyConfigured, match=rf"{option} of task 't\d+'.*{instead}"):
        task(app, **{option: value}).name  # noqa: B018
    if callable(value):
        # In the body of a class it is a method.
        return

    class Base(LockedTask):
        abstract = True

    setattr(Base, option, value)
    with pytest.raises(ImproperlyConfigured, match=instead):
        task(app, base=Base).name  # noqa: B018


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("unique", True, "unique_until='done'"),
        ("key", "{order_id}", "lock_key, or idempotency_key"),
        ("key", ["order_id"], "lock_key, or idempotency_key"),
        ("keys", ["order_id"], "lock_key"),
        ("timeout", 60, "lock_wait.*unique_ttl.*time_limit"),
        ("blocking_timeout", 60, "if_contended='wait'"),
    ],
)
def test_a_common_name_is_refused_only_if_the_decorator_has_it(app, option, value, instead):
    with pytest.raises(ImproperlyConfigured, match=instead):
        task(app, **{option: value}).name  # noqa: B018

    class Base(LockedTask):
        abstract = True

    setattr(Base, option, value)
    assert task(app, base=Base).name


def test_a_lazy_attribute_is_not_evaluated_at_registration(app):
    class Base(LockedTask):
        abstract = True
        client = SimpleLazyObject(lambda: pytest.fail("evaluated"))

    assert task(app, base=Base).name


def test_methods_of_a_class_may_have_any_name(app):
    class Import(LockedTask):
        name = "import"

        def run(self):
            return None

        def on_lost(self):
            return None

        @property
        def store_results(self):
            return None

        @classmethod
        def wait(cls):
            return None

    assert app.register_task(Import()).name == "import"


def test_a_short_ttl_is_accepted_if_the_alias_can_renew_it(app):
    quick = {"BACKEND": "django_dlock.backends.local.LocalBackend", "TTL": 30}
    with override_settings(DLOCKS={"default": {**quick, "OPTIONS": {"command_timeout": 0.3}}}):
        assert task(app, lock_ttl=1).name


def test_a_callable_key_that_does_not_take_the_arguments_is_named(app):
    made = task(app, name="shop.keyless", lock_key=lambda: "x")
    with pytest.raises(TypeError, match=r"lock_key of task 'shop\.keyless': .*lambda.*1 was given"):
        key(made, 5)


def test_a_type_error_inside_a_callable_key_stays_as_it_is(app):
    with pytest.raises(TypeError, match=r"^can only concatenate"):
        key(task(app, lock_key=lambda order_id: "x" + order_id), 5)


def test_the_name_of_the_task_is_in_the_message(app):
    with pytest.raises(ImproperlyConfigured, match=r"shop\.charge"):
        task(app, name="shop.charge", lock_key="{x}", lazy=False)


def test_a_bound_task_knows_its_own_arguments_only(app):
    def bound(self, order_id):
        return order_id

    made = task(app, bound, bind=True, lock_key="o:{order_id}")
    assert key(made, 5) == "o:5"
    with pytest.raises(ImproperlyConfigured, match="self"):
        task(app, bound, bind=True, lock_key="o:{self}").name  # noqa: B018


def test_a_class_based_task_is_read_in_the_same_way(app):
    class Import(LockedTask):
        name = "import"
        lock_key = "import:{account_id}"

        def run(self, account_id, since=None):
            return account_id

    assert key(app.register_task(Import()), account_id=3) == "import:3"


def test_a_class_based_task_without_a_name_has_its_own_key(app):
    class Import(LockedTask):
        def run(self, account_id):
            return account_id

    assert "Import" in key(app.register_task(Import()), 1)


def test_a_class_based_task_with_a_wrong_option_is_refused(app):
    class Import(LockedTask):
        name = "import"
        lock_key = "import:{acount_id}"

        def run(self, account_id):
            return account_id

    with pytest.raises(ImproperlyConfigured, match="account_id"):
        app.register_task(Import())


def test_a_task_that_was_never_registered_cannot_be_sent(app):
    class Import(LockedTask):
        name = "never registered"
        lock_key = "x"

        def run(self):
            return None

    for send in (Import().delay, Import().apply_async):
        with pytest.raises(NotRegistered, match="register_task"):
            send()


def test_the_default_key_is_per_task_and_typed(app):
    one, other = task(app), task(app)
    assert key(one, 1) == key(one, order_id=1) == key(one, 1, full=False)
    assert len({key(one, 1), key(one, "1"), key(one, 2), key(one, 1, True), key(other, 1)}) == 5


def test_each_way_to_write_an_amount_is_another_key_and_another_payload(app):
    amounts = (Decimal("10.0"), Decimal("10.00"), 10.0, 10, "10.00")
    assert len({key(task(app, name="pay"), amount) for amount in amounts}) == 5
    payload = task(app, idempotency_key="pay").dlock_options.record.payload
    assert len({payload((amount,), {}) for amount in amounts}) == 5


@pytest.mark.parametrize("value", [(1, 2), {"a": (1,)}, dt.date(2024, 2, 29), {1: "int key"}])
def test_the_key_at_enqueue_equals_the_key_at_the_worker(app, value):
    """The worker gets the value that the serializer made of the argument."""
    from kombu import serialization

    made = task(app)
    content_type, encoding, data = serialization.dumps(value, "json")
    received = serialization.loads(data, content_type, encoding, accept=[content_type])
    assert key(made, value) == key(made, received)


def test_the_idempotency_key_is_also_the_key_of_the_lock(app):
    assert key(task(app, idempotency_key="{order_id}"), 42) == "42"
    own = task(app, idempotency_key="{order_id}", lock_key="order:{order_id}")
    assert key(own, 42) == "order:42"


def test_a_scope_survives_a_renamed_task(app):
    made = task(app, idempotency_key=["order_id"], idempotency_scope="charge")
    again = task(app, idempotency_key=["order_id"], idempotency_scope="charge")
    assert made.dlock_options.record.key((1,), {}) == again.dlock_options.record.key((1,), {})


def test_a_task_without_a_lock_is_possible(app):
    assert task(app, lock_key=None).dlock_options.lock_key is None


def test_the_payload_may_be_some_arguments_or_none(app):
    def fingerprint(**options):
        made = task(app, idempotency_key="{order_id}", **options)
        payload = made.dlock_options.record.payload
        return payload((1,), {"full": True}), payload((1,), {"full": False})

    assert len(set(fingerprint())) == 2
    assert len(set(fingerprint(idempotency_payload=["order_id"]))) == 1
    assert set(fingerprint(idempotency_payload=[])) == {""}


# -- the body -----------------------------------------------------------------------------------


async def awaited(order_id):
    return order_id


def yielding(order_id):
    yield order_id


async def both(order_id):
    yield order_id


@pytest.mark.parametrize(
    ("function", "cure"),
    [
        (awaited, "async_to_sync"),
        (both, "async_to_sync"),
        (yielding, "return a list"),
    ],
)
def test_a_body_that_celery_would_not_run_is_refused(app, function, cure):
    for options in ({}, {"autoretry_for": (OSError,)}):
        made = task(app, function, **options)
        with pytest.raises(ImproperlyConfigured, match=cure):
            made.name  # noqa: B018


def test_a_class_whose_body_celery_would_not_run_is_refused(app):
    class Import(LockedTask):
        name = "import"

        async def run(self, order_id):
            return order_id

    with pytest.raises(ImproperlyConfigured, match=r"'import' is an async def.*async_to_sync"):
        app.register_task(Import())


def test_a_body_that_waits_for_a_coroutine_is_accepted(app):
    @functools.wraps(awaited)
    def waits(order_id):
        return async_to_sync(awaited)(order_id)

    assert task(app, waits).name


# -- system checks -------------------------------------------------------------------------
