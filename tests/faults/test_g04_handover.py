"""G4: waiters that die or stop delay the waiters behind them by one TTL at most."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import redis

from django_dlock import Lock, clock, locks
from testproject.servers import RedisServer
from tests.faults.conftest import NewHolder
from tests.support.aliases import LONG, Dlocks, alias, configured
from tests.support.holder import PATIENCE, Holder, HolderError

SOON = 10.0
TTL = 4.0


def listening(holder: Holder) -> Holder:
    """Make it wait once for another name: from then on, it listens."""
    end, answers = clock.now() + PATIENCE, []
    with Lock("warm", ttl=LONG):
        while not answers:
            assert clock.now() < end
            # On a busy machine, its first connection may take longer than that.
            with suppress(HolderError):
                answers.append(holder.do("Lock('warm').acquire(timeout=0.1)"))
    assert answers == [False]
    return holder


def waiting(holder: Holder, count: int, ttl: float = LONG) -> Holder:
    """Make it wait, until ``count`` waiters are queued."""
    listening(holder)
    holder.begin(f"lock = Lock('it', ttl={ttl}); lock.acquire(timeout={LONG})")
    end = clock.now() + PATIENCE
    while (info := locks["direct"].get("it")) is None or info.waiting < count:
        assert clock.now() < end
    return holder


@pytest.fixture
def held(dlocks: Dlocks) -> Lock:
    lock = Lock("it", ttl=LONG, bound=False)
    lock.acquire()
    return lock


def listen(server: redis.Redis, count: int) -> None:
    """Wait until this many processes listen for hand-overs."""
    end = clock.now() + PATIENCE
    while len(server.pubsub_channels()) != count:
        assert clock.now() < end


def test_g4_a_killed_first_waiter_is_skipped_at_once(
    held: Lock, own_redis: RedisServer, new_holder: NewHolder
) -> None:
    first, second = waiting(new_holder(), 1), waiting(new_holder(), 2)
    with redis.Redis.from_url(own_redis.url) as server:
        # On a busy machine, a process may be queued before it listens.
        listen(server, 2)
        first.kill()
        # Before the server has noticed, it would hand the lease to the dead process for one TTL.
        listen(server, 1)
    held.release()
    second.answer(timeout=SOON)
    assert second.do("lock.held")


def test_g4_a_stopped_first_waiter_costs_its_ttl_and_ignores_old_messages(
    dlocks: Dlocks, new_holder: NewHolder
) -> None:
    with Lock("it", ttl=TTL) as held:
        first = waiting(new_holder(), 1, TTL)
        second = waiting(new_holder(), 2, TTL)
        third = waiting(new_holder(), 3, TTL)
        first.pause()
        assert held.held
    # Either waiter may be the first to ask after the lease has expired.
    answered = next_of(second, third)
    answered.answer()
    assert answered.do("lock.held")
    first.resume()
    # Now it reads the message that the lease was handed to it.
    assert answered.do("lock.renew(), lock.held") == [None, True]
    assert not first.answered
    token = answered.do("lock.token")
    answered.do("lock.release()")
    for _ in range(2):
        other = next_of(*({first, second, third} - {answered}))
        other.answer()
        assert other.do("lock.held")
        assert other.do("lock.token") > token
        token = other.do("lock.token")
        other.do("lock.release()")


def next_of(*holders: Holder) -> Holder:
    """The first of them that answers."""
    end = clock.now() + PATIENCE
    while clock.now() < end:
        for holder in holders:
            if holder.answered:
                return holder
    raise AssertionError("none of them has answered")


def test_g4_a_process_that_does_not_use_its_leases_costs_a_name_only_one_ttl(
    dlocks: Dlocks, new_holder: NewHolder
) -> None:
    # A process may take longer to start than the lease lasts that it has to find.
    stopped, last = listening(new_holder()), listening(new_holder())
    with Lock("it", ttl=TTL):
        stopped.do(
            "threads = [threading.Thread(target=Lock('it', ttl=4.0, wait=60).acquire)"
            " for _ in range(3)]; [thread.start() for thread in threads]"
        )
        waiting(stopped, 4, TTL).pause()
    # Only the first waiter's lease has to expire; the process's other waiters are skipped.
    other = waiting(last, 4, TTL)
    other.answer()
    assert other.do("lock.held")
    waiting_now = locks["direct"].get("it")
    assert waiting_now is not None
    assert waiting_now.waiting == 0


def test_g4_the_lease_of_a_waiter_killed_after_the_hand_over_goes_to_the_next(
    dlocks: Dlocks, new_holder: NewHolder
) -> None:
    with Lock("it", ttl=TTL):
        first = waiting(new_holder(), 1, TTL)
        second = waiting(new_holder(), 2, TTL)
    first.answer()
    first.kill()
    second.answer(timeout=TTL + SOON)
    assert second.do("lock.held")


def test_g1_a_handed_over_lease_survives_a_stall_of_two_thirds_of_its_ttl(
    own_redis: RedisServer, dlocks: Dlocks, new_holder: NewHolder
) -> None:
    with Lock("it", ttl=LONG):
        waiter = waiting(new_holder(), 1, 6.0)
    waiter.answer()
    # Both holder and server, from the first moment: nothing can be renewed meanwhile.
    waiter.pause()
    own_redis.pause()
    assert not threading.Event().wait(3.0)
    own_redis.resume()
    assert not Lock("it", bound=False).acquire(blocking=False)
    waiter.resume()
    assert waiter.do("lock.renew(), lock.held") == [None, True]
    assert not Lock("it", bound=False).acquire(timeout=1.0)
    assert [words for words in waiter.said if words[0] == "lost"] == []


@pytest.mark.parametrize("ttl", [3.0, LONG])
def test_g1_a_contended_name_passes_from_process_to_process(
    ttl: float, dlocks: Dlocks, new_holder: NewHolder
) -> None:
    # Long enough for a busy machine, but messages still matter.
    options = {"command_timeout": 1.0}
    entry = alias(dlocks["default"]["LOCATION"], TTL=ttl, OPTIONS=options)
    with configured({"default": entry}):
        waiters = [new_holder(dlocks={"default": entry}) for _ in range(3)]
        for waiter in waiters:
            waiter.begin(
                "tokens = []\n"
                "for _ in range(100):\n"
                f"    with Lock('it', ttl={ttl}, wait=60) as lock:\n"
                "        tokens.append(lock.token); lock.check()"
            )
        for waiter in waiters:
            waiter.answer(timeout=60)
    tokens = [waiter.do("tokens") for waiter in waiters]
    assert all(each == sorted(each) for each in tokens)
    assert len({token for each in tokens for token in each}) == 300
