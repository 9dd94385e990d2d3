"""G3: tokens rise, whatever happens to the server, and resources can rely on them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from django_dlock import Lock, LockNotAcquired
from testproject.servers import RedisServer
from tests.faults.conftest import LEASE, NewHolder
from tests.support.aliases import LONG, Dlocks, alias, configured
from tests.support.faketime import SteppedClock
from tests.support.holder import Holder


def next_token(name: str = "it") -> int:
    with Lock(name, ttl=LONG, wait=20) as lock:
        assert lock.token is not None
        return lock.token


# -- tokens ----------------------------------------------------------------------------


def test_g3_tokens_rise_with_every_grant(dlocks: Dlocks) -> None:
    tokens = [next_token() for _ in range(20)]
    assert tokens == sorted(set(tokens))


def test_g3_tokens_rise_across_flushall_and_an_empty_restart(
    own_redis: RedisServer, dlocks: Dlocks
) -> None:
    tokens = [next_token()]
    with redis.Redis(port=own_redis.port) as admin:
        admin.flushall()
    tokens.append(next_token())
    own_redis.restart()
    tokens.append(next_token())
    assert tokens == sorted(set(tokens))


def test_g3_tokens_rise_across_the_crash_of_a_holder(dlocks: Dlocks, new_holder: NewHolder) -> None:
    tokens = []
    for _ in range(2):
        holder = new_holder()
        holder.do("lock = Lock('it'); lock.acquire()")
        tokens.append(holder.do("lock.token"))
        holder.kill()
    tokens.append(next_token())
    assert tokens == sorted(set(tokens))


def test_g3_a_renewal_and_a_reentry_keep_the_token(dlocks: Dlocks) -> None:
    with Lock("it", ttl=LONG, reentrant=True) as lock:
        token = lock.token
        lock.renew()
        with Lock("it", ttl=LONG, reentrant=True) as inner:
            assert inner.token == token
        assert lock.token == token
    assert next_token() > (token or 0)


def test_g3_tokens_rise_when_the_servers_clock_steps_back(
    stepped_server: RedisServer, stepped_clock: SteppedClock
) -> None:
    with configured({"default": alias(stepped_server.url)}):
        tokens = [next_token(), next_token("other")]
        stepped_clock.step("-2h")
        # A name that the server remembers, and one that it does not know.
        tokens += [next_token(), next_token(), next_token("new")]
        stepped_clock.step("+0")
        tokens.append(next_token())
        assert tokens == sorted(set(tokens))
        with redis.Redis(port=stepped_server.port) as admin:
            stepped_clock.step("-2h")
            assert admin.time()[0] * 1_000_000 < tokens[0], "the clock did not step"


def test_g3_a_step_of_the_servers_clock_does_not_free_a_held_lock(
    stepped_server: RedisServer, stepped_clock: SteppedClock
) -> None:
    options = {"command_timeout": LEASE / 3}
    with configured({"default": alias(stepped_server.url, TTL=LEASE, OPTIONS=options)}):
        lock = Lock("it")
        lock.acquire()
        stepped_clock.step("-2h")
        with pytest.raises(LockNotAcquired), Lock("it", wait=LEASE + 0.5, bound=False):
            pass
        assert lock.held
        lock.release()
        assert next_token() > 0


# -- a resource that checks tokens ------------------------------------------------------

WRITE = "UPDATE stock SET value = :value, token = :token WHERE token <= :token"


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Path]:
    """A database with one guarded row."""
    path = tmp_path / "stock.sqlite3"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE stock (value TEXT, token INTEGER)")
        connection.execute("INSERT INTO stock VALUES ('empty', 0)")
    return path


def write(stock: Path, value: str, token: int | None) -> bool:
    """Write with a token; returns false if the row has seen a newer one."""
    with closing(sqlite3.connect(stock)) as connection, connection:
        return bool(connection.execute(WRITE, {"value": value, "token": token}).rowcount)


def value(stock: Path) -> str:
    with closing(sqlite3.connect(stock)) as connection:
        return str(connection.execute("SELECT value FROM stock").fetchone()[0])


def test_g3_a_paused_holder_cannot_overwrite_its_successor(
    dlocks: Dlocks, holder: Holder, stock: Path
) -> None:
    holder.do("lock = Lock('it'); lock.acquire()")
    # Code that does not check the lock before it writes has the token.
    late = holder.do("lock.token")
    assert write(stock, "first", late)
    assert write(stock, "first again", late)
    holder.pause()
    with Lock("it", ttl=LONG, wait=20) as lock:
        assert write(stock, "second", lock.token)
        holder.resume()
        assert not write(stock, "late", late)
        assert write(stock, "second again", lock.token)
    assert value(stock) == "second again"


def test_g3_no_valid_token_is_refused_after_the_server_lost_all_data(
    own_redis: RedisServer, dlocks: Dlocks, holder: Holder, stock: Path
) -> None:
    holder.do(f"lock = Lock('it', ttl={LONG}); lock.acquire()")
    late = holder.do("lock.token")
    assert write(stock, "first", late)
    own_redis.restart()
    with Lock("it", ttl=LONG) as lock:
        assert write(stock, "second", lock.token)
        assert not write(stock, "late", late)
    with Lock("it", ttl=LONG) as lock:
        assert write(stock, "third", lock.token)
    assert value(stock) == "third"
