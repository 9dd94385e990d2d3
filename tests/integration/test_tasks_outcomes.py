"""How each ending of a body leaves transaction, record, lock, message and result.

The table in the reference, on a real worker. The TTL is half a minute, so a lock that is free
here has been released.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import celery
import pytest
from celery.exceptions import TaskRevokedError

from testproject.servers import RedisServer
from tests.conftest import missing
from tests.support import postgres
from tests.support.proxy import How, Proxy
from tests.support.workers import Place, Site, eventually, result

TTL = 30.0
SOON = 10.0
"""Seconds; much less than any TTL and long enough for any machine."""

LIMIT = 2.5
"""Seconds; a body has begun by then."""


@pytest.fixture(scope="module")
def writing(redis: RedisServer) -> Iterator[Proxy]:
    """Between the broker and the messages that the worker publishes."""
    with Proxy("127.0.0.1", redis.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def database() -> Iterator[tuple[str, Proxy] | None]:
    """A PostgreSQL behind a proxy that can lose a COMMIT; ``None`` if it is not installed."""
    with ExitStack() as stack:
        try:
            parts = urlsplit(stack.enter_context(postgres.database()))
        except postgres.PostgresNotFound:
            yield None
            return
        proxy = stack.enter_context(
            Proxy(parts.hostname or "127.0.0.1", parts.port or 5432, speaks="postgres")
        )
        user = f"{parts.username}:{parts.password}" if parts.password else parts.username
        yield parts._replace(netloc=f"{user}@127.0.0.1:{proxy.port}").geturl(), proxy


@pytest.fixture(scope="module")
def site(
    redis: RedisServer,
    writing: Proxy,
    database: tuple[str, Proxy] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    alias = {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": redis.url,
        "TTL": TTL,
        "OPTIONS": {"command_timeout": 5.0},
    }
    with Site(
        redis,
        tmp_path_factory.mktemp("outcomes"),
        postgres=database[0] if database else None,
        settings={"DLOCKS": {"default": alias}, "CELERY_BROKER_WRITE_URL": writing.url},
        tasks="tests.support.tasks_outcomes",
    ) as site:
        site.worker("prefork")
        yield site


def messages(site: Site) -> int:
    """How many messages wait in the queue or are unacknowledged."""
    with site.app.connection_for_read() as connection:
        client = connection.default_channel.client
        return client.llen("celery") + client.hlen("unacked")


def idle(site: Site) -> None:
    eventually(lambda: messages(site) == 0, why="all messages are acknowledged")


# -- the table -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the first run leaves behind.

    Attributes:
        ends: Key of ``tests.support.tasks_outcomes.ENDINGS``.
        effects: How many are committed; the lock alone rolls nothing back.
        record: Its state.
        message: ``acknowledged``; or how it arrives again: ``retried``, ``requeued``,
            ``redelivered``.
        state: Of the result.
        task: If it is neither ``recorded`` nor ``alone``.
        given: Arguments for ``apply_async``. A task may be retried 3 times.
        commit: What the proxy does with the COMMIT whose reply it loses.
    """

    ends: str
    effects: int
    record: str
    lock: str | None
    message: str
    state: str
    task: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""


COMMITS: Mapping[str, How] = {"done": "close", "not done": "refuse", "unknown": "swallow"}

# A result that was never stored has the state PENDING.
TABLE = [
    #   the first run ends with           effects  record     lock     message        state
    Row("return", 1, "succeeded", None, "acknowledged", "SUCCESS"),
    Row("exception", 0, "failed", None, "acknowledged", "FAILURE"),
    Row("retry", 0, "failed", None, "acknowledged", "FAILURE", given={"retries": 3}),
    Row("retry for a reason", 0, "failed", None, "acknowledged", "FAILURE", given={"retries": 3}),
    Row("autoretry", 0, "failed", None, "acknowledged", "FAILURE", given={"retries": 3}),
    Row("retry", 0, "failed", None, "acknowledged", "FAILURE", "keeps", given={"retries": 3}),
    Row("no autoretry", 0, "failed", None, "acknowledged", "FAILURE"),
    Row("retry", 0, "waiting", None, "retried", "RETRY"),
    Row("autoretry", 0, "waiting", None, "retried", "RETRY"),
    Row("retry", 0, "waiting", "parked", "retried", "RETRY", "keeps"),
    Row("autoretry", 0, "waiting", "parked", "retried", "RETRY", "keeps"),
    Row("Ignore", 1, "succeeded", None, "acknowledged", "PENDING"),
    Row("replace", 1, "succeeded", None, "acknowledged", "SUCCESS"),
    Row("Reject, requeue", 0, "waiting", None, "redelivered", "PENDING"),
    # Older versions of Celery store no result.
    Row("Reject", 0, "waiting", None, "acknowledged", "FAILURE"),
    Row("waits", 0, "failed", None, "acknowledged", "FAILURE", given={"soft_time_limit": LIMIT}),
    Row("lost", 0, "waiting", None, "requeued", "RETRY"),
    Row("commit", 1, "succeeded", None, "acknowledged", "SUCCESS", "recorded", commit="done"),
    Row("commit", 0, "waiting", None, "requeued", "RETRY", "recorded", commit="not done"),
    # The later read of the record gets no answer either.
    Row("commit", 1, "succeeded", None, "requeued", "RETRY", "recorded", commit="unknown"),
    Row("lost unseen", 1, "succeeded", None, "acknowledged", "SUCCESS"),
    Row("killed", 0, "running", None, "redelivered", "PENDING"),
    Row("waits, deaf", 0, "running", None, "acknowledged", "FAILURE", given={"time_limit": LIMIT}),
    # Celery sends SIGTERM first, and SIGKILL a tenth of a second later.
    Row(
        "waits",
        0,
        "running or waiting",
        None,
        "acknowledged",
        "FAILURE",
        given={"time_limit": LIMIT},
    ),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((row, task), id=f"{task}-{row.ends}-{row.state}")
        for row in TABLE
        for task in ([row.task] if row.task else ["recorded", "alone"])
    ],
)
def test_each_ending_leaves_what_the_table_says(site, place, order, database, case):
    row, task = case
    if row.commit:
        if database is None:
            missing("no PostgreSQL whose COMMIT could be lost")
        proxy, dropped = database[1], database[1].replies_dropped
        proxy.drop_replies(how=COMMITS[row.commit], of=("outcome",))
    sent = site.send(task, order, str(place), row.ends, **row.given)
    place.wait(f"began-{order}")
    if row.ends == "lost":
        site.break_lock(order)
        place.open("broken")
    if row.commit == "unknown":
        proxy.wait_until(lambda proxy: proxy.replies_dropped > dropped)
        proxy.refuse()

    came = settled(site, place, order, row)
    if row.commit == "unknown":
        proxy.accept()
    assert came == row.message
    recorded = task != "alone"
    assert site.effects(order) == (row.effects if recorded else 1)
    if recorded:
        assert site.record(order)[0] in row.record.split(" or ")
    # The parent of a killed child breaks its lease once it has noticed the death.
    eventually(lambda: lock(site, order) == row.lock, SOON)
    assert sent.state == row.state or (row.ends == "Reject" and sent.state == "PENDING")

    # The next delivery can run, whether it is the same message or another one.
    place.open("again")
    if came == "acknowledged":
        sent = site.send(task, order, str(place), row.ends)
    expected = None if row.ends in ("Ignore", "replace") and recorded else 2
    if recorded and row.record == "succeeded" and expected:
        expected = 1
    assert result(sent) == expected
    assert site.effects(order) == (1 if recorded else 2)
    idle(site)
    assert lock(site, order) is None


def settled(site: Site, place: Place, order: int, row: Row) -> str:
    """How the broker ended the first delivery; waits until it has."""
    if row.message == "acknowledged":
        idle(site)
        assert len(place.lines(f"came-{order}")) == 1
        return row.message
    came = json.loads(place.wait(f"came-{order}", 2)[1])
    # Only the message that has arrived again.
    eventually(lambda: messages(site) == 1, why="the first message is acknowledged")
    if came["retries"]:
        return "retried"
    if came["requeued"]:
        return "requeued"
    return "redelivered" if came["redelivered"] else "published by whom?"


def lock(site: Site, order: int) -> str | None:
    lease = site.lease(order)
    return None if lease is None else lease.kind


# -- retries -------------------------------------------------------------------------------


def test_no_other_task_runs_between_two_runs_of_a_task_that_keeps_its_lock(site, place, order):
    sent = site.send("keeps", order, str(place), "late retry")
    eventually(lambda: lock(site, order) == "parked")
    place.open("again")
    other = site.send("alone", order, str(place), "return")
    eventually(lambda: other.state == "RETRY", why="it met the parked lease")
    assert (result(sent), result(other)) == (2, 3)
    # The other one does not run in between.
    assert [line.split()[0] for line in place.lines(f"began-{order}")] == [
        *(sent.id, sent.id),
        other.id,
    ]
    idle(site)
    assert lock(site, order) is None


def test_g12_a_child_that_dies_after_its_retry_was_published_counts_once(site, place, order):
    """The message and its retry both arrive before the lock is parked."""
    place.open("again")
    sent = site.send("keeps", order, str(place), "retry, and die")
    assert result(sent) == 2
    idle(site)
    came = [json.loads(line)["retries"] for line in place.lines(f"came-{order}")]
    assert {0, 1} <= set(came)
    assert len(place.lines(f"began-{order}")) == 2
    assert site.effects(order) == 1
    assert site.record(order)[::2] == ("succeeded", 0)
    assert lock(site, order) is None


@pytest.mark.parametrize("why", ["revoked", "expired"])
def test_a_retry_that_will_never_run_releases_the_lock_kept_for_it(site, place, order, why):
    """Long before the lease would end."""
    # After its first run has begun, and before the retry, which comes after 2 s.
    given = {"expires": 1.9} if why == "expired" else {}
    sent = site.send("keeps", order, str(place), "late retry", **given)
    eventually(lambda: lock(site, order) == "parked")
    assert site.lease(order).ttl > 2 * TTL
    if why == "revoked":
        site.app.control.revoke(sent.id)
    with pytest.raises(TaskRevokedError, match=why):
        result(sent)
    eventually(lambda: lock(site, order) is None, SOON)
    idle(site)
    assert (len(place.lines(f"came-{order}")), site.effects(order)) == (1, 0)
    # The record is waiting, so the next delivery claims it.
    place.open("again")
    assert result(site.send("keeps", order, str(place), "late retry")) == 2


@pytest.mark.parametrize("why", ["revoked", "expired"])
def test_a_task_that_was_never_started_holds_nothing(site, place, order, why):
    given = {"expires": 0.001} if why == "expired" else {"countdown": 1}
    sent = site.send("recorded", order, str(place), "return", **given)
    if why == "revoked":
        site.app.control.revoke(sent.id)
    with pytest.raises(TaskRevokedError, match=why):
        result(sent)
    idle(site)
    assert (place.lines(f"came-{order}"), lock(site, order)) == ([], None)
    assert result(site.send("recorded", order, str(place), "return")) == 1


@pytest.mark.skipif(
    not hasattr(celery.Task, "retry_on_worker_lost"), reason="this Celery retries no lost worker"
)
def test_g12_a_task_that_is_retried_when_its_child_dies_counts_once(site, place, order):
    sent = site.send("comes_again", order, str(place), "killed")
    assert json.loads(place.wait(f"came-{order}", 2)[1])["retries"] == 1
    # Long before its lease would end.
    eventually(lambda: lock(site, order) is None, SOON)
    assert site.record(order) == ("running", 1, 0)
    place.open("again")
    assert result(sent) == 2
    idle(site)
    assert (site.effects(order), site.record(order)) == (1, ("succeeded", 2, 0))


def test_g13_a_retry_without_a_broker_loses_nothing(site, place, order, writing):
    writing.refuse()
    try:
        sent = site.send("keeps", order, str(place), "retry")
        came = json.loads(place.wait(f"came-{order}", 2)[1])
        # The message itself is redelivered, because there is no other.
        assert (came["retries"], came["redelivered"], messages(site)) == (0, True, 1)
        assert (site.effects(order), site.record(order)[0]) == (0, "waiting")
        assert lock(site, order) is None
    finally:
        writing.accept()
    place.open("again")
    assert result(sent) == 2
    idle(site)
    assert site.effects(order) == 1
