"""What the admin says of real processes that were killed, and that it comes true."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client

from django_dlock import locks
from django_dlock.models import IdempotencyRecord
from testproject.celery import app as usual
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.databases import added
from tests.support.workers import ROOT, Site, eventually, orders, sqlite

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.extended,
]

RECORDS = "/admin/django_dlock/idempotencyrecord/"
ALIAS = {"BACKEND": "django_dlock.backends.redis.RedisBackend", "TTL": 60.0}

VIEW = """
import sys
import django
django.setup()
from django.http import HttpResponse
from django.test import RequestFactory
from django_dlock import idempotent_view

@idempotent_view(client=lambda request: "7")
def pay(request):
    print("began", flush=True)
    sys.stdin.read()
    return HttpResponse("paid")

pay(RequestFactory().post("/pay/", headers={"Idempotency-Key": sys.argv[1]}))
"""


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    try:
        with RedisServer() as server:
            yield server
    except ServerNotFound as error:
        missing(str(error))


# For the module, because which databases a test may use is decided before its own fixtures run.
@pytest.fixture(scope="module")
def running_site(
    redis: RedisServer, tmp_path_factory: pytest.TempPathFactory, django_db_setup: None
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    with (
        Site(redis, directory, settings={"DLOCKS": dlocks(redis)}) as site,
        added("site", sqlite(directory / "db.sqlite3")),
    ):
        yield site


def dlocks(redis: RedisServer) -> dict[str, Any]:
    return {"default": {**ALIAS, "LOCATION": redis.url}}


@pytest.fixture
def site(running_site: Site, redis: RedisServer, settings: Any) -> Iterator[Site]:
    """Workers, and this process as the web server of the same project."""
    settings.DLOCKS = dlocks(redis)
    locks.reset()
    running_site.app.set_current()
    yield running_site
    for worker in running_site.workers:
        worker.stop()
    running_site.workers.clear()
    usual.set_current()
    locks.reset()


def text_of(client: Client, path: str, **filters: str) -> str:
    query = "&".join(f"{name}={value}" for name, value in {"database": "site", **filters}.items())
    page = client.get(f"{path}?{query}").content.decode()
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def page_of(pk: int, page: str = "change") -> str:
    return f"{RECORDS}{pk}/{page}/?_changelist_filters=database%3Dsite"


def only() -> IdempotencyRecord:
    return IdempotencyRecord.objects.using("site").get()


def test_a_killed_worker_is_shown_and_its_message_does_what_the_page_says(
    site: Site, admin_client: Client
) -> None:
    order, place = next(orders), site.place()
    worker = site.worker()
    site.send("charge", order, str(place), "never")
    place.wait(f"wrote-{order}")
    assert "interrupted its process" not in text_of(admin_client, RECORDS)
    assert "0 idempotency records" in text_of(admin_client, RECORDS, run="interrupted")
    worker.kill()
    listed = text_of(admin_client, RECORDS, run="interrupted")
    assert "interrupted its process is gone delivered again at about" in listed
    it = only()
    assert (it.key, it.state) == (str(order), "running")
    page = admin_client.get(page_of(it.pk, "rerun")).content.decode()
    assert "finds the outcome of the first" in page
    # The operator does not wait for the broker.
    answers = {"attempt": it.attempt, "state": it.state, "owner": it.owner}
    admin_client.post(page_of(it.pk, "rerun"), answers)
    assert site.locks.break_(it.lock_name, owner=it.owner)
    # Otherwise the new task would wait for a gate, too.
    place.open("never")
    site.worker()
    eventually(lambda: site.effects(order) == 1)
    site.redeliver()
    # The old message is acknowledged as a duplicate of the new one.
    eventually(lambda: not _unacknowledged(site))
    assert site.effects(order) == 1
    assert only().task_id != it.task_id


def _unacknowledged(site: Site) -> int:
    with site.app.connection_for_read() as connection:
        client = connection.default_channel.client
        return int(client.hlen("unacked")) + int(client.llen("celery"))


def test_a_killed_child_is_shown_until_its_message_comes_again(
    site: Site, admin_client: Client
) -> None:
    """The parent breaks the lock at once; nobody can prove any more that the child is dead."""
    order, place = next(orders), site.place()
    worker = site.worker(concurrency=1)
    site.send("charge", order, str(place), "never")
    (line,) = place.wait(f"began-{order}")
    place.wait(f"wrote-{order}")
    # Killed with its parent stopped, so that nothing happens before the page is read.
    os.kill(worker.process.pid, signal.SIGSTOP)
    os.kill(int(line.split()[1]), signal.SIGKILL)
    eventually(lambda: "its process is gone" in text_of(admin_client, RECORDS))
    it = only()
    assert site.locks.break_(it.lock_name, owner=it.owner)
    assert "interrupted it holds its lock no longer" in text_of(admin_client, RECORDS)
    page = admin_client.get(page_of(it.pk)).content.decode()
    assert "so its process is probably gone" in page
    place.open("never")
    os.kill(worker.process.pid, signal.SIGCONT)
    eventually(lambda: only().state == "succeeded")
    assert "interrupted its process" not in text_of(admin_client, RECORDS)
    assert site.effects(order) == 1


def test_a_killed_web_process_is_shown(site: Site, admin_client: Client) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", VIEW, "key-1"],
        cwd=ROOT,
        env=site.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "began\n"
        assert "interrupted its process" not in text_of(admin_client, RECORDS)
    finally:
        server.kill()
        server.communicate()
    shown = text_of(admin_client, RECORDS)
    assert "interrupted its process is gone not delivered again" in shown
    page = admin_client.get(page_of(only().pk)).content.decode()
    assert "its client sends the request again" in page
