"""G5: a lost reply never orphans a lock, blocks its owner, or counts as a loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from django_dlock import BackendUnavailable, LeaseLost, Lock, locks
from django_dlock.celery.delivery.locking import DeliveryLock
from testproject.servers import RedisServer
from tests.support.aliases import LONG, Dlocks, alias, configured
from tests.support.holder import Holder
from tests.support.proxy import How, Proxy

RETRIES: dict[str, Any] = {
    "retry": Retry(ExponentialBackoff(base=0.01), 10),
    "retry_on_timeout": True,
    "retry_on_error": [redis.exceptions.ConnectionError, redis.exceptions.TimeoutError],
}
"""The client's own silent retries, which a project may have set for its cache."""

CACHES: dict[str, dict[str, Any]] = {
    "Django's cache": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
    },
    "Django's cache with retries": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "OPTIONS": RETRIES,
    },
    "django-redis with retries": {
        "BACKEND": "django_redis.cache.RedisCache",
        "OPTIONS": {"CONNECTION_POOL_KWARGS": RETRIES},
    },
}


@pytest.fixture(params=["a URL", *CACHES])
def lossy(request: pytest.FixtureRequest, dlocks: Dlocks, proxy: Proxy) -> Iterator[Proxy]:
    """The proxy through which ``default`` connects, in each way; ``direct`` does not use it."""
    # Five threads handle each command, which takes time on a busy machine.
    with connected(request.param, dlocks, proxy, command_timeout=10.0):
        yield proxy


@pytest.fixture(params=["a URL", *CACHES])
def silent(request: pytest.FixtureRequest, dlocks: Dlocks, proxy: Proxy) -> Iterator[Proxy]:
    """As ``lossy``, for tests that wait for a reply which does not come."""
    with connected(request.param, dlocks, proxy, command_timeout=1.0):
        yield proxy


@contextmanager
def connected(how: str, dlocks: Dlocks, proxy: Proxy, *, command_timeout: float) -> Iterator[None]:
    """See ``lossy``."""
    cache = CACHES.get(how)
    entry = alias(proxy.url, TTL=LONG, OPTIONS={"command_timeout": command_timeout})
    caches: dict[str, Any] = {}
    if cache is not None:
        entry["CACHE"] = "default"
        del entry["LOCATION"]
        caches = {"CACHES": {"default": {**cache, "LOCATION": proxy.url}}}
    with configured({"default": entry, "direct": dlocks["direct"]}, **caches):
        # Connections are open and scripts loaded, so the next command is the tested one.
        with Lock("warm", wait=30):
            pass
        yield


def stranger() -> Lock:
    return Lock("it", using="direct")


def test_g5_an_acquire_whose_reply_was_lost_finds_its_own_grant(lossy: Proxy) -> None:
    lock = Lock("it")
    lossy.drop_replies()
    assert lock.acquire(blocking=False)
    assert lossy.replies_dropped == 1
    lock.renew()
    lock.release()
    assert stranger().acquire(blocking=False)


def test_g5_an_acquire_without_an_answer_is_cancelled(silent: Proxy) -> None:
    lock = Lock("it")
    silent.drop_replies(how="swallow")
    with pytest.raises(BackendUnavailable):
        lock.acquire(blocking=False)
    assert (lock.state, lock.token) == ("free", None)
    # Without the cancellation, the lease would last much longer.
    assert stranger().acquire(timeout=LONG / 4)
    assert silent.replies_dropped == 1


@pytest.mark.parametrize("times", [1, 2, 3])
def test_g5_a_release_whose_reply_was_lost_is_no_loss(lossy: Proxy, times: int) -> None:
    lock = Lock("it")
    lock.acquire()
    lossy.drop_replies(times)
    lock.release()
    assert lock.state == "free"
    assert lock.lost_reason is None
    assert stranger().acquire(timeout=LONG / 4)


def test_g5_a_release_without_an_answer_is_repeated_in_the_background(
    silent: Proxy, own_redis: RedisServer
) -> None:
    lock = Lock("it")
    lock.acquire()
    # Neither executed nor answered.
    silent.black_hole()
    with pytest.raises(BackendUnavailable):
        lock.release()
    assert lock.state == "free"
    silent.heal()
    assert stranger().acquire(timeout=LONG / 4)


@pytest.mark.parametrize("how", ["close", "swallow"])
def test_g5_a_renewal_whose_reply_was_lost_is_no_loss(silent: Proxy, how: How) -> None:
    lock = Lock("it")
    lock.acquire()
    silent.drop_replies(how=how)
    if how == "close":
        lock.renew()
    else:
        with pytest.raises(BackendUnavailable):
            lock.renew()
    assert lock.held
    lock.renew()
    assert silent.replies_dropped == 1
    lock.release()


def test_g5_a_lost_reply_is_distinguished_from_a_broken_lease(lossy: Proxy) -> None:
    lock = Lock("it")
    lock.acquire()
    assert locks["direct"].break_("it", owner=lock.owner or "")
    lossy.drop_replies()
    with pytest.raises(LeaseLost) as caught:
        lock.release()
    assert caught.value.reason == "broken"


def test_g5_a_lost_reply_is_distinguished_from_an_expired_lease(
    lossy: Proxy, own_redis: RedisServer
) -> None:
    lock = Lock("it", ttl=0.3, renew=False)
    lock.acquire()
    assert stranger().acquire(timeout=20)
    lossy.drop_replies()
    with pytest.raises(LeaseLost) as caught:
        lock.release()
    assert caught.value.reason == "expired"
    assert stranger().locked()


def test_g5_an_attempt_that_a_paused_server_read_late_is_cancelled(
    own_redis: RedisServer, dlocks: Dlocks, holder: Holder
) -> None:
    with configured({"default": {**dlocks["default"], "TTL": LONG}}):
        with Lock("warm"):
            pass
        own_redis.pause()
        lock = Lock("it")
        with pytest.raises(BackendUnavailable):
            lock.acquire(blocking=False)
        # The server now executes what its sockets contain, and later commands.
        own_redis.resume()
        assert holder.do(f"Lock('it').acquire(timeout={LONG / 4})")


def of_delivery(owner: str, *, parked: str = "") -> DeliveryLock:
    """The lock of a task's delivery; ``parked`` names the owner it may replace."""
    return DeliveryLock("it", owner, replaces=parked)


@pytest.mark.parametrize("how", ["close", "refuse"])
def test_g5_a_lease_whose_parking_was_cut_off_is_parked(lossy: Proxy, how: How) -> None:
    lock = of_delivery("first")
    lock.acquire()
    # Lose the replies to the renewal before it and to the parking itself.
    lossy.drop_replies(2, how=how)
    lock.pass_to("P", kind="parked", ttl=LONG)
    assert (lossy.replies_dropped, lock.state) == (2, "free")
    parked = locks["direct"].get("it")
    assert parked is not None
    assert (parked.kind, parked.owner) == ("parked", "P")
    assert not stranger().acquire(blocking=False)
    retry = of_delivery("second", parked="P")
    assert retry.acquire(blocking=False)
    assert not of_delivery("copy", parked="P").acquire(blocking=False)
    retry.release()


def test_g5_a_lease_whose_parking_got_no_answer_blocks_nobody(
    silent: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = of_delivery("first")
    lock.acquire()
    monkeypatch.setattr(DeliveryLock, "renew", lambda self: None)
    silent.drop_replies(how="swallow")
    with pytest.raises(BackendUnavailable):
        lock.pass_to("P", kind="parked", ttl=LONG)
    # The lease was passed on, not lost.
    assert (lock.state, lock.lost_reason) == ("free", None)
    assert stranger().acquire(timeout=LONG / 4)
    assert silent.replies_dropped == 1
