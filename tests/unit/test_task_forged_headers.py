"""Headers that somebody else has written: logged and ignored, and the task runs as without them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.worker.request import Request
from hypothesis import given
from hypothesis import strategies as some

from django_dlock.celery import owners
from django_dlock.celery.publishing.header import HEADER
from django_dlock.celery.worker.locked_request import LockedRequest
from tests.support.deliveries import effects, held, in_memory, recorded, task, waiting, work
from tests.support.fuzzing import examples, json_values

pytestmark = pytest.mark.django_db(transaction=True)


def deep(levels: int = 100_000) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


FORGED = {
    "text": "x",
    "list": [1, 2],
    "number": 7,
    "huge number": 10**5000,
    "infinity": math.inf,
    "deep": deep(),
    "10 MB": "x" * 10**7,
    "huge count": {"count": 10**400},
    "infinite count": {"count": math.inf},
    "count that is no number": {"count": math.nan},
    "negative count": {"count": -1},
    "count as text": {"count": "3"},
    "count as truth": {"count": True},
    "deep count": {"count": deep()},
    "huge setbacks": {"setbacks": 2**31},
    "huge losses": {"losses": 1e300},
    "huge contended": {"contended": 10**400},
    "huge time": {"since": 10**400},
    "infinite time": {"since": math.inf},
    "time that is none": {"since": math.nan},
    "time as text": {"since": "1e999"},
    "deep time": {"since": deep()},
    "parked as a list": {"parked": ["a:b"]},
    "parked is long": {"parked": "a:" + "b" * 10**7},
    "parked with a lone surrogate": {"parked": "a:\ud800"},
    "parked with a null": {"parked": "a:\0"},
    "reserved as a mapping": {"reserved": {"a": "b"}},
    "reserved with a lone surrogate": {"reserved": "a:\udfff"},
    "reserved is long": {"reserved": "a:" + "b" * 10**7},
}
forged_ones = pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def deliver(app: Celery, *, request: type[Request] = Request, **facts: Any) -> Any:
    """Deliver the next message with these headers in the place of its own."""
    message = waiting(app)
    message.headers.update(facts.pop("headers", {}))
    message.properties.update(facts)
    made = app.tasks[message.headers["task"]]
    request(message, app=app, task=made, on_ack=lambda *_: None).execute()
    return message


def told(caplog: pytest.LogCaptureFixture, header: str, task_id: str) -> list[str]:
    lines = [
        it.getMessage()
        for it in caplog.records
        if it.name == "django_dlock" and it.levelno == logging.WARNING
    ]
    found = [line for line in lines if f"the header {header!r} of its message" in line]
    assert all(task_id in line and len(line) < 500 for line in found)
    return found


@pytest.mark.parametrize("make", [task, recorded])
@forged_ones
def test_a_forged_header_is_logged_and_the_task_runs(app, caplog, make, forged):
    sent = make(app).delay(1)
    deliver(app, headers={HEADER: forged})
    assert (sent.state, effects()) == ("SUCCESS", 1)
    assert len(told(caplog, HEADER, sent.id)) == 1


@forged_ones
def test_a_forged_header_does_not_break_a_requeue(app, forged):
    sent = task(app).delay(1)
    with held("order:1"):
        deliver(app, headers={HEADER: forged})
    again = work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)
    assert again.headers[HEADER]["count"] == 1


def test_a_header_of_ours_is_not_malformed(app, caplog):
    sent = task(app).delay(1)
    with held("order:1"):
        work(app)
    work(app)
    assert sent.state == "SUCCESS"
    assert told(caplog, HEADER, sent.id) == []


@pytest.mark.parametrize("name", ["headers", "timelimit"])
@pytest.mark.parametrize(
    "forged", ["x", ["x"], 7, ["1", None], [math.nan, None], [10**400, None]], ids=repr
)
def test_what_stands_in_the_place_of_headers_and_limits_is_dropped(app, caplog, name, forged):
    sent = task(app).delay(1)
    if name == "timelimit" and not (isinstance(forged, list) and len(forged) == 2):
        # Celery itself needs a pair.
        forged = [{}, None]
    with held("order:1"):
        deliver(app, headers={name: forged})
    assert len(told(caplog, name, sent.id)) == 1
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)


@pytest.mark.parametrize("forged", ["soon", "1e999", [], -5, "nan"], ids=repr)
def test_a_forged_expiration_does_not_break_a_requeue(app, caplog, forged):
    sent = task(app).delay(1)
    with held("order:1"):
        deliver(app, expiration=forged)
    assert len(told(caplog, "expiration", sent.id)) == 1
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)


@pytest.mark.parametrize("forged", [7, "\ud800", ["x"], None], ids=repr)
def test_the_worker_outlives_the_id_of_a_forged_message(app, forged):
    """The owner is made in the worker's parent, where an error would end the worker."""
    task(app).delay(1)
    message = waiting(app)
    message.headers["id"] = forged
    made = app.tasks[message.headers["task"]]
    request = LockedRequest(message, app=app, task=made, on_ack=lambda *_: None)
    assert owners.is_of(request.request_dict[owners.KEY], forged)


NAMES = some.sampled_from(
    ["count", "since", "contended", "setbacks", "losses", "parked", "reserved"]
)


@examples(150)
@given(json_values() | some.dictionaries(NAMES, json_values()))
def test_any_header_is_ignored_or_obeyed(app: Celery, forged: Any) -> None:
    made = task(app)
    sent = made.delay(1)
    deliver(app, headers={HEADER: forged})
    assert sent.state == "SUCCESS"
