"""A worker's parent process writes lock events while it forks new children."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from django_dlock.operators import audit

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PATIENCE = 10.0


class Writer:
    """Writes a row on a separate thread; the write lasts until ``go``."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._under_way, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=audit._try_to_record, args=("lost",), kwargs={"name": "x", "alias": "y"}
        )

    def record(self, *args: object, **facts: object) -> None:
        self._under_way.set()
        assert self._may_end.wait(PATIENCE)
        self.order.append("written")

    def start(self) -> None:
        self._thread.start()
        assert self._under_way.wait(PATIENCE)

    def go(self) -> None:
        self._may_end.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def fork(self) -> None:
        forked(lambda: None)
        self.order.append("forked")


def forked(work: Callable[[], None]) -> None:
    """Run it in a forked child, which must succeed."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    made = Writer()
    monkeypatch.setattr(audit, "record", made.record)
    made.start()
    yield made
    made.go()


def test_no_process_is_forked_while_a_row_is_written_to_sqlite(writer: Writer) -> None:
    """The child would see SQLite locks held by a thread that it does not have."""
    forker = threading.Thread(target=writer.fork)
    forker.start()
    forker.join(0.3)
    writer.go()
    forker.join(PATIENCE)
    assert writer.order == ["written", "forked"]


def test_a_slow_write_delays_a_fork_only_for_a_limited_time(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "FORK_WAITS", 0.05)
    writer.fork()
    writer.go()
    assert writer.order == ["forked", "written"]


def test_parent_and_child_can_write_after_the_fork(writer: Writer) -> None:
    def write() -> None:
        with audit.not_while_forking("default"):
            pass

    writer.go()
    forked(write)
    write()


def test_a_child_that_was_forked_during_a_write_can_write(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "FORK_WAITS", 0.05)

    def write() -> None:
        assert audit._open.acquire(timeout=PATIENCE)

    forked(write)
