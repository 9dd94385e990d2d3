"""The mailbox of an event loop: letters that come, are lost, or are of somebody who left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from django_dlock import BackendUnavailable, Lock, locks
from django_dlock.backends import redis_async_mailbox, redis_mailbox
from testproject.servers import RedisServer
from tests.faults.aliases import alias, configured
from tests.proxy import Proxy

from .test_redis_async import until_waiting


@pytest.fixture(autouse=True)
def lossy(
    own_redis: RedisServer,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Proxy]:
    """Coroutines wait behind a proxy, and never ask again by themselves.

    Its parameter is their command timeout, for a test that waits for its end.
    """
    monkeypatch.setattr(redis_mailbox, "LONGEST_BLOCK", 3600.0)
    entries = {
        "default": alias(
            proxy.url, TTL=60, OPTIONS={"command_timeout": getattr(request, "param", 20.0)}
        ),
        "direct": alias(own_redis.url, TTL=60, OPTIONS={"command_timeout": 20.0}),
    }
    with configured(entries):
        yield proxy


async def holding() -> Lock:
    holder = Lock("it", using="direct", bound=False)
    assert await holder.aacquire()
    return holder


def heard(proxy: Proxy) -> bool:
    """Whether a waiter has asked again since the subscription stands."""
    _, *since = "".join("S" if c == "SUBSCRIBE" else c[:1] for c in proxy.commands).split("S")
    return bool(since) and "E" in since[-1]


async def waiting(proxy: Proxy, *names: str) -> list[asyncio.Task[bool]]:
    """A waiter of each name, whom the server knows and who listens."""
    names = names or ("it",)
    tasks = [asyncio.create_task(Lock(name, bound=False).aacquire(timeout=60)) for name in names]
    for name in names:
        await until_waiting(name, 1, using="direct")
    await asyncio.to_thread(proxy.wait_until, heard)
    return tasks


async def end_of(tasks: list[asyncio.Task[bool]]) -> None:
    assert all(await asyncio.wait_for(asyncio.gather(*tasks), 60))


async def subscribed(proxy: Proxy, count: int) -> None:
    await asyncio.to_thread(proxy.wait_until, lambda proxy: proxy.count("SUBSCRIBE") >= count)


async def test_a_waiter_that_is_cut_off_listens_and_asks_again(lossy: Proxy) -> None:
    holder = await holding()
    waiters = await waiting(lossy)
    for number in range(2, 4):
        lossy.cut()
        await subscribed(lossy, number)
        await asyncio.to_thread(lossy.wait_until, heard)
    await holder.arelease()
    await end_of(waiters)


async def test_g5_a_lease_whose_letter_is_lost_is_found_by_asking(lossy: Proxy) -> None:
    holder = await holding()
    waiters = await waiting(lossy)
    lossy.black_hole()
    await holder.arelease()
    # It was handed over, and the letter swallowed.
    assert await locks["direct"].acall("get", "it")
    lossy.heal()
    await end_of(waiters)


@pytest.mark.parametrize("lossy", [1.0], indirect=True)
async def test_a_connection_that_has_gone_silent_is_found_out(
    lossy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_async_mailbox, "SILENCE", 0.1)
    holder = await holding()
    waiters = await waiting(lossy)
    # Only this reply: nothing is cut, and commands are answered.
    lossy.drop_replies(how="swallow", of=("PING",))
    await subscribed(lossy, 2)
    await holder.arelease()
    await end_of(waiters)


async def test_a_server_that_cuts_every_subscription_is_unavailable(lossy: Proxy) -> None:
    await holding()
    lossy.always("close", of="SUBSCRIBE")
    with pytest.raises(BackendUnavailable):
        await Lock("it").aacquire(timeout=30)
    assert lossy.count("SUBSCRIBE") == 3


async def test_who_stops_waiting_leaves_the_letters_of_others(lossy: Proxy) -> None:
    holders = [Lock(f"it:{n}", using="direct", bound=False) for n in range(4)]
    for holder in holders:
        await holder.aacquire()
    first, *others = await waiting(lossy, *(holder.name for holder in holders))
    first.cancel()
    await asyncio.wait({first})
    for holder in holders:
        await holder.arelease()
    await end_of(others)
    # And when all have left, the next one comes to the same connection.
    assert lossy.count("SUBSCRIBE") == 1
    holder = await holding()
    waiters = await waiting(lossy)
    await holder.arelease()
    await end_of(waiters)
    assert lossy.count("SUBSCRIBE") == 1


async def test_a_reader_that_a_stranger_cancels_is_followed_by_another(lossy: Proxy) -> None:
    holder = await holding()
    waiters = await waiting(lossy)
    mine = {asyncio.current_task(), *waiters}
    for task in asyncio.all_tasks() - mine:
        task.cancel()
    await holder.arelease()
    await end_of(waiters)
