"""Tasks without any server: messages in a table or in files, locks in the database."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testproject.demo.files import register
from tests.integration.test_tasks_faults import hold, let_go, requeues
from tests.support.workers import (
    DATABASE,
    PATIENCE,
    Place,
    Site,
    Worker,
    eventually,
    orders,
    result,
)

pytest.importorskip("sqlalchemy")
# A warning of SQLAlchemy about kombu's models.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
    pytest.mark.extended,
]

SETTINGS = {"CELERY_WORKER_LOST_WAIT": 0.5}
"""Seconds for which a parent waits for the result of a dead child; by default ten. With Redis and
RabbitMQ it does not wait."""


@dataclass(frozen=True)
class Transport:
    """A broker in a directory.

    Attributes:
        results: The result backend of the same kind.
        restore: Makes it deliver again every message that it ever delivered.
    """

    url: str
    options: dict[str, Any]
    results: str
    restore: Callable[[], None]


def in_a_table(directory: Path) -> Transport:
    file = directory / "broker.sqlite3"

    def restore() -> None:
        with closing(sqlite3.connect(file, timeout=20)) as connection, connection:
            connection.execute("UPDATE kombu_message SET visible = 1")

    return Transport(f"sqla+sqlite:///{file}", {}, f"db+sqlite:///{directory}/results", restore)


def in_files(directory: Path) -> Transport:
    """Files that have their names only once they are complete, as documented."""
    queue, processed, results = (directory / name for name in ("queue", "processed", "results"))
    for folder in (queue, processed, results):
        folder.mkdir()

    def restore() -> None:
        for message in processed.glob("*.msg"):
            shutil.move(message, queue)

    options = {
        "data_folder_in": str(queue),
        "data_folder_out": str(queue),
        "control_folder": str(directory / "control"),
        "processed_folder": str(processed),
        "store_processed": True,
        "polling_interval": 0.1,
    }
    return Transport(register(), options, f"file://{results}", restore)


@pytest.fixture(scope="module", params=[in_a_table, in_files], ids=lambda made: made.__name__)
def transport(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Transport:
    made: Transport = request.param(tmp_path_factory.mktemp("broker"))
    return made


@pytest.fixture(scope="module")
def site(transport: Transport, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(
        None,
        tmp_path_factory.mktemp("site"),
        locks=DATABASE,
        broker=transport.url,
        transport=transport.options,
        results=transport.results,
        settings=SETTINGS,
    ) as site:
        site.worker("prefork")
        site.worker("threads")
        yield site


def begun(place: Place, order: int) -> int:
    """The process of a body that has begun."""
    return int(place.wait(f"began-{order}")[0].split()[1])


def waiting(site: Site, queue: str) -> int:
    """How many messages the broker still has."""
    with site.app.connection_for_read() as connection:
        found = connection.default_channel.queue_declare(queue, passive=True)
        return int(found.message_count)


def worker_of(site: Site, queue: str) -> Worker:
    """A worker with its own queue; the test ends it."""
    return site.worker("prefork", 1, "-Q", queue)


def test_a_requeued_message_is_the_same_message(site, place, order):
    hold(site, order)
    before = requeues(site)
    sent = site.send(
        "tells",
        order,
        str(place),
        queue="prefork",
        countdown=0.2,
        expires=3600,
        time_limit=90,
        soft_time_limit=80,
        headers={"mine": "kept"},
    )
    eventually(lambda: requeues(site) >= before + 2)
    assert sent.state == "RETRY"
    let_go(site, order)
    assert result(sent) == order
    told = json.loads(place.wait(f"told-{order}")[0])
    # Properties that the transport does not keep, and times.
    del told["priority"]
    assert told.pop("expires") is not None
    assert told == {
        "id": sent.id,
        "correlation_id": sent.id,
        "retries": 0,
        "root": sent.id,
        "parent": None,
        "mine": "kept",
        "limits": [90, 80],
    }


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_g12_copies_at_once_take_effect_once(site, place, order, pool):
    sent = [site.send("charge", order, str(place), queue=pool) for _ in range(4)]
    assert [result(each) for each in sent] == [1, 1, 1, 1]
    assert site.effects(order) == 1


def test_g13_the_messages_of_killed_children_are_redelivered(site, place):
    """While others arrive: a table is read through one session, which threads cannot share."""
    killed = [next(orders) for _ in range(4)]
    sent = {}
    for order in killed:
        sent[order] = site.send("charge", order, str(place), "never", queue="prefork")
        for other in (next(orders) for _ in range(5)):
            sent[other] = site.send("charge", other, str(place), queue="prefork")
    for order in killed:
        os.kill(begun(place, order), signal.SIGKILL)
    # Celery takes long on a busy machine: four children are killed one by one.
    assert {order: result(each, 2 * PATIENCE) for order, each in sent.items()} == {
        order: 2 if order in killed else 1 for order in sent
    }
    assert {site.effects(order) for order in sent} == {1}


def test_g13_the_message_of_a_body_that_lost_its_lock_is_redelivered(site, place, order):
    sent = site.send("charge", order, str(place), "never", queue="threads")
    begun(place, order)
    site.break_lock(order)
    assert result(sent) == 2
    assert site.effects(order) == 1


def test_g13_a_cold_shutdown_loses_nothing(site, place, order):
    """Unlike after a kill, the worker itself returns its unfinished messages."""
    worker = worker_of(site, "cold")
    sent = site.send("charge", order, str(place), "never", queue="cold")
    begun(place, order)
    worker.process.send_signal(signal.SIGQUIT)
    # Next, billiard ends its processes, and may wait for one of them forever.
    eventually(lambda: "Restoring 1 unacknowledged" in worker.output)
    eventually(lambda: waiting(site, "cold") == 1)
    worker.kill()
    worker_of(site, "cold")
    assert result(sent) == 2
    assert site.effects(order) == 1


def test_a_warm_shutdown_acknowledges_the_runs_it_waited_for(site, place, order):
    worker = worker_of(site, "warm")
    sent = site.send("charge", order, str(place), "go", queue="warm")
    begun(place, order)
    worker.process.terminate()
    eventually(lambda: "Warm shutdown" in worker.output)
    place.open("go")
    worker.process.wait(30)
    assert result(sent) == 1
    assert waiting(site, "warm") == 0
    assert site.effects(order) == 1


def test_the_messages_of_a_killed_worker_are_missing_until_they_are_restored(
    site, transport, place, order
):
    """As documented. When the messages arrive again, the record knows which runs are done."""
    worker = worker_of(site, "killed")
    done = site.send("charge", order, str(place), queue="killed")
    assert result(done) == 1
    lost = next(orders)
    sent = site.send("charge", lost, str(place), "never", queue="killed")
    begun(place, lost)
    worker.kill()
    assert waiting(site, "killed") == 0
    transport.restore()
    assert waiting(site, "killed") >= 2
    other = worker_of(site, "killed")
    assert result(sent) == 2
    eventually(lambda: f"[{done.id}] is a duplicate" in other.output)
    assert site.effects(order) == site.effects(lost) == 1
