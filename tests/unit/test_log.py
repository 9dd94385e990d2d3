"""Each line of the logger carries what it is about."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

import django_dlock
from django_dlock import LeaseLost, Lock, locks
from django_dlock.core import dispatch
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import LeaseRequest
from django_dlock.log import FIELDS, LockLogger, logger

PACKAGE = Path(django_dlock.__file__).parent
METHODS = {"debug", "info", "warning", "error", "exception", "log", "critical"}
LATER = {"log_warning", "log_warning_later", "log_error"}
"""Functions of ``core/dispatch.py``, which log on another thread; ``tell`` does so below it."""
FACTS = {"about", "name", "alias", "owner", "token", "task_id", "reason"}

OF_NO_LOCK = {
    "@idempotent_view on %s: no client: %s",
    "@idempotent_view on %s: no key: %s",
    "%s: views must return an HttpResponse, because this django-ninja has no _result_to_response",
    "%s %s: no answer of a database: %s",
    "%s: %s does not tell which messages are new, so a repeated answer has none",
    "%s %s (%s)",
    "A call to the database outlives its deadline",
    "Calls of the database driver %s have no deadline: it tells no socket: %r",
    "A callback for a lock event raised: %s",
    "%s has taken %g s for a lock event; only its own later calls wait for it",
    "%s has taken %g s for a lock event; others wait for it",
    "%d calls of %s for lock events were not made: too many wait",
    "Could not close a connection: %s",
    "Could not look at a queue of calls",
    "Receiver %r of a lock signal raised",
    "The watchdog woke %.1f s late: the process was starved or suspended",
    "The thread that listens for released locks met an error",
    "Not listening for released locks; waiters poll every %s to %s s: %s",
    "Redlock: the thread that talks to the nodes failed",
    "Redlock: node %s failed",
    "Redlock: node %s cannot be used: %s",
    "Database %r cannot be reached: %s",
    (
        "The broker does not let this worker publish: %s. %s; until then, tasks that cannot run "
        "now are given back to it instead of being requeued"
    ),
    (
        "%s.%s is not there in this version: a body that loses its lease may be interrupted inside "
        "what replaces it"
    ),
    "A task lost its lease, but this pool cannot stop it; it continues",
    "The death of a child process could not be handled",
    "Could not look for dead child processes before a fork",
    "%s: %s%s",
    "A key of %s failed",
    "Metrics of the stores cannot be read: %s",
    "Answers for metrics are not kept for other processes: %s",
    "Gauges of an ended process are not removed: %s",
    "What processes have counted cannot be read: %s",
    "Lock statistics are not written: %s",
    "Metrics are off: %s",
    "Tracing is off: %s",
}
"""Lines about a process, a thread or a connection, where no lock and no task is known."""


# -- all calls of the package --------------------------------------------------------------------


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "log.py":
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Each call that logs: where it is, and the message as the code has it."""
    for name, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called, of = node.func.attr, node.func.value
            named = of.id if isinstance(of, ast.Name) else ""
            if (
                (named == "logger" and called in METHODS)
                or (named == "dispatch" and called in LATER)
                or (called == "tell" and name.startswith("core/"))
            ):
                texts = [
                    arg.value
                    for arg in node.args
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                ]
                if texts:
                    yield f"{name}:{node.lineno}", node, texts[0]


def test_there_are_calls_to_look_at() -> None:
    assert len(list(calls())) > 50


@pytest.mark.parametrize(
    ("place", "call", "message"), [pytest.param(*it, id=it[0]) for it in calls()]
)
def test_each_call_says_what_it_is_about(place: str, call: ast.Call, message: str) -> None:
    # The name of ``**facts`` is ``None``.
    given = {keyword.arg for keyword in call.keywords}
    assert (message in OF_NO_LOCK) != bool(given & {*FACTS, None}), (
        f"{place} logs {message!r}: pass about=, name=, alias= or task_id=, or list it here as a "
        "line about no lock"
    )


def test_every_line_in_the_list_is_still_logged() -> None:
    assert {message for _, _, message in calls()} >= OF_NO_LOCK


@pytest.mark.parametrize(("name", "tree"), [pytest.param(*it, id=it[0]) for it in modules()])
def test_no_module_has_a_logger_of_its_own(name: str, tree: ast.Module) -> None:
    if name == "backends/zookeeper/session.py":
        # It passes a logger to kazoo.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "logging" or node.attr.isupper(), f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            assert node.module != "logging", f"{name}:{node.lineno}"


# -- what a record carries -----------------------------------------------------------------------


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    real = logging.getLogger("django_dlock")
    level = real.level
    real.addHandler(handler)
    real.setLevel(logging.DEBUG)
    yield found
    real.setLevel(level)
    real.removeHandler(handler)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {field: getattr(record, field) for field in FIELDS}


def test_no_field_clashes_with_an_attribute_of_a_record() -> None:
    record = logging.makeLogRecord({})
    assert not set(FIELDS) & set(vars(record))


def test_every_record_has_all_fields(records: list[logging.LogRecord]) -> None:
    logger.warning("it happened")
    assert fields(records[-1]) == dict.fromkeys(FIELDS)


def test_a_request_tells_its_name_and_owner(records: list[logging.LogRecord]) -> None:
    logger.info("%s", "it", about=LeaseRequest("order:1", "me", 30.0), alias="default")
    told = fields(records[-1])
    assert (told["lock_name"], told["lock_owner"]) == ("order:1", "me")
    assert told["lock_alias"] == "default"
    assert records[-1].getMessage() == "it"


def test_an_error_among_the_arguments_tells_its_lock_and_reason(
    records: list[logging.LogRecord],
) -> None:
    logger.warning("After it: %s", LeaseLost("lost", "order:1", "default", "expired"))
    told = fields(records[-1])
    assert told["lock_name"] == "order:1"
    assert told["lock_alias"] == "default"
    assert told["reason"] == "expired"


def test_what_is_given_by_name_counts_most(records: list[logging.LogRecord]) -> None:
    error = BackendUnavailable("away", "from the error", "default")
    about = LeaseRequest("from the request", "me", 30.0)
    logger.warning("%s", error, about=about, name="given", task_id=None)
    assert records[-1].lock_name == "given"  # type: ignore[attr-defined]
    logger.warning("%s", error, about=about)
    assert records[-1].lock_name == "from the request"  # type: ignore[attr-defined]


def test_an_unknown_fact_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(KeyError):
        logger.warning("it", colour="red")


def test_a_line_names_the_place_of_its_call(records: list[logging.LogRecord]) -> None:
    logger.debug("it")
    logger.info("it")
    logger.warning("it")
    logger.error("it")
    logger.log(logging.INFO, "it")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logger.exception("it")
    assert {record.pathname for record in records} == {__file__}
    assert {record.funcName for record in records} == {"test_a_line_names_the_place_of_its_call"}
    assert records[-1].exc_info is not None
    assert records[-1].levelno == logging.ERROR


def test_a_record_factory_of_the_project_may_set_the_same_names(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = original(*args, **kwargs)
        record.task_id, record.reason = "of the project", "of the project"
        return record

    logging.setLogRecordFactory(factory)
    try:
        logger.warning("it", task_id="6f3a")
    finally:
        logging.setLogRecordFactory(original)
    told = fields(records[-1])
    assert (told["task_id"], told["reason"]) == ("6f3a", "of the project")
    assert not [name for name in vars(records[-1]) if "django_dlock" in name]


def test_a_line_that_is_not_wanted_costs_no_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "django_dlock.log._fields", lambda *args: pytest.fail("it collected fields")
    )
    quiet = LockLogger("django_dlock.quiet")
    logging.getLogger("django_dlock.quiet").setLevel(logging.WARNING)
    quiet.info("nobody reads this", about=object())


# -- what locks log ------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[None]:
    entry = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
    with override_settings(DLOCKS={"default": entry}):
        locks.reset()
        yield
        locks.reset()


@pytest.mark.usefixtures("local")
def test_contention_tells_the_lock_and_the_task(records: list[logging.LogRecord]) -> None:
    with Lock("order:1", bound=False):
        assert not Lock("order:1", metadata={"task_id": "6f3a"}, bound=False).acquire(False)
    (record,) = (record for record in records if "held by someone else" in record.getMessage())
    assert fields(record) == {
        "lock_name": "order:1",
        "lock_alias": "default",
        "lock_owner": None,
        "lock_token": None,
        "task_id": "6f3a",
        "reason": "contended",
    }


@pytest.mark.usefixtures("local")
def test_a_loss_tells_owner_token_task_and_reason(records: list[logging.LogRecord]) -> None:
    lock = Lock("order:1", metadata={"task_id": "6f3a"}, bound=False)
    lock.acquire()
    owner, token = lock.owner, lock.token
    assert owner is not None
    assert locks["default"].break_("order:1", owner=owner)
    with pytest.raises(LeaseLost):
        lock.renew()
    assert dispatch.flush(10)
    (record,) = (record for record in records if "was lost after" in record.getMessage())
    assert fields(record) == {
        "lock_name": "order:1",
        "lock_alias": "default",
        "lock_owner": owner,
        "lock_token": token,
        "task_id": "6f3a",
        "reason": "broken",
    }
