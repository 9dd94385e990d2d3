"""``unique_until`` over a real Redis: lost replies, dead publishers, real workers.

A message is dropped only if another one will still run; in doubt, it is published.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import pytest
from celery import Celery
from celery.exceptions import TimeLimitExceeded
from celery.signals import before_task_publish
from django.core.management import call_command
from kombu.exceptions import OperationalError

from django_dlock import Lock, LockedTask, locks
from django_dlock.celery.options import UniqueOptions
from django_dlock.celery.publishing.reservation import BEYOND, UNCONFIRMED, MessageReservation
from django_dlock.lease import LeaseInfo
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.aliases import alias, configured
from tests.support.deliveries import effects, in_memory, task, waiting, work
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, ROOT, Place, Site, eventually

pytestmark = pytest.mark.extended

numbers = itertools.count(1)

SOON = UNCONFIRMED / 3
"""Seconds; much less than any lease."""

UNTIL = pytest.mark.parametrize("until", ["start", "done"])
ANSWERED, UNANSWERED = 3.0, 0.5
"""Command timeouts: of tests in which an answer may come late, and in which none comes."""
HOW = pytest.mark.parametrize(
    ("how", "command_timeout"),
    [
        pytest.param("close", ANSWERED, id="close"),
        pytest.param("swallow", UNANSWERED, id="swallow"),
    ],
)


def reserved(using: str = "direct", order: int | str = "") -> list[LeaseInfo]:
    infos = locks[using].list(prefix="unique:")
    return [info for info in infos if info.name.endswith(f"order:{order}")] if order else infos


# -- commands and their replies ------------------------------------------------------------


@pytest.fixture
def command_timeout() -> float:
    """Of ``default``, in seconds; ``HOW`` overrides it."""
    return ANSWERED


@pytest.fixture
def app(
    own_redis: RedisServer, proxy: Proxy, transactional_db: None, command_timeout: float
) -> Iterator[Celery]:
    """Messages in memory, locks behind the proxy; ``direct`` does not use it."""
    # Long enough for a busy machine: after a late answer, every message would be published.
    entries = {
        "default": alias(proxy.url, TTL=10.0, OPTIONS={"command_timeout": command_timeout}),
        "direct": alias(own_redis.url, TTL=10.0, OPTIONS={"command_timeout": ANSWERED}),
    }
    with in_memory() as app, configured(entries):
        # Connect and load the scripts.
        task(app, nothing, unique_until="start").delay(0)
        work(app)
        yield app


def nothing(self: Any, order: int) -> None:
    """A body."""


def messages(app: Celery) -> int:
    return sum(1 for _ in iter(lambda: waiting(app), None))


def scripts(proxy: Proxy, act: Callable[[], object]) -> int:
    """How many commands the call needs."""
    before = proxy.count()
    act()
    return proxy.count() - before


def test_publishing_without_the_option_adds_no_command(app, proxy):
    made = task(app)
    assert scripts(proxy, lambda: made.delay(1)) == 0


@UNTIL
def test_publishing_once_costs_two_commands_and_a_duplicate_one(app, proxy, until):
    plain, made = task(app), task(app, unique_until=until)
    assert scripts(proxy, lambda: made.delay(1)) == 2
    assert scripts(proxy, lambda: made.delay(1)) == 1
    run = scripts(proxy, lambda: work(app))
    plain.delay(1)
    assert run == scripts(proxy, lambda: work(app)) + 1


@pytest.fixture
def before_publishing() -> Iterator[list[Callable[[], None]]]:
    """Functions called after the reservation and before publishing."""
    acts: list[Callable[[], None]] = []

    def act(**facts: Any) -> None:
        while acts:
            acts.pop()()

    before_task_publish.connect(act)
    yield acts
    before_task_publish.disconnect(act)


@HOW
def test_g13_the_lost_reply_of_a_reservation(app, proxy, how):
    made = task(app, unique_until="start")
    proxy.drop_replies(how=how)
    sent = made.delay(1)
    if how == "close":
        # The call was repeated and found its own reservation.
        assert made.delay(1).id == sent.id
        assert messages(app) == 1
        return
    eventually(lambda: not reserved(), SOON, why="taken back")
    again = made.delay(1)
    assert again.id != sent.id
    assert made.delay(1).id == again.id
    assert messages(app) == 2


@HOW
def test_g13_the_lost_reply_of_a_confirmation(app, proxy, how, before_publishing):
    made = task(app, unique_until="start")
    before_publishing.append(lambda: proxy.drop_replies(how=how))
    sent = made.delay(1)
    proxy.wait_until(lambda proxy: proxy.replies_dropped == 1)
    # It was executed, and there is a message.
    assert made.delay(1).id == sent.id
    work(app)
    assert reserved() == []


@HOW
def test_g13_the_lost_reply_of_a_release_of_a_reservation(app, proxy, how, monkeypatch):
    made = task(app, unique_until="start")
    sent = made.delay(1)
    release = MessageReservation.release_before_body

    def lose(self: MessageReservation, unique: UniqueOptions) -> bool:
        proxy.drop_replies(how=how)
        return release(self, unique)

    with monkeypatch.context() as patched:
        patched.setattr(MessageReservation, "release_before_body", lose)
        work(app)
    proxy.wait_until(lambda proxy: proxy.replies_dropped == 1)
    if how == "swallow":
        assert (sent.state, effects()) == ("RETRY", 0)
        # The outcome is unknown, so it is published.
        assert made.delay(1).id != sent.id
        work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)


@pytest.mark.parametrize(
    ("away", "command_timeout"),
    [
        pytest.param("refuse", ANSWERED, id="refuse"),
        pytest.param("black_hole", UNANSWERED, id="black_hole"),
    ],
)
def test_g13_without_the_locks_backend_a_task_is_published(app, proxy, away):
    made = task(app, unique_until="start")
    getattr(proxy, away)()
    first, second = made.delay(1), made.delay(1)
    assert first.id != second.id
    (proxy.accept if away == "refuse" else proxy.heal)()
    work(app), work(app)
    assert (first.state, second.state) == ("SUCCESS", "SUCCESS")
    eventually(lambda: not reserved(), SOON, why="nothing is left of the attempts")


def test_g13_without_the_broker_nothing_stays_reserved(app, own_redis):
    with Proxy("127.0.0.1", own_redis.port) as broker:
        far = Celery("far", broker=broker.url, set_as_current=False)
        far.conf.task_publish_retry_policy = {"max_retries": 1, "interval_start": 0}
        made = task(far, unique_until="start")
        broker.refuse()
        with pytest.raises(OperationalError):
            made.delay(1)
        assert reserved() == []
        broker.accept()
        assert made.delay(1).id == made.delay(1).id
        assert messages(far) == 1
        far.close()


def test_g13_on_rabbitmq_a_message_lost_on_its_way_is_published_again(app, rabbit_server):
    """A message lost in a breaking connection has not reached the broker."""
    with Proxy("127.0.0.1", rabbit_server.port, speaks="amqp") as broker:
        far = Celery("far", broker=amqp(broker.port), set_as_current=False)
        far.conf.task_default_queue = f"unique-{next(numbers)}"
        made = task(far, unique_until="start")
        made.delay(0)
        broker.black_hole()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(made.delay, 1)
            assert not wait([sending], 0.5).done
            assert confirmed("order:1") == []
            broker.heal()
            sent = sending.result(PATIENCE)
        assert confirmed("order:1") == [sent.id]
        assert sent.id in messages_ids(far)
        far.close()


def amqp(port: int) -> str:
    return f"amqp://guest:guest@127.0.0.1:{port}//"


def confirmed(key: str) -> list[str]:
    """The ids of the tasks in whose favour others are dropped."""
    return [
        info.metadata["task_id"]
        for info in reserved()
        if info.name.endswith(key) and (info.ttl or 0) > BEYOND
    ]


@UNTIL
def test_g13_simultaneous_publishers_leave_no_result_without_a_message(app, until):
    made, together = task(app, unique_until=until), threading.Barrier(4)

    def publish(order: int) -> Any:
        together.wait(10)
        return made.delay(order)

    with ThreadPoolExecutor(4) as pool:
        for order in range(1, 11):
            sent = [future.result() for future in [pool.submit(publish, order) for _ in range(4)]]
            published = messages_ids(app)
            assert {each.id for each in sent} == published
            assert made.delay(order).id in published


def messages_ids(app: Celery) -> set[str]:
    return {message.headers["id"] for message in iter(lambda: waiting(app), None)}


def test_operators_see_reservations_and_clear_them_only_by_force(app, capsys):
    task(app, unique_until="start").delay(1)
    call_command("list_locks", "--using", "direct", "--format", "json")
    assert '"kind": "reserved"' in capsys.readouterr().out
    call_command("clear_stale_locks", "--using", "direct", "--silent-for", "0")
    assert len(reserved()) == 1
    call_command("clear_stale_locks", "--using", "direct", "--force", "--name", "unique:*")
    assert reserved() == []


# -- workers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        with (
            RedisServer() as redis,
            Site(
                redis, tmp_path_factory.mktemp("unique"), tasks="tests.support.tasks_unique"
            ) as site,
        ):
            site.worker("prefork", 3)
            yield site
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture
def place(site: Site) -> Iterator[Place]:
    """Makes the workers' locks the default in the tests' own process."""
    with configured({"default": alias(site.redis.url, TTL=30.0, OPTIONS={"command_timeout": 5.0})}):
        yield site.place()


@pytest.fixture
def order() -> int:
    return next(numbers)


def twin(site: Site, name: str, until: Literal["start", "done"]) -> Any:
    """A task of the workers, published by this process."""

    def run(self: Any, order: int, place: str, gate: str = "") -> None: ...

    known = f"{site.tasks}.{name}"
    return site.app.tasks.get(known) or site.app.task(
        base=LockedTask,
        bind=True,
        lazy=False,
        shared=False,
        name=known,
        lock_key="order:{order}",
        unique_until=until,
    )(run)


def test_g13_no_update_is_lost_while_tasks_are_published_and_run(site, place):
    """A body, dropped or not, sees everything that was written before its enqueue."""
    made, orders, times = twin(site, "follows", "start"), range(-4, 0), 60

    def publish(order: int) -> set[str]:
        state, draw, ids = Path(str(place), f"state-{order}"), random.Random(order), set()
        for number in range(times):
            new = state.with_suffix(".new")
            new.write_text(str(number))
            new.replace(state)
            ids.add(made.delay(order, str(place)).id)
            time.sleep(draw.uniform(0, 0.03))
        return ids

    with ThreadPoolExecutor(len(orders)) as pool:
        ids = list(pool.map(publish, orders))
    for order, published in zip(orders, ids, strict=True):
        seen = [int(line) for line in place.wait(f"saw-{order}", len(published))]
        # The lock keeps the bodies apart, so they see the states in order.
        assert seen == sorted(seen)
        assert seen[-1] == times - 1
        # Otherwise this test would have tested nothing.
        assert len(published) < times
    eventually(lambda: not reserved("default"), why="all have been given back")


def test_with_start_a_task_can_be_published_again_once_the_body_has_begun(site, place, order):
    made = twin(site, "starts", "start")
    first = made.delay(order, str(place), gate="go")
    place.wait(f"began-{order}")
    second = made.delay(order, str(place))
    assert made.delay(order, str(place)).id == second.id != first.id
    place.open("go")
    assert [first.get(timeout=PATIENCE), second.get(timeout=PATIENCE)] == [1, 2]


def test_with_done_a_task_can_be_published_again_after_its_end_but_not_after_a_death(
    site, place, order
):
    made = twin(site, "dies_once", "done")
    sent = made.delay(order, str(place))
    place.wait(f"began-{order}")
    assert made.delay(order, str(place)).id == sent.id
    place.open("go")
    assert sent.get(timeout=PATIENCE) == 1
    assert made.delay(order, str(place)).id != sent.id


def test_after_a_hard_limit_a_task_can_be_published_again(site, place, order):
    made = twin(site, "hangs", "done")
    sent = made.delay(order, str(place))
    with pytest.raises(TimeLimitExceeded):
        sent.get(timeout=PATIENCE)
    eventually(lambda: not reserved("default", order))


def test_after_a_termination_a_task_can_be_published_again(site, place, order):
    made = twin(site, "is_done", "done")
    sent = made.delay(order, str(place), gate="never")
    place.wait(f"began-{order}")
    sent.revoke(terminate=True, signal="SIGKILL")
    eventually(lambda: not reserved("default", order))


@pytest.mark.parametrize("step", ["reserved", "published", "confirmed"])
def test_g13_after_the_death_of_a_publisher_others_can_publish(site, place, order, step):
    made = twin(site, "starts", "start")
    with busy(site, order):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.support.publishing", step, str(order), str(place)],
            cwd=ROOT,
            env=site.env,
            stdout=subprocess.PIPE,
        ) as publisher:
            assert publisher.stdout is not None
            assert publisher.stdout.readline() == b"here\n"
            publisher.kill()
        (left,) = reserved("default", order)
        assert left.ttl is not None
        assert (left.ttl > BEYOND) == (step == "confirmed")
        sent = made.delay(order, str(place))
        assert (sent.id == left.metadata["task_id"]) == (step == "confirmed")
    # Its own message, if it got that far, and ours, if that is a different one.
    runs = 2 if step == "published" else 1
    place.wait(f"ended-{order}", runs)
    assert sent.get(timeout=PATIENCE) in (1, 2)
    assert len(place.lines(f"began-{order}")) == runs


@contextlib.contextmanager
def busy(site: Site, order: int) -> Iterator[None]:
    """Another owner holds the order's lock, so published messages stay pending."""
    with Lock(f"order:{order}", ttl=60):
        yield
