"""Stores that answer and do not grant: to whom fail-over switches, and what is told before."""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterator

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl
from pytest_django import DjangoDbBlocker

from django_dlock import BackendUnavailable, clock, locks
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.backends.failover import FailoverBackend
from django_dlock.backends.failover.trial import PROBE, refusal_of
from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.zookeeper import ZooKeeperBackend
from django_dlock.lease import Lease, Renewal
from testproject.servers import RedisServer
from tests.support.aliases import configured
from tests.support.databases import added, until
from tests.support.etcd import EtcdServer
from tests.support.failing_over import failover_backend, failover_options, reads_of, terms_of
from tests.support.limited_users import guard_etcd, redis_url_for_keys
from tests.support.points import at, heard
from tests.support.redis_calls import client, pool_of
from tests.support.refusing_writes import REDIS, etcd_full, let_etcd_write
from tests.support.zookeeper import ZooKeeperServer

from .test_failover_switch import (
    UNHURRIED,
    Shop,
    grant,
    grant_when_open,
    is_active,
    request,
    run_command,
    shop,
)

__all__ = ["shop"]

FAST = {"failover_after": 1.5, "failback_after": 1.5}


def soon() -> float:
    return clock.now() + 10.0


def wait_for_tries(backend: FailoverBackend, reads: int, alias: str = "default") -> None:
    """Block until the backend has read the record this many times, and tried stores after each."""
    with heard("view.read", alias=alias) as read:
        for _ in range(reads):
            reads_of(backend).valid()
            read.again()


# -- rights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("covers", [False, True])
def test_the_check_knows_whether_rights_cover_later_epochs(
    shop: Shop, own_redis: RedisServer, covers: bool
) -> None:
    prefixes = [shop.prefix, *([f"{shop.prefix}.*"] if covers else [])]
    url = redis_url_for_keys(own_redis, *prefixes)
    with configured(shop.dlocks(redis_url=url, **UNHURRIED)):
        grant(locks["default"], request())
        found = locks["default"].store_problems()
        # Nothing shows in the alias of the store.
        assert locks["redis"].store_problems() == []
    assert [problem.id for problem in found] == ([] if covers else ["W022"])
    assert covers or f"~{{{shop.prefix}.*:0}}:2:*" in found[0].hint


def test_rights_on_the_next_epoch_alone_do_not_suffice(shop: Shop, own_redis: RedisServer) -> None:
    url = redis_url_for_keys(own_redis, shop.prefix, f"{shop.prefix}.2")
    backend = shop.process(redis_url=url, **UNHURRIED)
    assert [problem.id for problem in backend.store_problems()] == ["W022"]


def test_rights_that_do_not_cover_the_channels_are_reported(
    shop: Shop, own_redis: RedisServer
) -> None:
    url = redis_url_for_keys(own_redis, shop.prefix, f"{shop.prefix}.*")
    backend = shop.process(redis_url=url, **UNHURRIED)
    assert backend.store_problems() == []
    user = url.partition("://")[2].partition(":")[0]
    with client(own_redis) as admin:
        admin.execute_command("ACL", "SETUSER", user, "resetchannels", f"&{{{shop.prefix}:0}}:2:*")
    (problem,) = backend.store_problems()
    assert problem.id == "W022"
    assert "publish or subscribe" in problem.message


@pytest.mark.parametrize("covers", [False, True])
def test_roles_of_etcd_that_do_not_cover_later_epochs_are_reported(
    own_etcd: EtcdServer, postgres_alias: str, django_db_blocker: DjangoDbBlocker, covers: bool
) -> None:
    prefix = f"test-{secrets.token_hex(4)}"
    user = guard_etcd(own_etcd, [f"{prefix}/1/", *([f"{prefix}."] if covers else [])])
    store = EtcdBackend(etcd_options(own_etcd.url, prefix, **user))
    table = DatabaseBackend(table_options(postgres_alias, prefix))
    backend = failover_backend(failover_options(postgres_alias, prefix), store, table)
    with django_db_blocker.unblock():
        found = backend.store_problems()
        seen = backend.read_record()
        if covers:
            backend.try_store("one", seen)
        else:
            with pytest.raises(BackendUnavailable, match="permission denied"):
                backend.try_store("one", seen)
        for each in (backend, store, table):
            each.close()
    assert [problem.id for problem in found] == ([] if covers else ["W022"])


@pytest.mark.parametrize("may_create", [False, True])
def test_rights_in_zookeeper_that_do_not_cover_later_epochs_are_reported(
    zookeeper_server: ZooKeeperServer,
    postgres_alias: str,
    django_db_blocker: DjangoDbBlocker,
    may_create: bool,
) -> None:
    root, prefix = f"/apps-{secrets.token_hex(4)}", f"test-{secrets.token_hex(4)}"
    admin = KazooClient(zookeeper_server.location)
    admin.start()
    admin.create(root)
    admin.create(f"{root}/{prefix}", acl=[make_digest_acl("locks", "secret", all=True)])
    rights = make_digest_acl("locks", "secret", read=True, create=may_create)
    admin.set_acls(root, [rights])
    admin.stop()
    admin.close()
    store = ZooKeeperBackend(zookeeper_options(zookeeper_server.location + root, prefix))
    table = DatabaseBackend(table_options(postgres_alias, prefix))
    backend = failover_backend(failover_options(postgres_alias, prefix), store, table)
    with django_db_blocker.unblock():
        found = backend.store_problems()
        for each in (backend, store, table):
            each.close()
    assert [problem.id for problem in found] == ([] if may_create else ["W022"])
    assert may_create or "ZooKeeper: the right to create" in found[0].hint


def test_a_store_whose_user_lacks_rights_is_not_switched_to(
    shop: Shop, own_redis: RedisServer
) -> None:
    url = redis_url_for_keys(own_redis, shop.prefix)
    with configured(shop.dlocks(redis_url=url, **{**UNHURRIED, "failback_after": 1.5})):
        backend = locks["default"]
        assert isinstance(backend, FailoverBackend)
        shop.switch_long_ago(backend, "table")
        with pytest.raises(CommandError, match=r"'redis' would grant no lock.*perm") as error:
            run_command("--to", "redis")
        assert error.value.returncode == 1
        out = io.StringIO()
        with pytest.raises(CommandError):
            call_command("diagnose_locks", "--using", "default", stdout=out, stderr=out)
        assert "after a switch to 'redis', no lock could be acquired" in out.getvalue()
        # Reading is allowed in the first epoch's keys, which is what once counted.
        assert not locks["redis"].locked(PROBE, deadline=soon())
        assert backend.read_record().epoch == 2
        shown, _ = run_command("--to", "redis", "--force")
        assert (shown["active"], shown["epoch"]) == ("redis", 3)


# -- stores that refuse writes -----------------------------------------------------------------


@pytest.mark.parametrize("how", REDIS)
def test_a_store_that_refuses_writes_is_replaced_and_not_switched_back_to(
    shop: Shop, own_redis: RedisServer, how: str
) -> None:
    backend = shop.process(redis_url=own_redis.url, **FAST)
    grant(backend, request())
    REDIS[how].begin(own_redis)
    until(is_active(backend, "table"), 30)
    assert backend.read_record().reason.startswith("the active store ")
    shop.row.update(switched_at=0)
    # More than failback_after.
    wait_for_tries(backend, 8)
    assert grant_when_open(backend, request("in the table")).token >> 52 == 2
    REDIS[how].end(own_redis)
    until(is_active(backend, "redis"), 30)
    assert backend.read_record().reason == "the primary answers again"


def test_what_a_failed_try_leaves_behind_is_not_taken_for_a_grant(
    own_redis: RedisServer, postgres_alias: str, django_db_blocker: DjangoDbBlocker
) -> None:
    # It writes the lease, and then misses the replica that confirms it.
    store = RedisBackend(redis_options(own_redis.url, replicas=1))
    table = DatabaseBackend(table_options(postgres_alias, "test"))
    options = failover_options(postgres_alias, command_timeout=0.3, view_ttl=1.0, failover_after=2)
    backend = failover_backend(options, store, table)
    with django_db_blocker.unblock():
        assert reads_of(backend).current(soon()).active == "one"
        until(is_active(backend, "two"), 15)
        for each in (backend, store, table):
            each.close()


def test_the_next_try_takes_back_what_the_last_one_has_left_behind(own_redis: RedisServer) -> None:
    store = RedisBackend(redis_options(own_redis.url, replicas=1))
    first, second = (refusal_of(store, clock.now() + 0.3) for _ in range(2))
    assert "replicas" in str(first)
    assert str(second) == str(first)
    store.close()


def test_a_full_pool_is_no_failure_of_the_store(
    own_redis: RedisServer, postgres_alias: str, django_db_blocker: DjangoDbBlocker
) -> None:
    store = RedisBackend(redis_options(own_redis.url, max_connections=3))
    table = DatabaseBackend(table_options(postgres_alias, "test"))
    options = failover_options(postgres_alias, command_timeout=0.3, view_ttl=1.0, failover_after=1)
    backend = failover_backend(options, store, table)
    with django_db_blocker.unblock(), contextlib.ExitStack() as stack:
        for each in (table, store, backend):
            stack.callback(each.close)
        grant(backend, request())
        busy = terms_of(backend).latest.store
        for _ in range(2):
            stack.callback(pool_of(busy).take(0, soon()).release)
        # Other calls of this process are answered meanwhile.
        renewals = [Renewal("other", "nobody", 3.0)]
        ask = lambda _: busy.renew(renewals, process="", deadline=soon())  # noqa: E731
        with at("pool.waiting", ask, urgency=0):
            wait_for_tries(backend, 8, alias="both")
        assert backend.read_record().epoch == 1


def test_a_store_that_is_being_tried_by_another_process_is_tried_again(shop: Shop) -> None:
    one = shop.process(**UNHURRIED)
    grant(one, request())
    table = one._active.later_store("table", 2)
    other = table.acquire(request(PROBE, ttl=1.0), deadline=soon())
    assert isinstance(other, Lease)
    one.try_store("table", one.read_record())
    assert clock.now() >= other.deadline
    table.close()


def test_an_etcd_without_space_does_not_count_as_granting(own_etcd: EtcdServer) -> None:
    store = EtcdBackend(etcd_options(own_etcd.url, "test"))
    assert refusal_of(store, soon()) is None
    etcd_full(own_etcd)
    assert not store.locked(PROBE, deadline=soon())
    assert "space" in str(refusal_of(store, soon()))
    let_etcd_write(own_etcd)
    assert refusal_of(store, soon()) is None
    store.close()


def test_a_read_only_database_does_not_count_as_granting(
    postgres_alias: str, django_db_blocker: DjangoDbBlocker
) -> None:
    settings = connections.settings[postgres_alias]
    options = {**settings["OPTIONS"], "options": "-c default_transaction_read_only=on"}
    with django_db_blocker.unblock(), added("reading", {**settings, "OPTIONS": options}):
        store = DatabaseBackend(table_options("reading", "test"))
        assert not store.locked(PROBE, deadline=soon())
        assert "read-only" in str(refusal_of(store, soon()))
        store.close()


def etcd_options(url: str, prefix: str, **options: str) -> AliasOptions:
    return AliasOptions(
        alias="one",
        backend="etcd",
        location=url,
        key_prefix=prefix,
        command_timeout=5.0,
        options=options,
    )


def zookeeper_options(location: str, prefix: str) -> AliasOptions:
    return AliasOptions(
        alias="one",
        backend="zookeeper",
        location=location,
        key_prefix=prefix,
        command_timeout=5.0,
        options={"credentials": "locks:secret"},
    )


def redis_options(url: str, **options: int) -> AliasOptions:
    return AliasOptions(
        alias="one",
        backend="redis",
        location=url,
        key_prefix="test",
        command_timeout=5.0,
        options=options,
    )


def table_options(database: str, prefix: str) -> AliasOptions:
    return AliasOptions(
        alias="two",
        backend="database",
        key_prefix=prefix,
        command_timeout=5.0,
        options={"database": database},
    )


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    locks.reset()
