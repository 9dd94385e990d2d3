"""Stores that answer reads and refuse writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from django.db import connections

from testproject.processes import free_port
from testproject.servers import RedisServer
from tests.support.etcd import EtcdServer
from tests.support.redis_calls import client


class Refusal(NamedTuple):
    """What makes a Redis refuse writes, and what ends that."""

    begin: Callable[[RedisServer], None]
    end: Callable[[RedisServer], None]


def _set(**settings: str | int) -> Callable[[RedisServer], None]:
    def change(server: RedisServer) -> None:
        with client(server) as admin:
            for name, value in settings.items():
                admin.config_set(name.replace("_", "-"), value)

    return change


def _replicate(server: RedisServer) -> None:
    with client(server) as admin:
        # Of nobody: it keeps its data, and is read-only.
        admin.execute_command("REPLICAOF", "127.0.0.1", free_port())


def _replicate_no_more(server: RedisServer) -> None:
    with client(server) as admin:
        admin.execute_command("REPLICAOF", "NO", "ONE")


REDIS = {
    "memory full": Refusal(_set(maxmemory=1), _set(maxmemory=0)),
    "NOREPLICAS": Refusal(_set(min_replicas_to_write=1), _set(min_replicas_to_write=0)),
    "read-only replica": Refusal(_replicate, _replicate_no_more),
}


def etcd_full(server: EtcdServer) -> None:
    """Raise the alarm NOSPACE."""
    _alarm(server, "ACTIVATE")


def let_etcd_write(server: EtcdServer) -> None:
    _alarm(server, "DEACTIVATE")


def _alarm(server: EtcdServer, action: str) -> None:
    member = server.call("maintenance/status")["header"]["member_id"]
    server.call("maintenance/alarm", action=action, memberID=member, alarm="NOSPACE")


def make_database_read_only(alias: str, *, read_only: bool = True) -> None:
    """Make new sessions of a PostgreSQL database read-only, and end the others."""
    with connections[alias].cursor() as cursor:
        name = connections[alias].ops.quote_name(connections[alias].settings_dict["NAME"])
        cursor.execute("SET default_transaction_read_only = off")
        value = "on" if read_only else "off"
        cursor.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
