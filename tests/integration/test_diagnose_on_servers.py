"""``diagnose_locks`` with real servers that are stopped, paused, full or not permitted."""

from __future__ import annotations

import io
import json
import secrets
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import connections

from django_dlock import locks
from django_dlock.operators import findings
from testproject.servers import RedisServer, free_port
from tests.support import databases
from tests.support.aliases import alias, configured
from tests.support.nodes import Nodes
from tests.support.proxy import Proxy
from tests.support.redis_cluster import RedisCluster

pytestmark = pytest.mark.extended

DATABASE = "django_dlock.backends.database.DatabaseBackend"
REDLOCK = "django_dlock.backends.redlock.RedlockBackend"
ETCD = "django_dlock.backends.etcd.EtcdBackend"
ZOOKEEPER = "django_dlock.backends.zookeeper.ZooKeeperBackend"


@pytest.fixture(autouse=True)
def _databases(django_db_setup, django_db_blocker):
    """Databases may be used on all threads, including databases that a test adds."""
    with django_db_blocker.unblock():
        yield


# On a busy machine, the first connection takes its time.
TIMEOUT = {"command_timeout": 2.0}


def entry(backend, **values):
    return {"BACKEND": backend, "TTL": 30.0, "OPTIONS": TIMEOUT, **values}


def diagnose(dlocks, **options):
    """Exit code, seconds, and the findings by alias and topic, without those of the project."""
    out, code = io.StringIO(), 0
    started = time.monotonic()
    with configured(dlocks):
        try:
            call_command("diagnose_locks", format="json", stdout=out, **options)
        except CommandError as error:
            code = error.returncode
    seconds = time.monotonic() - started
    listed = json.loads(out.getvalue())["findings"]
    by_topic = {(it["alias"], it["topic"]): it for it in listed if it["alias"]}
    return SimpleNamespace(code=code, seconds=seconds, found=by_topic)


def severities(told, alias="default"):
    return {topic: it["severity"] for (named, topic), it in told.found.items() if named == alias}


def errors(told):
    return [key for key, it in told.found.items() if it["severity"] == "error"]


# -- Redis ---------------------------------------------------------------------------------------


def test_a_redis_that_keeps_its_data_has_no_fault(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("appendonly", "yes")
        wanted = client.info("server")["redis_version"]
    told = diagnose({"default": alias(own_redis.url, OPTIONS=TIMEOUT, TTL=30.0)})
    assert set(severities(told).values()) == {"ok"}
    assert {"answer", "cycle", "clock", "server", "persistence", "memory"} <= set(severities(told))
    assert wanted in told.found["default", "server"]["message"]
    assert told.found["default", "persistence"]["message"] == "append-only file"
    assert abs(told.found["default", "clock"]["values"]["ahead_seconds"]) < 1
    assert told.code == 0


def test_the_lock_that_was_tried_is_free_afterwards(own_redis):
    dlocks = {"default": alias(own_redis.url)}
    assert severities(diagnose(dlocks))["cycle"] == "ok"
    with configured(dlocks):
        assert locks["default"].get(findings.NAME) is None
        assert severities(diagnose(dlocks))["cycle"] == "ok"


def test_read_only_writes_nothing(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        diagnose({"default": alias(own_redis.url)}, read_only=True)
        assert client.dbsize() == 0


def test_a_redis_without_persistence_is_a_warning(own_redis):
    told = diagnose({"default": alias(own_redis.url)})
    assert severities(told)["persistence"] == "warning"
    assert "appendonly yes" in told.found["default", "persistence"]["hint"]
    assert told.code == 0
    assert diagnose({"default": alias(own_redis.url)}, fail_level="WARNING").code == 1


def test_a_redis_that_evicts_keys_is_a_warning(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    told = diagnose({"default": alias(own_redis.url)})
    assert told.found["default", "eviction"]["message"] == "allkeys-lru"
    assert severities(told)["django_dlock.W003"] == "warning"
    assert "noeviction" in told.found["default", "django_dlock.W003"]["hint"]


def test_a_redis_without_free_memory_is_an_error(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", "1mb")
    told = diagnose({"default": alias(own_redis.url)})
    assert severities(told)["answer"] == "ok"
    assert severities(told)["cycle"] == "error"
    assert "memory" in told.found["default", "cycle"]["message"]
    assert severities(told)["memory"] == "warning"
    assert told.code == 1


def test_a_redis_that_has_few_connections_left_is_a_warning(own_redis):
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxclients", "20")
        if "maxclients" not in client.info("clients"):
            pytest.skip("This Redis does not tell its limit")
    told = diagnose({"default": alias(own_redis.url)})
    assert severities(told)["connections"] == "warning"


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_redis_that_does_not_answer_hides_no_other_alias(own_redis, redis_server, fault):
    getattr(own_redis, fault)()
    dlocks = {
        "down": alias(own_redis.url),
        "up": alias(redis_server.url, OPTIONS=TIMEOUT, TTL=30.0),
    }
    told = diagnose(dlocks)
    if fault == "pause":
        own_redis.resume()
    assert told.code == 1
    assert severities(told, "down") == {"answer": "error"}
    assert severities(told, "up")["cycle"] == "ok"
    # One command_timeout, which is 0.5 s; the rest is time for a busy machine.
    assert told.seconds < 5


def test_a_wrong_password_is_reported_as_such():
    with RedisServer(password="secret") as server:
        wrong = server.url.replace(":secret@", ":guess@")
        told = diagnose({"default": alias(wrong)})
        missing = diagnose({"default": alias(server.url.replace(":secret@", ""))})
    for each in (told, missing):
        assert severities(each) == {"answer": "error"}
        assert "password" in each.found["default", "answer"]["message"]
        assert "password" in each.found["default", "answer"]["hint"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("-config", {"persistence": "warning"}),
        ("-info", {"django_dlock.W012": "warning"}),
    ],
)
def test_a_user_without_a_right_to_ask_is_told_what_is_not_known(own_redis, rule, expected):
    name = f"user-{secrets.token_hex(4)}"
    with redis.Redis.from_url(own_redis.url) as client:
        rules = ("reset", "on", ">pw", "~*", "&*", "+@all", rule)
        client.execute_command("ACL", "SETUSER", name, *rules)
    told = diagnose({"default": alias(own_redis.url.replace("redis://", f"redis://{name}:pw@"))})
    assert severities(told)["cycle"] == "ok"
    assert expected.items() <= severities(told).items()
    assert errors(told) == []
    if rule == "-config":
        assert told.found["default", "persistence"]["message"] == "no append-only file"
    else:
        assert "server" not in severities(told)
        assert "+info" in told.found["default", "django_dlock.W012"]["hint"]


def test_a_replica_is_an_error(own_redis):
    with RedisServer(args=("--replicaof", "127.0.0.1", str(own_redis.port))) as replica:
        told = diagnose({"default": alias(replica.url)})
    assert told.code == 1
    assert severities(told)["cycle"] == "error"
    assert "replica" in told.found["default", "replicas"]["message"]


def test_missing_replicas_are_reported_although_no_lock_can_be_acquired(own_redis):
    told = diagnose({"default": alias(own_redis.url, OPTIONS={"replicas": 1})})
    assert severities(told)["cycle"] == "error"
    assert severities(told)["django_dlock.W011"] == "warning"


# -- databases -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("database", "product"),
    [("default", "SQLite"), ("postgres", "PostgreSQL"), ("mariadb", "MariaDB")],
)
def test_a_database_tells_its_version(request, database, product):
    if database != "default":
        request.getfixturevalue(f"{database}_alias")
    told = diagnose({"default": entry(DATABASE, OPTIONS={**TIMEOUT, "database": database})})
    assert errors(told) == []
    assert product in told.found["default", "server"]["message"]
    assert severities(told)["cycle"] == "ok"
    assert severities(told)["persistence"] == "ok"
    used = "at most 4 of each process"
    if database == "postgres":
        used += ", and one that listens"
    assert told.found["default", "connections"]["message"] == used


@pytest.mark.parametrize("fault", ["silent", "stopped"])
def test_a_postgresql_that_does_not_answer_is_one_error(postgres_url, postgres_alias, fault):
    parts = urlsplit(postgres_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 5432, speaks="postgres") as proxy:
        port = proxy.port if fault == "silent" else free_port()
        proxy.black_hole()
        place = {"HOST": "127.0.0.1", "PORT": str(port)}
        with databases.added("other", {**connections.settings[postgres_alias], **place}):
            options = {"database": "other", "command_timeout": 0.5}
            dlocks = {"default": entry(DATABASE, OPTIONS=options), "up": entry(DATABASE)}
            told = diagnose(dlocks)
        assert severities(told) == {"answer": "error"}
        assert errors(told) == [("default", "answer")]
        assert told.code == 1
        assert told.seconds < 8


@pytest.mark.parametrize("wrong", [{"NAME": "nowhere"}, {"USER": "nobody"}])
def test_a_postgresql_with_wrong_settings_is_one_error(postgres_alias, wrong):
    with databases.added("other", {**connections.settings[postgres_alias], **wrong}):
        told = diagnose({"default": entry(DATABASE, OPTIONS={**TIMEOUT, "database": "other"})})
    assert severities(told) == {"answer": "error"}
    assert next(iter(wrong.values())) in told.found["default", "answer"]["message"]
    assert told.code == 1


def test_a_database_of_records_that_is_silent_makes_nothing_hang(
    postgres_url, postgres_alias, own_redis, settings
):
    parts = urlsplit(postgres_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 5432, speaks="postgres") as proxy:
        proxy.black_hole()
        place = {"HOST": "127.0.0.1", "PORT": str(proxy.port)}
        with databases.added("other", {**connections.settings[postgres_alias], **place}):
            settings.DATABASE_ROUTERS = [f"{__name__}.ToOther"]
            out = io.StringIO()
            started = time.monotonic()
            with configured({"default": alias(own_redis.url)}), pytest.raises(CommandError):
                call_command("diagnose_locks", stdout=out)
            assert time.monotonic() - started < 15
            assert "the database 'other' of records and lock events: no answer" in out.getvalue()
            # The thread that was left behind ends before its database is gone.
            proxy.cut()


class ToOther:
    def db_for_write(self, model, **hints):
        return "other" if model._meta.app_label == "django_dlock" else None


# -- several servers -----------------------------------------------------------------------------


def test_redlock_tells_of_each_node_and_names_the_one_that_is_down():
    with Nodes(3) as nodes:
        dlocks = {"default": entry(REDLOCK, LOCATION=nodes.urls, KEY_PREFIX=nodes.prefix)}
        told = diagnose(dlocks)
        assert errors(told) == []
        assert told.found["default", "quorum"]["message"] == "2 of 3 nodes"
        assert severities(told)["persistence"] == "ok"
        nodes.fail([1])
        told = diagnose(dlocks)
        assert severities(told)["cycle"] == "ok"
        assert severities(told)["django_dlock.W008"] == "warning"
        nodes.fail([2])
        assert severities(diagnose(dlocks)) == {"answer": "error"}


def test_w013_redlock_whose_nodes_are_one_cluster_or_one_server_is_a_warning(own_redis):
    with RedisCluster() as cluster:
        of_one_cluster = [node.url for node in cluster.nodes[:3]]
        dlocks = {"default": entry(REDLOCK, LOCATION=of_one_cluster)}
        # Such nodes grant nothing.
        assert severities(diagnose(dlocks)) == {"answer": "error"}
        with configured(dlocks):
            problems = locks["default"].store_problems()
    assert {problem.id for problem in problems} == {"W013"}
    assert "nodes of one Redis Cluster" in problems[0].message
    # The addresses differ, the server does not.
    with RedisServer() as other, Proxy("127.0.0.1", own_redis.port) as proxy:
        urls = [own_redis.url, proxy.url, other.url]
        with configured({"default": entry(REDLOCK, LOCATION=urls)}):
            (problem,) = locks["default"].store_problems()
    assert problem.id == "W013"
    assert all(url.rpartition("/")[0].rpartition("/")[2] in problem.message for url in urls[:2])


def test_etcd_tells_its_version_and_whether_there_is_a_leader(etcd_server):
    told = diagnose({"default": entry(ETCD, LOCATION=etcd_server.url)})
    assert errors(told) == []
    assert "etcd 3." in told.found["default", "server"]["message"]
    assert told.found["default", "leader"]["message"] == "the member that answered is the leader"


def test_zookeeper_tells_its_version_and_role(zookeeper_server):
    told = diagnose({"default": entry(ZOOKEEPER, LOCATION=zookeeper_server.location)})
    assert errors(told) == []
    assert "ZooKeeper 3." in told.found["default", "server"]["message"]
    assert "standalone" in told.found["default", "server"]["message"]
