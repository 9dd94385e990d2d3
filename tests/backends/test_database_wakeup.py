"""Notifications of hand-overs reach the waiters after cuts, forks and dropped messages."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
import psycopg2
import pytest

from django_dlock.backends.database import listener as module
from django_dlock.backends.database.pending_notification import PendingNotification
from django_dlock.backends.database.wakeup import Wakeup
from tests.support.points import Heard, heard
from tests.support.proxy import Proxy

PATIENCE = 20.0
NAME = "dlock listens"
"""The application name of the listening connections at the server."""


def by_psycopg2(url: str, **options: Any) -> Any:
    connection = psycopg2.connect(url, **options)
    connection.autocommit = True
    return connection


DRIVERS: dict[str, Callable[..., Any]] = {
    "psycopg": partial(psycopg.connect, autocommit=True),
    "psycopg2": by_psycopg2,
}


class Database:
    """What a test does at the server, and what the backend does through ordinary connections."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection = psycopg.connect(url, autocommit=True)
        self.close = self._connection.close

    def notify(self, channel: str, payload: str) -> None:
        self._connection.execute("SELECT pg_notify(%s, %s)", (channel, payload))

    def listeners(self) -> list[int]:
        found = self._connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s", (NAME,)
        )
        return [pid for (pid,) in found]

    def terminate(self) -> None:
        for pid in self.listeners():
            self._connection.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))


@pytest.fixture
def database(postgres_url: str) -> Iterator[Database]:
    with closing(Database(postgres_url)) as it:
        yield it


@pytest.fixture
def make(database: Database) -> Iterator[Callable[..., Wakeup]]:
    """Makes a ``Wakeup`` for the database, directly or through another address."""
    made: list[Wakeup] = []

    def make(url: str = database.url, driver: str = "psycopg", **options: Any) -> Wakeup:
        connect = partial(DRIVERS[driver], url, application_name=options.pop("name", NAME))
        made.append(Wakeup(connect, options.pop("probe", database.notify), **options))
        return made[-1]

    yield make
    for it in made:
        it.close()
    until(lambda: not database.listeners())


@pytest.fixture(params=DRIVERS)
def wakeup(request: pytest.FixtureRequest, make: Callable[..., Wakeup]) -> Wakeup:
    """One that already listens, for each driver."""
    it = make(driver=request.param)
    listening(it)
    return it


def until(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def never() -> bool:
    return False


class Asking:
    """A waiter that registers for each wait anew, as one that asks the database again."""

    def __init__(self, wakeup: Wakeup, owner: str) -> None:
        self._wakeup, self.owner = wakeup, owner
        self.pending: PendingNotification | None = wakeup.pending(owner)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exc: object) -> None:
        self.pending = None

    def listen(self) -> None:
        assert self.pending is not None
        self.pending.listen()

    def _asks_again(self) -> PendingNotification:
        pending, self.pending = self.pending, None
        assert pending is not None
        return pending

    def wait(self, timeout: float, interrupted: Callable[[], bool] = never) -> str | None:
        payload = self._asks_again().wait(timeout, interrupted)
        self.pending = self._wakeup.pending(self.owner)
        return payload

    async def async_wait(
        self, timeout: float, interrupted: Callable[[], bool] = never
    ) -> str | None:
        payload = await self._asks_again().async_wait(timeout, interrupted, lambda: None)
        self.pending = self._wakeup.pending(self.owner)
        return payload

    def notified(self, database: Database, payload: str) -> None:
        """It receives the payload; at first it may ask again, because the process listens anew."""
        for _ in range(3):
            database.notify(self._wakeup.channel, payload)
            if (received := self.wait(10 * PATIENCE)) is not None:
                break
        assert received == payload


def listening(wakeup: Wakeup) -> None:
    with Asking(wakeup, "nobody's") as pending:
        give_up_at = time.monotonic() + PATIENCE
        while not wakeup.subscribed:
            assert time.monotonic() < give_up_at
            assert pending.wait(PATIENCE) is None


def on_a_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Run it on a thread; the returned function waits for the result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE)
        assert results, "still waiting, or raised"
        return results[0]

    return result


@pytest.fixture
def asleep() -> Iterator[Heard]:
    """Who waits, and would be woken."""
    with heard("wait.asleep") as it:
        yield it


@pytest.fixture
def listener_threads() -> Callable[[], list[threading.Thread]]:
    """The listening threads that began in this test; those of earlier tests may still linger."""
    earlier = set(threading.enumerate())

    def threads() -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread.name == "dlock-listener-postgresql" and thread not in earlier
        ]

    return threads


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The levels of what the listener has logged."""
    return [record.levelname for record in caplog.records if record.module == "listener"]


# -- which waiter is woken ----------------------------------------------------------------------


def test_a_waiting_thread_is_woken_by_the_notification_of_its_ticket(wakeup, database, asleep):
    with Asking(wakeup, "t1") as pending, Asking(wakeup, "t2") as other:
        result = on_a_thread(lambda: pending.wait(PATIENCE))
        asleep.wait(waiter="t1")
        database.notify(wakeup.channel, "t1 token and all")
        assert result() == "t1 token and all"
        database.notify(wakeup.channel, "t2")
        assert other.wait(PATIENCE) == "t2"


async def test_a_waiting_coroutine_is_woken_by_the_notification_of_its_ticket(
    wakeup, database, asleep
):
    with Asking(wakeup, "t1") as pending:
        waiting = asyncio.create_task(pending.async_wait(PATIENCE))
        await asyncio.to_thread(asleep.wait, waiter="t1")
        database.notify(wakeup.channel, "t1 x")
        assert await waiting == "t1 x"


def test_g4_a_notification_that_comes_before_the_wait_is_kept(wakeup, database):
    with Asking(wakeup, "t1") as early, Asking(wakeup, "t2") as later:
        database.notify(wakeup.channel, "t1 x")
        database.notify(wakeup.channel, "t2 x")
        assert later.wait(PATIENCE) == "t2 x"
        # An older notification, which arrived before this wait.
        assert early.wait(0.0) == "t1 x"


def test_g4_a_waiter_from_before_listening_began_asks_again(make, database):
    wakeup = make()
    with Asking(wakeup, "t1") as pending:
        # Sent before the process listens, so it is lost.
        database.notify(wakeup.channel, "t1 x")
        pending.listen()
        until(lambda: wakeup.subscribed)
        assert pending.wait(PATIENCE) is None
        database.notify(wakeup.channel, "t1 y")
        assert pending.wait(PATIENCE) == "t1 y"


def test_a_wait_ends_with_its_timeout_and_when_it_is_interrupted(wakeup):
    with Asking(wakeup, "t1") as pending:
        assert pending.wait(0.0) is None
        assert pending.wait(PATIENCE, interrupted=lambda: True) is None
        assert asyncio.run(pending.async_wait(0.0)) is None
        assert asyncio.run(pending.async_wait(PATIENCE, lambda: True)) is None


def test_a_notification_without_a_waiter_is_dropped(wakeup, database):
    database.notify(wakeup.channel, "gone x")
    with Asking(wakeup, "t1") as left, Asking(wakeup, "t2") as last:
        left.pending = None
        database.notify(wakeup.channel, "t1 x")
        database.notify(wakeup.channel, "t2 x")
        assert last.wait(PATIENCE) == "t2 x"


# -- one connection --------------------------------------------------------------------


def test_a_thousand_waiters_share_one_connection_and_one_thread(
    listener_threads, wakeup, database, asleep
):
    loops, threads, each = 3, 100, 300

    async def coroutines(number: int) -> list[str | None]:
        with ExitStack() as stack:
            expected = [
                stack.enter_context(Asking(wakeup, f"c{number}-{index}")) for index in range(each)
            ]
            return await asyncio.gather(*(it.async_wait(PATIENCE) for it in expected))

    def thread(number: int) -> str | None:
        with Asking(wakeup, f"t{number}") as pending:
            return pending.wait(PATIENCE)

    in_loops = [on_a_thread(lambda n=n: asyncio.run(coroutines(n))) for n in range(loops)]
    in_threads = [on_a_thread(lambda n=n: thread(n)) for n in range(threads)]
    expected = {f"c{number}-{index}" for number in range(loops) for index in range(each)}
    expected |= {f"t{number}" for number in range(threads)}
    asleep.until(lambda it: expected <= it.each("waiter"))
    assert len(database.listeners()) == len(listener_threads()) == 1
    for ticket in expected:
        database.notify(wakeup.channel, f"{ticket} x")
    assert [result() for result in in_threads] == [f"t{n} x" for n in range(threads)]
    for number, result in enumerate(in_loops):
        assert result() == [f"c{number}-{index} x" for index in range(each)]


def test_the_thread_ends_after_the_last_waiter_and_starts_again(listener_threads, make, database):
    wakeup = make(linger=0.05)
    for _ in range(3):
        # Nobody may leave before the connection was seen.
        with Asking(wakeup, "somebody's"):
            listening(wakeup)
            assert database.listeners()
        until(lambda: not (database.listeners() or listener_threads()))
        assert wakeup.works
        assert not wakeup.subscribed


def test_closing_ends_the_thread_and_wakes_its_waiters(wakeup, database, asleep):
    with Asking(wakeup, "t1") as pending:
        result = on_a_thread(lambda: pending.wait(PATIENCE))
        asleep.wait(waiter="t1")
        wakeup.close()
        assert result() is None
        # A new wait makes it listen again.
        assert pending.wait(PATIENCE) is None
        until(lambda: wakeup.subscribed)


async def test_g7_a_cancelled_wait_leaves_nothing(make, database):
    wakeup = make()
    listening(wakeup)

    async def wait() -> None:
        with Asking(wakeup, "t1") as pending:
            await pending.async_wait(PATIENCE)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    with heard("listener.message") as read, Asking(wakeup, "t2"):
        # The loop does not run before both have happened.
        database.notify(wakeup.channel, "t1 x")
        read.wait(waiter="t1")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        # Nobody is there any more for whom a message would be kept.
        database.notify(wakeup.channel, "t1 y")
        database.notify(wakeup.channel, "t2 y")
        read.wait(waiter="t2")
        assert read.count(waiter="t1") == 1


def test_g7_a_caller_that_never_waits_leaves_no_place(wakeup, database):
    pending = wakeup.pending("gone")
    with heard("listener.message") as read, Asking(wakeup, "t1") as other:
        database.notify(wakeup.channel, "gone x")
        read.wait(waiter="gone")
        del pending
        database.notify(wakeup.channel, "gone x")
        database.notify(wakeup.channel, "t1 x")
        assert other.wait(PATIENCE) == "t1 x"
        assert read.count(waiter="gone") == 1


def test_a_closed_loop_does_not_disturb_other_waiters(wakeup, database):
    loop = asyncio.new_event_loop()
    pending = Asking(wakeup, "t1")
    task = loop.create_task(pending.async_wait(PATIENCE))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    with Asking(wakeup, "t2") as other:
        database.notify(wakeup.channel, "t1 x")
        database.notify(wakeup.channel, "t2 x")
        assert other.wait(PATIENCE) == "t2 x"
    task._log_destroy_pending = False


# -- faults ----------------------------------------------------------------------------


def test_g4_the_end_of_the_connection_wakes_all_waiters_and_it_is_replaced(
    wakeup, database, asleep
):
    with Asking(wakeup, "t1") as one, Asking(wakeup, "t2") as two:
        results = [on_a_thread(lambda it=it: it.wait(10 * PATIENCE)) for it in (one, two)]
        asleep.until(lambda it: {"t1", "t2"} <= it.each("waiter"))
        (before,) = database.listeners()
        database.terminate()
        assert [result() for result in results] == [None, None]
        until(lambda: wakeup.subscribed)
        assert wakeup.works
        for pending in (one, two):
            pending.notified(database, f"{pending.owner} x")
        (after,) = database.listeners()
        assert after != before


def test_g10_waiters_poll_while_the_process_cannot_listen(make, database, caplog):
    with Proxy("127.0.0.1", urlsplit(database.url).port, speaks="postgres") as proxy:
        wakeup = make(
            urlsplit(database.url)._replace(netloc=f"postgres@127.0.0.1:{proxy.port}").geturl()
        )
        listening(wakeup)
        with Asking(wakeup, "t1") as pending:
            proxy.refuse()
            until(lambda: not wakeup.works)
            # Once it knows that.
            assert pending.wait(PATIENCE) is None
            began = time.monotonic()
            assert pending.wait(PATIENCE) is None
            assert time.monotonic() - began < PATIENCE / 2
            proxy.accept()
            until(lambda: wakeup.subscribed)
            assert wakeup.works
    assert levels(caplog) == ["WARNING"]


def test_g4_a_connection_that_delivers_nothing_is_noticed(make, database, monkeypatch):
    # The default is several seconds.
    monkeypatch.setattr(module, "SILENCE", 0.05)
    with Proxy("127.0.0.1", urlsplit(database.url).port, speaks="postgres") as proxy:
        wakeup = make(
            urlsplit(database.url)._replace(netloc=f"postgres@127.0.0.1:{proxy.port}").geturl()
        )
        listening(wakeup)
        with Asking(wakeup, "t1") as pending:
            # The connection works, so it is kept.
            before = database.listeners()
            with heard("listener.tested") as tested, heard("listener.failed") as failed:
                tested.wait(2)
            assert not failed.count()
            assert database.listeners() == before
            monkeypatch.setattr(module, "ECHO_PATIENCE", 0.2)
            proxy.black_hole()
            assert pending.wait(PATIENCE) is None
            assert not wakeup.subscribed


def test_g4_a_pooler_that_drops_notifications_is_noticed(make, database, pooler, caplog):
    through = Database(pooler.url_for(database.url))
    with closing(through):
        # The pooler keeps its own connection.
        wakeup = make(through.url, name="pooled", probe=through.notify, test_again_after=0.2)
        with Asking(wakeup, "t1") as pending:
            assert not wakeup.subscribed
            pending.listen()
            until(lambda: not wakeup.works)
            assert pending.wait(PATIENCE) is None
            assert not wakeup.subscribed
            # It tries again, in case the cause was something else.
            with heard("listener.failed") as failed:
                failed.wait()
            assert not wakeup.works
            assert not wakeup.subscribed
    assert levels(caplog) == ["WARNING"]


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("listener.Alarm", OSError(errno.EMFILE, "Too many open files")),
        ("listener.ListeningConnection", MemoryError()),
        ("listener.secrets.token_hex", RuntimeError("anything")),
        ("listen_connection.selectors.DefaultSelector", OSError(errno.EMFILE, "Too many")),
        ("listen_connection.socket.socketpair", OSError(errno.ENFILE, "Too many")),
        ("listener.threading.Thread.start", RuntimeError("can't start new thread")),
    ],
)
def test_g4_whatever_cannot_be_made_waiters_poll_until_it_can(
    make, database, monkeypatch, place, error
):
    wakeup, failed = make(), threading.Event()

    def fails(*args: Any, **kwargs: Any) -> Any:
        failed.set()
        raise error

    # What a thread raises fails the test: it must not die.
    with monkeypatch.context() as patch:
        patch.setattr(f"django_dlock.backends.database.{place}", fails)
        with Asking(wakeup, "t1") as pending:
            for _ in range(2):
                assert pending.wait(10 * PATIENCE) is None
            assert failed.wait(PATIENCE)
            patch.undo()
            while not wakeup.subscribed:
                assert pending.wait(10 * PATIENCE) is None
            pending.notified(database, "t1 x")


NO_FILES = """
import functools, os, resource, sys, threading, psycopg
from django_dlock.backends.database.connection import Connection, Failure
from django_dlock.backends.database.socket_handle import handle_of
from django_dlock.backends.database.wakeup import Wakeup

connect = functools.partial(psycopg.connect, sys.argv[1], autocommit=True)
ordinary, slow = connect(), connect()
notify = lambda *args: ordinary.execute("SELECT pg_notify(%s, %s)", args)
wakeup = Wakeup(connect, notify)
# Loaded now: its file could not be opened later.
threading.Thread(target=lambda: None).start()
cut = Connection(slow, psycopg, handle=handle_of(slow, psycopg))
free = os.open(os.devnull, os.O_RDONLY)
os.close(free)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))

# A call is cut all the same.
threading.Timer(0.2, cut.cut).start()
try:
    cut.rows("SELECT pg_sleep(60)")
except Failure as failure:
    assert failure.kind == "broken", failure.kind
else:
    raise AssertionError("not cut")
def wait():
    return wakeup.pending("t1").wait(600, lambda: False)

while wakeup.works:
    assert wait() is None
assert wait() is None
(thread,) = (t for t in threading.enumerate() if t.name == "dlock-listener-postgresql")
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
while not wakeup.subscribed:
    assert wait() is None
assert thread.is_alive()
received = None
while received is None:
    pending = wakeup.pending("t1")
    notify(wakeup.channel, "t1 x")
    received = pending.wait(600, lambda: False)
assert received == "t1 x"
wakeup.close()
"""


def test_g10_a_process_without_free_files_polls_until_it_has_some(postgres_url):
    command = [sys.executable, "-W", "error", "-c", NO_FILES, postgres_url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("waiters poll") == 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_g8_a_forked_child_listens_on_its_own_connection_only(make, database, driver):
    def probe(*args: str) -> None:
        # A connection for each process.
        with closing(Database(database.url)) as own:
            own.notify(*args)

    wakeup = make(driver=driver, probe=probe)
    listening(wakeup)
    (before,), channel = database.listeners(), wakeup.channel
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            wakeup.forget()
            assert wakeup.channel != channel
            listening(wakeup)
            with Asking(wakeup, "child") as pending:
                Database(database.url).notify(wakeup.channel, "child x")
                status = 0 if pending.wait(PATIENCE) == "child x" else 2
            wakeup.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with Asking(wakeup, "t1") as pending:
        database.notify(channel, "t1 x")
        assert pending.wait(PATIENCE) == "t1 x"
    until(lambda: database.listeners() == [before])


def test_g8_the_server_notices_the_end_of_a_process_whose_child_still_runs(make, database):
    # Its child runs until the test closes the other end.
    end, keep = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(keep)
        wakeup = Wakeup(
            partial(psycopg.connect, database.url, autocommit=True, application_name=NAME),
            lambda *args: Database(database.url).notify(*args),
        )
        listening(wakeup)
        read, write = os.pipe()
        if os.fork() == 0:
            wakeup.forget()
            os.write(write, b".")
            os.read(end, 1)
            os._exit(0)
        os.read(read, 1)
        os._exit(0)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        until(lambda: not database.listeners())
    finally:
        os.close(keep)
        os.close(end)


GREENLETS = """
import gevent.monkey
gevent.monkey.patch_all()
import functools, sys, gevent, psycopg
from django_dlock.backends.database.wakeup import Wakeup

connect = functools.partial(psycopg.connect, sys.argv[1], autocommit=True)
ordinary = connect()
notify = lambda *args: ordinary.execute("SELECT pg_notify(%s, %s)", args)
wakeup = Wakeup(connect, notify)

def wait(ticket):
    while (payload := wakeup.pending(ticket).wait(20, lambda: False)) is None:
        pass
    return payload

waiting = [gevent.spawn(wait, f"t{number}") for number in range(10)]
# One that asks again just now gets the next.
while not all(one.ready() for one in waiting):
    for number in range(10):
        notify(wakeup.channel, f"t{number} x")
    gevent.sleep(0.05)
assert [one.get(timeout=20) for one in waiting] == [f"t{number} x" for number in range(10)]
wakeup.close()
"""


def test_greenlets_can_wait(postgres_url):
    command = [sys.executable, "-W", "error", "-c", GREENLETS, postgres_url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_stranger_cannot_hide_the_test_notification(make, database, driver):
    # It hears the channel and answers at once.
    statement = "SELECT pg_notify(%s, %s), pg_notify(%s, ' of a stranger')"

    def probe(channel: str, payload: str) -> None:
        with closing(psycopg.connect(database.url, autocommit=True)) as stranger:
            stranger.execute(statement, (channel, payload, channel))

    wakeup = make(driver=driver, probe=probe)
    listening(wakeup)
    assert wakeup.works


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_payload_in_another_encoding_does_not_end_the_listening(make, database, driver):
    mark = "&" if "?" in database.url else "?"
    wakeup = make(f"{database.url}{mark}client_encoding=LATIN1", driver=driver)
    listening(wakeup)
    with Asking(wakeup, "t1") as pending:
        database.notify(wakeup.channel, "stranger \u00e9")
        database.notify(wakeup.channel, "t1 x")
        assert pending.wait(PATIENCE) == "t1 x"
