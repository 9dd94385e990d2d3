"""A delivery runs its body once, under its lock, whatever wraps the task's ``__call__``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject

from django_dlock import Lock, LockedTask, LockNotAcquired
from django_dlock.celery.checks import check_tasks
from django_dlock.models import IdempotencyRecord
from tests.support.deliveries import held, in_memory, recorded, states, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)

HOOKS = ("before_start", "on_success", "on_failure", "on_retry", "after_return")


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


class Retries(LockedTask):
    """Tries the task again after any error, as a base class for flaky services does."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            try:
                return super().__call__(*args, **kwargs)
            except Exception:  # noqa: PERF203 - this is what such classes do
                continue
        return super().__call__(*args, **kwargs)


class CallsTwice(LockedTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [super().__call__(*args, **kwargs), super().__call__(*args, **kwargs)]


class RunsInAContext(LockedTask):
    """As the base class in the documentation of a framework."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def counted(ends: Exception | None = None) -> tuple[Any, list[int]]:
    """A body that notes whether its lock was held, and the list of its notes."""
    ran: list[int] = []

    def body(self: Any, order: int) -> int:
        run = self.current_run
        ran.append(0 if run is None or run.lock is None else 1)
        if ends is not None:
            raise ends
        return order

    return body, ran


@pytest.mark.parametrize("make", [task, recorded])
@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("no"), "FAILURE"), (Ignore(), "PENDING"), (Reject("no"), "REJECTED")],
)
def test_g12_a_second_call_by_a_wrapper_ends_as_the_first_one(app, make, error, state, caplog):
    body, ran = counted(error)
    sent = make(app, body, base=Retries).delay(1)
    work(app)
    assert ran == [1]
    assert sent.state == state or (state == "REJECTED" and sent.state in ("PENDING", "FAILURE"))
    if state == "FAILURE":
        assert str(sent.result) == "no"
    told = [line for line in caplog.messages if "a second time" in line]
    assert len(told) == 1
    assert "Retries.__call__" in told[0]
    assert sent.id in told[0]


def test_g12_an_eager_task_whose_wrapper_tries_again_runs_once(app):
    body, ran = counted(ValueError("no"))
    made = recorded(app, body, base=Retries)
    done = made.apply((1,))
    assert (ran, states(), str(done.result)) == ([1], ["failed"], "no")
    # The next delivery is another one.
    made.apply((1,))
    assert ran == [1, 1]


def test_a_wrapper_may_ask_for_a_retry_after_the_run(app):
    ran: list[int] = []

    class Again(LockedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValueError as error:
                raise self.retry(exc=error, countdown=0) from error

    def body(self: Any, order: int) -> int:
        ran.append(self.request.retries)
        if len(ran) == 1:
            raise ValueError("not yet")
        return order

    sent = recorded(app, body, base=Again).delay(1)
    work(app, redelivered=True)
    assert (sent.state, states()) == ("RETRY", ["failed"])
    work(app)
    assert (ran, sent.result, states()) == ([0, 1], 1, ["succeeded"])


def test_g12_a_second_call_after_a_success_has_its_result(app):
    body, ran = counted()
    sent = recorded(app, body, base=CallsTwice).delay(1)
    work(app)
    assert (ran, sent.result, states()) == ([1], [1, 1], ["succeeded"])


def test_g13_a_wrapper_that_tries_again_leaves_a_requeued_message_requeued(app):
    body, ran = counted()
    sent = task(app, body, base=Retries).delay(1)
    with held("order:1"):
        work(app)
    assert (ran, sent.state) == ([], "RETRY")
    assert waiting(app) is not None
    assert waiting(app) is None


def test_a_wrapper_that_tries_again_leaves_one_retry(app):
    def body(self: Any, order: int) -> int:
        if not self.request.retries:
            raise self.retry(countdown=0)
        return order

    sent = recorded(app, body, base=Retries).delay(1)
    work(app)
    assert (sent.state, states()) == ("RETRY", ["waiting"])
    work(app)
    assert (sent.result, waiting(app)) == (1, None)


def test_a_body_may_call_its_own_task(app):
    depths: list[int] = []

    def body(self: Any, order: int, depth: int = 3) -> int:
        depths.append(depth)
        assert self.current_run is not None
        return self(order, depth=depth - 1) + 1 if depth else 0

    sent = recorded(app, body, base=Retries).delay(1)
    work(app)
    assert (depths, sent.result) == ([3, 2, 1, 0], 3)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("make", [task, recorded])
def test_g12_a_wrapper_that_calls_the_body_itself_is_refused(app, make, eager):
    body, ran = counted()
    made = make(app, body, base=RunsInAContext)
    if eager:
        sent = made.apply((1,))
    else:
        sent = made.delay(1)
        work(app)
    assert (ran, states(), sent.state) == ([], [], "FAILURE")
    assert "RunsInAContext.__call__ calls self.run()" in str(sent.result)
    # Whoever calls it, or its body, directly wants no lock.
    assert (made(1), made.run(1), ran) == (1, 1, [0, 0])


def test_a_body_that_takes_no_self_is_refused_and_keeps_its_signature(app):
    ran: list[int] = []

    def body(order: int) -> None:
        ran.append(order)

    made = task(app, body, base=RunsInAContext, bind=False)
    sent = made.delay(order=1)
    work(app)
    assert (ran, sent.state) == ([], "FAILURE")
    assert made.dlock_options.lock_key((1,), {}) == "order:1"


def test_a_body_that_is_retried_automatically_is_refused(app):
    body, ran = counted()
    sent = task(app, body, base=RunsInAContext, autoretry_for=(OSError,)).delay(1)
    work(app)
    assert (ran, sent.state) == ([], "FAILURE")


def test_a_wrapper_that_runs_the_body_after_an_error_is_refused(app):
    class FallsBack(LockedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValueError:
                return self.run(*args, **kwargs)

    body, ran = counted(ValueError("no"))
    sent = task(app, body, base=FallsBack).delay(1)
    work(app)
    assert (ran, sent.state) == ([1], "FAILURE")


@pytest.mark.parametrize("pydantic", [False, True])
def test_an_item_that_a_wrapper_tries_again_always_has_its_lock(app, pydantic):
    """Each call for an item is a delivery of its own; there is no message to tell them apart."""
    body, ran = counted(ValueError("no"))
    made = task(app, body, base=Retries, pydantic=pydantic)
    assert made.map([1]).apply().state == "FAILURE"
    assert ran == [1, 1, 1]
    assert made.request.called_directly


def test_g12_an_item_whose_wrapper_calls_the_body_itself_is_refused(app):
    body, ran = counted()
    done = task(app, body, base=RunsInAContext).map([1]).apply()
    assert (ran, done.state) == ([], "FAILURE")
    assert "calls self.run()" in str(done.result)


def test_a_wrapper_that_instruments_the_call_changes_nothing(app, monkeypatch):
    """As Sentry and New Relic do: they replace the method of the class."""
    seen: list[str] = []
    original = LockedTask.__call__

    @functools.wraps(original)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.name)
        return original(self, *args, **kwargs)

    body, ran = counted()
    made = recorded(app, body)
    monkeypatch.setattr(type(made), "__call__", traced, raising=False)
    monkeypatch.setattr(made, "__trace__", build_tracer(made.name, made, app=app), raising=False)
    sent = made.delay(1)
    work(app)
    assert (ran, seen, sent.result) == ([1], [made.name], 1)
    assert warnings_of(app) == []


# -- the check -----------------------------------------------------------------------------


def warnings_of(app: Celery) -> list[str]:
    from celery import current_app

    before = current_app._get_current_object()
    app.set_current()
    try:
        every = check_tasks()
        assert "django_dlock.E101" not in [each.id for each in every], every
        found = [each for each in every if each.id == "django_dlock.W118"]
        return [str(each.msg) for each in found]
    finally:
        before.set_current()


def test_a_check_names_the_class_that_bypasses(app):
    made = task(app, counted()[0], base=RunsInAContext)
    (warning,) = warnings_of(app)
    assert made.name in warning
    assert "'RunsInAContext'" in warning


@pytest.mark.parametrize("base", [Retries, CallsTwice, LockedTask])
def test_the_check_accepts_a_class_that_calls_the_next_one(app, base):
    task(app, counted()[0], base=base)
    assert warnings_of(app) == []


def test_the_check_accepts_a_call_in_an_inner_function(app):
    class Inner(LockedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return LockedTask.__call__(self, *args, **kwargs)

            return call()

    task(app, counted()[0], base=Inner)
    assert warnings_of(app) == []


# -- the hooks -----------------------------------------------------------------------------


class Hooked(LockedTask):
    """Notes each hook, and whether a run was in progress."""

    abstract = True
    seen: list[tuple[str, bool]]

    def _note(self, hook: str) -> None:
        self.seen.append((hook, self.current_run is not None))

    def before_start(self, *args: Any) -> None:
        self._note("before_start")

    def on_success(self, *args: Any) -> None:
        self._note("on_success")

    def on_failure(self, *args: Any) -> None:
        self._note("on_failure")

    def on_retry(self, *args: Any) -> None:
        self._note("on_retry")

    def after_return(self, *args: Any) -> None:
        self._note("after_return")


def hooked(app: Celery, make: Any = recorded, ends: Any = None, **options: Any) -> Any:
    def body(self: Any, order: int) -> int:
        self._note("body")
        if ends is not None:
            ends(self)
        return order

    made = make(app, body, base=Hooked, **options)
    type(made).seen = []
    return made


def seen(made: Any) -> list[str]:
    found = [hook for hook, _ in made.seen]
    made.seen.clear()
    return found


def test_a_run_is_current_in_before_start_and_body_only(app):
    made = hooked(app)
    made.delay(1)
    work(app)
    assert made.seen == [
        ("before_start", True),
        ("body", True),
        ("on_success", False),
        ("after_return", False),
    ]
    assert made.current_run is None


@pytest.mark.parametrize("make", [task, recorded])
def test_before_start_runs_once_however_often_the_message_is_requeued(app, make):
    made = hooked(app, make)
    made.delay(1)
    with held("order:1"):
        for _ in range(4):
            work(app)
            assert seen(made) == []
    work(app)
    assert seen(made) == ["before_start", "body", "on_success", "after_return"]


def test_before_start_runs_once_in_an_eager_task(app):
    made = hooked(app)
    made.apply((1,))
    assert seen(made) == ["before_start", "body", "on_success", "after_return"]
    made.apply((1,))
    assert seen(made) == ["on_success", "after_return"]
    made(1)
    assert seen(made) == ["body"]


def test_before_start_runs_under_the_lock_and_its_error_is_that_of_the_body(app):
    class Fails(LockedTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            with pytest.raises(LockNotAcquired):
                Lock("order:1").acquire(blocking=False) or _raise()
            raise ValueError("not ready")

    def _raise() -> None:
        raise LockNotAcquired

    body, ran = counted()
    sent = recorded(app, body, base=Fails).delay(1)
    work(app)
    assert (ran, str(sent.result), states()) == ([], "not ready", ["failed"])
    assert IdempotencyRecord.objects.get().error == "ValueError('not ready')"


def test_before_start_may_be_inherited_and_call_that_of_its_base(app):
    class Below(Hooked):
        abstract = True

        def before_start(self, *args: Any) -> None:
            super().before_start(*args)
            self._note("below")

    def body(self: Any, order: int) -> None:
        self._note("body")

    made = recorded(app, body, base=Below)
    type(made).seen = []
    made.delay(1)
    work(app)
    assert seen(made)[:3] == ["before_start", "below", "body"]
    # A test of one's own may call it.
    made.before_start("id", (), {})
    assert seen(made) == ["before_start", "below"]
