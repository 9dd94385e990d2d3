"""Which files an acquire and a delivery enter: those that the page on the architecture names."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from celery import Celery

import django_dlock
from django_dlock import Lock
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured
from tests.support.deliveries import in_memory, recorded, states, work

PACKAGE = Path(django_dlock.__file__).parent
PAGE = PACKAGE.parent / "contributing" / "architecture.md"
MOST = 12
"""Files on the longest way of an acquire; a delivery may have as many of its own."""


def section(start: str, end: str) -> str:
    return PAGE.read_text().partition(start)[2].partition(end)[0]


def drawing(text: str) -> str:
    """The first drawing of a section."""
    return text.partition("```text\n")[2].partition("```")[0]


def named(text: str) -> set[str]:
    return set(re.findall(r"[\w/]+\.py", text))


def entered(function: Callable[[], object]) -> set[str]:
    """The files of the package in which this thread calls a function."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    inside = [Path(name) for name in found if name.startswith(f"{PACKAGE}/")]
    return {str(file.relative_to(PACKAGE)) for file in inside}


def not_named(files: set[str], names: set[str]) -> set[str]:
    return {file for file in files if not any(f"/{file}".endswith(f"/{name}") for name in names)}


ACQUIRE = "An acquire on Redis that finds the name free"
DELIVERY = "A delivery of a task with a record passes through"


@pytest.fixture
def redis_alias(own_redis: RedisServer) -> Iterator[None]:
    entry = alias(own_redis.url, TTL=30.0)
    with configured({"default": entry, "other": entry}):
        # The first lock of a process imports modules, which is no part of the way.
        with Lock("first", using="other"):
            pass
        yield


def test_an_acquire_enters_no_file_that_the_page_does_not_name(redis_alias: None) -> None:
    names = named(section(ACQUIRE, "`celery/` is divided"))
    lock = Lock("it", bound=False)
    assert not_named(entered(lock.acquire), names) == set()
    lock.release()
    locks: list[Lock] = []

    def construct_and_acquire() -> None:
        locks.append(Lock("it", bound=False))
        assert locks[-1].acquire(timeout=30)

    assert not_named(entered(construct_and_acquire), names) == set()
    releasing = threading.Timer(0.2, locks[0].release)
    releasing.start()
    assert not_named(entered(construct_and_acquire), names) == set()
    releasing.join()
    locks[-1].release()


@pytest.mark.django_db(transaction=True)
def test_a_delivery_enters_no_file_that_the_page_does_not_name() -> None:
    # Not the tree of ``celery/`` that stands between them: it names every file.
    acquire, delivery = section(ACQUIRE, "`celery/` is divided"), section(DELIVERY, "## Where")
    names = named(acquire) | named(delivery)
    with in_memory() as app:
        files = _files_of_a_delivery(app)
    ours = {file for file in files if file.startswith("celery/") or "/" not in file}
    assert "celery/delivery/recorded_run.py" in ours
    assert not_named(ours, names) == set()


def _files_of_a_delivery(app: Celery) -> set[str]:
    made = recorded(app)
    for order in (1, 2):
        made.delay(order)
    # The first one also fills caches.
    work(app)
    files = entered(lambda: work(app))
    assert states() == ["succeeded"] * 2
    return files


@pytest.mark.parametrize("start", [ACQUIRE, DELIVERY])
def test_the_way_that_is_drawn_has_at_most_twelve_files(start: str) -> None:
    assert 0 < len(named(drawing(section(start, "## Layers")))) <= MOST
