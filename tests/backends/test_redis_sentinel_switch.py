"""Sentinels name another master while the old one still answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from django_dlock import BackendUnavailable, LeaseLost, Lock, clock, locks, signals
from django_dlock.backends.redis.connection import Connection
from django_dlock.process import current
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.aliases import LONG, alias, configured
from tests.support.databases import until
from tests.support.points import stop_at
from tests.support.proxy import Proxy
from tests.support.redis_calls import backend_for, calls, client, grant, renewals, request
from tests.support.redis_sentinel import LOCATION, DividedSentinels, RedisSentinel

TTL = 3.0


@pytest.fixture(scope="module")
def servers() -> Iterator[DividedSentinels]:
    try:
        with DividedSentinels() as servers:
            yield servers
    except ServerNotFound as error:
        missing(str(error))


class Bed:
    """The servers without locks, and the Sentinels behind proxies.

    Attributes:
        lagging: A Sentinel that still names the old master.
        leading: The one that names the new master; refuses connections at first.
    """

    def __init__(self, servers: DividedSentinels) -> None:
        self.old, self.new = servers.old, servers.new
        self.sentinel = servers.old_sentinel
        self.lagging = Proxy("127.0.0.1", servers.old_sentinel.port)
        self.leading = Proxy("127.0.0.1", servers.new_sentinel.port)
        self.leading.refuse()
        for server in (self.old, self.new):
            with client(server) as asking:
                asking.flushall()
                asking.config_resetstat()

    def entry(self, *sentinels: Proxy) -> dict[str, Any]:
        """An alias that knows these Sentinels."""
        options = {"sentinels": self.places(*sentinels), "command_timeout": 1.0}
        return alias(LOCATION, TTL=TTL, OPTIONS=options)

    def places(self, *sentinels: Proxy) -> list[tuple[str, int]]:
        return [("127.0.0.1", one.port) for one in sentinels or (self.lagging, self.leading)]

    def asked(self, sentinel: Proxy) -> int:
        """How often it was asked for the master."""
        # A question is two commands.
        return sentinel.count("SENTINEL") // 2


@pytest.fixture
def bed(servers: DividedSentinels) -> Iterator[Bed]:
    bed = Bed(servers)
    with bed.lagging, bed.leading:
        yield bed


def scripts(server: RedisServer) -> int:
    """How many of our commands the server has run."""
    return sum(count for name, count in calls(server).items() if name in ("eval", "evalsha"))


@contextlib.contextmanager
def renewed() -> Iterator[list[str]]:
    """The names of the locks that were renewed."""
    names: list[str] = []

    def note(name: str, **kwargs: Any) -> None:
        names.append(name)

    signals.renewed.connect(note)
    try:
        yield names
    finally:
        signals.renewed.disconnect(note)


@pytest.mark.parametrize("replicas", [0, 1])
def test_g2_a_holder_leaves_an_old_master_that_still_answers(bed, replicas):
    with contextlib.ExitStack() as stack:
        entry = bed.entry()
        if replicas:
            # Replicas of the old master confirm what the new one does not know.
            args = ["--replicaof", "127.0.0.1", str(bed.old.port)]
            stack.enter_context(RedisServer(args=args))
            asking = stack.enter_context(client(bed.old))
            until(lambda: asking.info("replication").get("slave0", {}).get("state") == "online")
            entry["OPTIONS"]["replicas"] = replicas
        stack.enter_context(configured({"default": entry}))
        lock = Lock("name")
        assert lock.acquire()
        bed.leading.accept()
        before = scripts(bed.old)
        until(lambda: lock.lost)
        # Told by the new master, and not by the end of the lease.
        assert lock.lost_reason in ("expired", "refused")
        assert scripts(bed.new) > 0
        # One renewal, the first one, for which the script is sent, too.
        assert scripts(bed.old) - before <= 3
        if not replicas:
            assert lock.acquire()
            assert bed.asked(bed.leading) > 0


@pytest.mark.parametrize("how", ["start_renew", "renew"])
def test_g2_an_answer_of_an_old_master_does_not_count(bed, how):
    options = {"sentinels": bed.places()}
    backend = backend_for(LOCATION, options=options, command_timeout=5.0)
    moved = threading.Event()
    backend.report_doubt = moved.set
    lease = grant(backend, request())
    # Sentinels are not asked again at once.
    until(lambda: clock.now() > lease.asked_at + 0.3)
    bed.leading.accept()
    bed.old.pause()
    with ThreadPoolExecutor() as thread:
        try:
            deadline = backend.call_deadline()
            ask = partial(getattr(backend, how), renewals(lease), process=current().id)
            asked = thread.submit(ask, deadline=deadline)
            assert moved.wait(20)
        finally:
            bed.old.resume()
        results = asked.result()
    results = results if how == "renew" else results.result()
    assert [result.outcome for result in results] == ["refused"]


def test_g1_short_holds_leave_an_old_master(bed):
    with configured({"default": bed.entry()}):

        def hold() -> bool:
            # A hold that begins on the old master may be told so.
            with contextlib.suppress(LeaseLost), Lock("name"):
                pass
            return scripts(bed.new) > 0

        assert not hold()
        bed.leading.accept()
        until(hold)


@pytest.fixture
def own_bed() -> Iterator[Bed]:
    """For a test after which the Sentinels know of each other."""
    with DividedSentinels() as servers:
        bed = Bed(servers)
        with bed.lagging, bed.leading:
            yield bed


def test_g1_a_lease_that_was_replicated_is_kept(own_bed):
    bed = own_bed
    with configured({"default": bed.entry()}), renewed() as names:
        lock = Lock("name")
        assert lock.acquire()
        with client(bed.old) as old, client(bed.new) as new:
            new.replicaof("127.0.0.1", bed.old.port)
            until(lambda: old.wait(1, 100) == 1)
            new.execute_command("REPLICAOF NO ONE")
            new.config_resetstat()
        bed.leading.accept()
        until(lambda: scripts(bed.new) > 0)
        names.clear()
        until(lambda: bool(names))
        assert lock.state == "held"
        lock.release()
        assert not lock.locked()


@pytest.mark.parametrize("how", ["thread", "coroutine"])
def test_a_waiter_is_woken_by_the_new_master(bed, how):
    aliases = {
        "default": bed.entry(),
        "old": alias(bed.old.url, TTL=LONG),
        "new": alias(bed.new.url, TTL=LONG),
    }
    with configured(aliases):
        blocks, blocks_anew = Lock("name", using="old"), Lock("name", using="new")
        assert blocks.acquire()
        assert blocks_anew.acquire()
        waiter, got = Lock("name", wait=60, bound=False), []

        async def wait() -> bool:
            return await waiter.aacquire()

        def run() -> None:
            got.append(waiter.acquire() if how == "thread" else asyncio.run(wait()))

        thread = threading.Thread(target=run)
        # The old master has just answered that the process is subscribed there.
        with stop_at("listener.listening") as stop:
            thread.start()
            stop.wait()
            assert len(locks["old"].waiters("name")) == 1
            # Its renewals notice that the master is another one.
            held = Lock("held")
            assert held.acquire()
            bed.leading.accept()
            until(lambda: held.state == "lost")
        until(lambda: len(locks["new"].waiters("name")) == 1)
        blocks_anew.release()
        thread.join(30)
        assert got == [True]
        assert blocks_anew.acquire(blocking=False) is False


def test_a_waiter_that_subscribes_during_the_switch_is_woken_by_the_new_master(bed, monkeypatch):
    aliases = {
        "default": bed.entry(),
        "old": alias(bed.old.url, TTL=LONG),
        "new": alias(bed.new.url, TTL=LONG),
    }
    with configured(aliases):
        blocks, blocks_anew = Lock("name", using="old"), Lock("name", using="new")
        assert blocks.acquire()
        assert blocks_anew.acquire()
        held, execute, moved = Lock("held", bound=False), Connection.execute, []
        assert held.acquire()

        def moves(connection, *words, **options):
            answer = execute(connection, *words, **options)
            if words[0] == "SUBSCRIBE" and not moved:
                moved.append(True)
                bed.leading.accept()
                until(lambda: held.state != "held")
            return answer

        monkeypatch.setattr(Connection, "execute", moves)
        waiter, got = Lock("name", wait=60, bound=False), []
        thread = threading.Thread(target=lambda: got.append(waiter.acquire()))
        thread.start()
        until(lambda: len(locks["new"].waiters("name")) == 1)
        blocks_anew.release()
        thread.join(30)
        assert (got, moved) == ([True], [True])


def test_g2_silent_sentinels_end_nothing(bed):
    with configured({"default": bed.entry()}), renewed() as names:
        lock = Lock("name")
        assert lock.acquire()
        # The other one refuses connections.
        bed.lagging.black_hole()
        until(lambda: names.count("name") >= 2)
        assert lock.state == "held"


def test_g1_the_highest_config_epoch_wins(bed):
    bed.leading.accept()
    with configured({"default": bed.entry()}), renewed() as names:
        lock = Lock("name")
        assert lock.acquire()
        assert scripts(bed.old) == 0
        # A Sentinel that is cut off from the others does not lead back.
        bed.leading.refuse()
        until(lambda: names.count("name") >= 2)
        locks["default"].close()
        assert Lock("other").acquire()
        assert lock.state == "held"
        assert scripts(bed.old) == 0


def test_sentinels_that_were_set_up_anew_are_followed(bed):
    with configured({"default": bed.entry(bed.lagging)}), client(bed.sentinel) as asking:
        lock = Lock("name")
        assert lock.acquire()
        try:
            # Their epochs begin with 0 again.
            asking.sentinel_remove("mymaster")
            asking.sentinel_monitor("mymaster", "127.0.0.1", bed.new.port, 1)
            until(lambda: lock.lost)
            assert scripts(bed.new) > 0
        finally:
            asking.sentinel_remove("mymaster")
            asking.sentinel_monitor("mymaster", "127.0.0.1", bed.old.port, 1)


def test_sentinels_are_asked_once_for_each_renewal_and_never_without_a_lock(bed):
    aliases = {"default": bed.entry(bed.lagging), "elsewhere": alias(bed.new.url, TTL=1.5)}
    with configured(aliases), renewed() as names:
        ends = clock.now() + TTL / 6
        while clock.now() < ends:
            with Lock("name"):
                pass
        # For the first connection, and for the first of the short holds.
        assert bed.asked(bed.lagging) <= 2
        before = bed.asked(bed.lagging)
        with Lock("name"):
            until(lambda: names.count("name") >= 2)
        # It is asked beside a heartbeat, too.
        assert 2 <= bed.asked(bed.lagging) - before <= 4
        before = bed.asked(bed.lagging)
        with Lock("other", using="elsewhere"):
            until(lambda: names.count("other") >= 2)
        assert bed.asked(bed.lagging) == before


@pytest.mark.parametrize("how", ["acquire", "aacquire"])
def test_g10_sentinels_that_hang_do_not_use_up_a_call(bed, how):
    hung = [Proxy("127.0.0.1", bed.sentinel.port) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for proxy in hung:
            stack.enter_context(proxy).black_hole()
        stack.enter_context(configured({"default": bed.entry(*hung, bed.lagging)}))
        lock = Lock("name", wait=0, bound=False)
        assert lock.acquire() if how == "acquire" else asyncio.run(lock.aacquire())


def test_no_sentinel_answers(bed):
    bed.lagging.refuse()
    with (
        configured({"default": bed.entry()}),
        pytest.raises(BackendUnavailable, match=r"No master found .*refused"),
    ):
        Lock("name", wait=0).acquire()


# -- real fail-overs -----------------------------------------------------------------------------


@contextlib.contextmanager
def watched(**options: Any) -> Iterator[RedisSentinel]:
    try:
        sentinel = RedisSentinel(**options)
        with sentinel:
            entry = alias(LOCATION, TTL=TTL, OPTIONS={**sentinel.options, "command_timeout": 1.0})
            with configured({"default": entry, "fresh": entry}):
                yield sentinel
    except ServerNotFound as error:
        missing(str(error))


def test_g1_a_planned_fail_over_lets_nobody_in():
    with watched(patience=600) as sentinel, client(sentinel.sentinel) as asking:
        lock = Lock("name")
        assert lock.acquire()
        until(lambda: asking.sentinel_slaves("mymaster")[0]["master-link-status"] == "ok")
        # What a Sentinel says of the link is some seconds old.
        with client(sentinel.replica) as replica:
            until(lambda: replica.keys("*l:name"))
        asking.execute_command("SENTINEL FAILOVER mymaster")
        until(lambda: sentinel.master_port == sentinel.replica.port)
        before = scripts(sentinel.replica)
        assert not Lock("name", using="fresh", wait=0).acquire()
        until(lambda: scripts(sentinel.replica) > before + 1)
        # In doubt until the new master has answered.
        until(lambda: lock.state == "held")


def test_g2_a_master_that_is_cut_off_with_its_holder_is_left():
    with watched(patience=0.3, proxied=True) as sentinel:
        others = set(sentinel.front.links)
        known, unknown = Lock("known"), Lock("unknown")
        assert known.acquire()
        with client(sentinel.replica) as asking:
            until(lambda: asking.keys("*:l:known"))
        sentinel.front.refuse(but=set(sentinel.front.links) - others)
        # The holder still reaches its master, which nobody else does.
        assert unknown.acquire()
        until(lambda: sentinel.master_port == sentinel.replica.port)
        before = scripts(sentinel.primary)
        until(lambda: unknown.lost)
        until(lambda: known.state == "held")
        # One renewal of each lock, with its script, at the most.
        assert scripts(sentinel.primary) - before <= 6
