"""Users of stores who may use only the keys of some prefixes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import pytest

from testproject.servers import RedisServer
from tests.support.etcd import EtcdServer
from tests.support.redis_calls import client

COMMANDS = (
    "-@all "
    "+eval +evalsha +time +get +set +exists +pttl +pexpire +pexpireat +hget +hmget +hset "
    "+zadd +zrem +zcard +zscore +zrandmember +zrange +zrevrange +zrangebyscore +zrevrangebyscore "
    "+subscribe +publish +pubsub|numsub +ping +info"
)
"""The rights in docs/howto/own-redis.md, without keys and channels."""


def keys_of(*prefixes: str) -> list[str]:
    """Rules for the keys and channels of these prefixes; a ``*`` in them is a pattern."""
    return [f"{kind}{{{prefix}:0}}:2:{rest}" for prefix in prefixes for kind, rest in _RULES]


_RULES = (("~", "*"), ("&", "m:*"))


def redis_url_for(server: RedisServer, *rules: str) -> str:
    """The address of the server for a new user with these rights."""
    with client(server) as admin:
        if int(admin.info("server")["redis_version"].split(".")[0]) < 7:
            pytest.skip("Redis 6 has no rights for subcommands")
        name = f"user-{secrets.token_hex(4)}"
        admin.execute_command("ACL", "SETUSER", name, "reset", "on", ">pw", *rules)
    return server.url.replace("redis://", f"redis://{name}:pw@")


def redis_url_for_keys(server: RedisServer, *prefixes: str) -> str:
    """The address of the server for a new user with the rights that the documentation gives."""
    return redis_url_for(server, *keys_of(*prefixes), *COMMANDS.split())


def guard_etcd(server: EtcdServer, areas: Sequence[str]) -> dict[str, str]:
    """Turn on the authentication of etcd; returns the OPTIONS of a user for these keys.

    Args:
        areas: What the keys begin with.
    """
    server.call("auth/role/add", name="locks")
    for area in areas:
        server.allow("READWRITE", "locks", area)
    server.call("auth/role/add", name="root")
    for name, role, password in (("locks", "locks", "secret"), ("root", "root", "root")):
        server.call("auth/user/add", name=name, password=password)
        server.call("auth/user/grant", user=name, role=role)
    server.call("auth/enable")
    return {"username": "locks", "password": "secret"}
