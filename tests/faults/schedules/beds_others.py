"""PostgreSQL, MariaDB, SQLite, ZooKeeper, etcd, and fail-over between two Redis."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from redis import Redis

from testproject.postgres import PostgresServer
from testproject.postgres import settings_for as postgres_settings
from testproject.servers import RedisServer
from tests.support import mariadb
from tests.support.aliases import Dlocks
from tests.support.etcd import EtcdServer
from tests.support.etcd import cluster as etcd_cluster
from tests.support.proxy import Proxy
from tests.support.workers import ROOT
from tests.support.zookeeper import ZooKeeperServer, ensemble

from .bed import Bed, Fault, Faults, network, process, signal_tree


def manage(bed: Bed, *command: str, databases: dict[str, Any] | None = None) -> str:
    """Run a management command with the settings of the clients; returns the end of its output."""
    configuration = {
        "dlocks": bed.dlocks,
        "databases": bed.databases if databases is None else databases,
        "command": command,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.faults.schedules.client", json.dumps(configuration)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    return (ran.stdout + ran.stderr).strip()[-200:]


class DatabaseBed(Bed):
    """The database backend, with a connection of its own through a proxy."""

    @property
    def dlocks(self) -> Dlocks:
        return {"default": self.entry("database.DatabaseBackend", database="default")}


class PostgresBed(DatabaseBed):
    store = "postgresql"

    def start(self) -> None:
        self._server = self.stack.enter_context(PostgresServer())
        self._proxy = self.stack.enter_context(
            Proxy("127.0.0.1", self._server.port, speaks="postgres")
        )
        manage(self, "migrate", "--verbosity", "0")

    @property
    def databases(self) -> dict[str, Any]:
        settings = postgres_settings(self._server.url)
        return {"default": {**settings, "PORT": str(self._proxy.port)}}

    @property
    def faults(self) -> Faults:
        return {
            **network([self._proxy]),
            **process([_AtOnce(self._server)], killed="killed, and recovered"),
        }

    @property
    def versions(self) -> str:
        import psycopg

        with psycopg.connect(self._server.url) as connection:
            row = connection.execute("SHOW server_version").fetchone()
            assert row is not None
            return f"PostgreSQL {row[0].split()[0]}"


class _AtOnce:
    """A PostgreSQL that ends with all of its processes, so that it can start again."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    @property
    def pid(self) -> int:
        return self._server.pid

    def kill(self) -> None:
        os.kill(self._server.pid, signal.SIGQUIT)
        self._server._end(signal.SIGQUIT)

    def restart(self) -> None:
        self._server._fixed_port = True
        self._server.start()


class MariadbBed(DatabaseBed):
    store = "mariadb"

    def start(self) -> None:
        self._url = self.stack.enter_context(mariadb.database())
        settings = mariadb.settings_for(self._url)
        self._proxy = self.stack.enter_context(
            # None of its commands need be known.
            Proxy("127.0.0.1", int(settings["PORT"]), speaks="amqp")
        )
        manage(self, "migrate", "--verbosity", "0")

    @property
    def databases(self) -> dict[str, Any]:
        settings = mariadb.settings_for(self._url)
        return {"default": {**settings, "PORT": str(self._proxy.port)}}

    @property
    def faults(self) -> Faults:
        return {
            **network([self._proxy]),
            "paused": Fault(self._pause, self._resume),
        }

    def _pause(self, aim: float) -> str:
        self._paused = int(Path(self._ask("SELECT @@pid_file")).read_text())
        signal_tree(self._paused, signal.SIGSTOP)
        return "the server"

    def _resume(self) -> None:
        signal_tree(self._paused, signal.SIGCONT)

    def _ask(self, statement: str) -> str:
        import pymysql

        connection = pymysql.connect(**mariadb._parameters(self._url), connect_timeout=5)
        with closing(connection), connection.cursor() as cursor:
            cursor.execute(statement)
            return str(cursor.fetchone()[0])

    @property
    def versions(self) -> str:
        return f"MariaDB {self._ask('SELECT @@version').split('-')[0]}"


class SqliteBed(DatabaseBed):
    """A file; there is no server that could fail, but other programs can lock it."""

    store = "sqlite"

    def start(self) -> None:
        manage(self, "migrate", "--verbosity", "0")

    @property
    def databases(self) -> dict[str, Any]:
        name = str(self.directory / "project.sqlite3")
        return {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": name}}

    @property
    def faults(self) -> Faults:
        met: list[sqlite3.Connection] = []

        def lock(aim: float) -> str:
            files = sorted(
                one
                for one in self.directory.glob("project.sqlite3*")
                if one.read_bytes()[:6] == b"SQLite"
            )
            for one in files:
                connection = sqlite3.connect(one, isolation_level=None)
                connection.execute("BEGIN EXCLUSIVE")
                met.append(connection)
            return ", ".join(one.name for one in files)

        def unlock() -> None:
            while met:
                met.pop().close()

        return {"locked by another program": Fault(lock, unlock)}

    @property
    def versions(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"


class ZooKeeperBed(Bed):
    """Three servers, which keep their data; a lease ends with its process's session."""

    store = "zookeeper"
    settles = 8.0

    def start(self) -> None:
        self._servers: list[ZooKeeperServer] = self.stack.enter_context(ensemble())
        self._proxies = [
            self.stack.enter_context(Proxy("127.0.0.1", server.port, speaks="zookeeper"))
            for server in self._servers
        ]

    @property
    def dlocks(self) -> Dlocks:
        hosts = [f"127.0.0.1:{proxy.port}" for proxy in self._proxies]
        options = {"session_timeout": 6 * self.command_timeout}
        return {"default": self.entry("zookeeper.ZooKeeperBackend", hosts, **options)}

    @property
    def faults(self) -> Faults:
        met: list[ZooKeeperServer] = []

        def kill_leader(aim: float) -> str:
            met.extend(one for one in self._servers if one.mode == "leader")
            for one in met:
                one.kill()
            return "the leader"

        def restart() -> None:
            while met:
                met.pop().restart()

        return {
            **network(self._proxies),
            **process(self._servers),
            "leader killed": Fault(kill_leader, restart),
            "all cut": Fault(self._cut_all, lasts=False),
        }

    def _cut_all(self, aim: float) -> str:
        for proxy in self._proxies:
            proxy.cut()
        return "all servers"

    @property
    def versions(self) -> str:
        return "ZooKeeper " + self._servers[0].ask("srvr").partition(": ")[2].partition("-")[0]


class EtcdBed(Bed):
    """Three members, which keep their data."""

    store = "etcd"
    # A new leader starts the leases anew, and a TTL is rounded up to whole seconds.
    settles = 6.0

    def start(self) -> None:
        self._members: list[EtcdServer] = self.stack.enter_context(etcd_cluster())
        self._proxies = [
            self.stack.enter_context(Proxy("127.0.0.1", member.port, speaks="etcd"))
            for member in self._members
        ]

    @property
    def dlocks(self) -> Dlocks:
        urls = [f"http://127.0.0.1:{proxy.port}" for proxy in self._proxies]
        return {"default": self.entry("etcd.EtcdBackend", urls)}

    @property
    def faults(self) -> Faults:
        met: list[EtcdServer] = []

        def pause_all(aim: float) -> str:
            met.extend(self._members)
            for one in met:
                one.pause()
            return "all members"

        def resume_all() -> None:
            while met:
                met.pop().resume()

        return {
            **network(self._proxies),
            **process(self._members),
            "all paused": Fault(pause_all, resume_all),
            "leader moved": Fault(self._move, lasts=False),
        }

    def _move(self, aim: float) -> str:
        status = [one.call("maintenance/status") for one in self._members]
        leader = next(one for one in self._members if one.leads)
        ids = {one["header"]["member_id"] for one in status} - {status[0]["leader"]}
        target = sorted(ids)[int(aim * len(ids))]
        leader.call("maintenance/transfer-leadership", targetID=target)
        return f"to {target}"

    @property
    def versions(self) -> str:
        return f"etcd {self._members[0].call('maintenance/status')['version']}"


class FailoverBed(Bed):
    """Two Redis behind proxies; the row that says which is active is in a PostgreSQL."""

    store = "failover"
    # No answer for ``FAILOVER_AFTER``, then nothing is granted until all old leases are over.
    settles = 14.0
    VIEW_TTL = 3.0
    FAILOVER_AFTER = 3.0

    def start(self) -> None:
        self._database = self.stack.enter_context(PostgresServer())
        self._row = self.stack.enter_context(
            Proxy("127.0.0.1", self._database.port, speaks="postgres")
        )
        self._servers = [self.stack.enter_context(RedisServer()) for _ in range(2)]
        self._proxies = [
            self.stack.enter_context(Proxy("127.0.0.1", server.port)) for server in self._servers
        ]
        manage(self, "migrate", "--verbosity", "0")

    @property
    def dlocks(self) -> Dlocks:
        one, two = (self.entry("redis.RedisBackend", self._url(proxy)) for proxy in self._proxies)
        both = self.entry(
            "failover.FailoverBackend",
            primary="one",
            standby="two",
            view_ttl=self.VIEW_TTL,
            failover_after=self.FAILOVER_AFTER,
            failback_after=4.0,
        )
        return {"default": both, "one": one, "two": two}

    def _url(self, proxy: Proxy) -> str:
        return proxy.url

    @property
    def databases(self) -> dict[str, Any]:
        settings = postgres_settings(self._database.url)
        return {"default": {**settings, "PORT": str(self._row.port)}}

    @property
    def faults(self) -> Faults:
        return {
            **network(self._proxies, name="store "),
            **network([self._row], name="row "),
            **process(self._servers, name="store ", killed="restarted empty", excuse=0.0),
            "switched by hand": Fault(self._switch, lasts=False, weight=4),
            # It does not end, so it is for fixed schedules only.
            "active store refuses writes": Fault(self._refuse_writes, lasts=False, weight=0),
        }

    def _refuse_writes(self, aim: float) -> str:
        with closing(Redis.from_url(self._servers[0].url)) as client:
            client.config_set("min-replicas-to-write", 1)
        return "NOREPLICAS"

    def _switch(self, aim: float) -> str:
        direct = {"default": postgres_settings(self._database.url)}
        to = "two" if aim > 0.5 else "one"
        return manage(self, "switch_locks", "--to", to, databases=direct)

    @property
    def versions(self) -> str:
        import psycopg

        with psycopg.connect(self._database.url) as connection:
            row = connection.execute("SHOW server_version").fetchone()
            assert row is not None
            return f"Redis and PostgreSQL {row[0].split()[0]}"


class RestrictedFailoverBed(FailoverBed):
    """The stores take a user with no more rights than the documentation names."""

    store = "failover, restricted user"

    def start(self) -> None:
        super().start()
        for server in self._servers:
            with closing(Redis.from_url(server.url)) as client:
                client.execute_command(*documented_rights().split())

    def _url(self, proxy: Proxy) -> str:
        return proxy.url.replace("redis://", "redis://locks:password@")


def documented_rights() -> str:
    """The command that makes the user, from the guide to fail-over if it has one."""
    for guide in ("failover", "own-redis"):
        text = (ROOT / "docs" / "howto" / f"{guide}.md").read_text()
        if found := re.search(r"^ACL SETUSER .*(?:\n[ \t]+.*)*", text, re.MULTILINE):
            return found[0]
    raise LookupError("no guide says which rights a user needs")
