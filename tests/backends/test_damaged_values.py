"""A value that a stranger wrote into a store is shown as damaged, and hides and stops nobody."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_dlock import locks
from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.redis.commands import HOUSEKEEPING_EVERY
from django_dlock.lease import LeaseQuery
from django_dlock.process import current
from django_dlock.text.printable import printable
from testproject.servers import RedisServer
from tests.support.redis_calls import backend_for, client, grant, refuse, release, renew, request

BASE = "{dlock:0}:2:"
LOCK, WAITERS, INDEX, CLOCK = f"{BASE}l:name", f"{BASE}q:name", f"{BASE}i", f"{BASE}clock"
SOUND = ["a", "b"]

DEEP = "[" * 30_000 + "]" * 30_000
METADATA = {
    "deep": '{"path": ' + DEEP + "}",
    "deep enough to be read": '{"path": ' + "[" * 400 + "]" * 400 + "}",
    "a list": "[1, 2]",
    "no JSON": "{",
    "no UTF-8": b"\xff\xfe{",
    "a lone surrogate": '{"task_name": "\\ud800", "path": "/"}',
    "a surrogate as a key": '{"\\udfff": 1}',
    "a huge number": '{"task_id": ' + "9" * 5000 + "}",
    "enormous": '{"path": "' + "x" * 2_000_000 + '"}',
}
UNREADABLE_PROCESS = {
    "a huge pid": 10**30,
    "a pid without an end": math.inf,
    "a pid that is none": math.nan,
    "a pid as text": "x",
    "a pid as a list": [1],
    "a group of processes": -1,
    "all processes of the group": 0,
    "a truth": True,
}
TYPES = {
    "string": lambda server, key: server.set(key, "x"),
    "list": lambda server, key: server.rpush(key, "x"),
    "set": lambda server, key: server.sadd(key, "x"),
    "hash": lambda server, key: server.hset(key, "x", "y"),
    "sorted set": lambda server, key: server.zadd(key, {"x": 1}),
    "stream": lambda server, key: server.xadd(key, {"x": "y"}),
}
each_type = pytest.mark.parametrize("kind", TYPES)


@pytest.fixture
def it(own_redis: RedisServer) -> Iterator[RedisBackend]:
    backend = backend_for(own_redis.url)
    yield backend
    backend.close()


def put(server: Any, key: str, kind: str) -> None:
    server.delete(key)
    TYPES[kind](server, key)


def identity(**facts: Any) -> str:
    return json.dumps({**current().as_dict(), **facts})


def shown(it: RedisBackend, name: str = "name") -> tuple[str, ...]:
    """What is damaged of the one lock, after a look at each way to find it among the others."""
    queries = [
        LeaseQuery(),
        LeaseQuery(sort=("-age",)),
        *(
            LeaseQuery(sort=(key,))
            for key in ("holder", "holder_state", "waiting", "ttl", "trouble")
        ),
    ]
    for query in queries:
        found = {info.name: info for info in it.page(query, offset=0, limit=50).infos}
        assert set(found) == {*SOUND, name}, query
        assert not any(found[sound].damaged for sound in SOUND)
    # Searches read what is in the row, too, and must find the sound ones.
    for query in (LeaseQuery(contains="a"), LeaseQuery(host=current().host), LeaseQuery(task="t")):
        it.page(query, offset=0, limit=50)
    alone = it.get(name)
    assert alone is not None
    assert alone.damaged == found[name].damaged
    # Commands print this, whatever it is.
    json.dumps(alone.as_dict(), allow_nan=False, indent=2).encode()
    printable(json.dumps(dict(alone.metadata), indent=2, ensure_ascii=False)).encode()
    assert len(alone.holder) < 2000
    return alone.damaged


@pytest.mark.parametrize("meta", METADATA.values(), ids=METADATA)
def test_damaged_metadata_is_marked(it, own_redis, meta):
    for name in [*SOUND, "name"]:
        grant(it, request(name))
    with client(own_redis) as stranger:
        stranger.hset(LOCK, "meta", meta)
    assert shown(it) == ("metadata",)


@pytest.mark.parametrize("pid", UNREADABLE_PROCESS.values(), ids=UNREADABLE_PROCESS)
def test_a_damaged_process_is_marked(it, own_redis, pid):
    for name in [*SOUND, "name"]:
        grant(it, request(name))
    with client(own_redis) as stranger:
        stranger.hset(LOCK, "proc", "stranger")
        stranger.set(f"{BASE}p:stranger", f"1 {identity(pid=pid)}")
    assert shown(it) == ("process",)
    assert it.get("name").process is None
    assert refuse(it, request()).process is None


@pytest.mark.parametrize("field", ["until", "token", "at", "ttl", "n", "kind"])
@pytest.mark.parametrize("wrong", ["nan", "inf", "1e400", "9" * 400, "", "held\n5\n6", b"\xff"])
def test_a_damaged_field_is_marked(it, own_redis, field, wrong):
    for name in [*SOUND, "name"]:
        grant(it, request(name))
    with client(own_redis) as stranger:
        stranger.hset(LOCK, field, wrong)
    marks = {"until": "ttl", "at": "acquired_at", "n": "renewals"}
    assert shown(it) == (marks.get(field, field),)
    assert refuse(it, request()).owner


@each_type
def test_a_lock_of_another_type_is_marked_and_can_be_removed(it, own_redis, kind):
    for name in SOUND:
        grant(it, request(name))
    with client(own_redis) as stranger:
        if kind == "hash":
            pytest.skip("the right type")
        stranger.zadd(INDEX, {"name": 1})
        put(stranger, LOCK, kind)
    assert shown(it) == ("type",)
    assert it.get("name").ttl is None
    assert it.locked("name", deadline=it.call_deadline())
    assert it.waiters("name") == []
    assert not it.break_silently("name", owner="somebody")
    assert it.break_silently("name", owner="")
    assert it.get("name") is None
    grant(it, request())


@each_type
def test_one_overwritten_lock_is_lost_alone(it, own_redis, kind):
    leases = [grant(it, request(name)) for name in [*SOUND, "name"]]
    with client(own_redis) as stranger:
        put(stranger, LOCK, kind)
    assert renew(it, *leases) == ["renewed", "renewed", "refused"]
    assert release(it, leases[2]) == "refused"
    it.cancel_acquire(request(), deadline=it.call_deadline())
    assert [release(it, lease) for lease in leases[:2]] == ["released"] * 2


def test_a_stray_name_in_the_index_stops_no_renewal(it, own_redis):
    lease = grant(it, request("a"))
    with client(own_redis) as stranger:
        stranger.zadd(INDEX, {"name": 1})
        stranger.rpush(LOCK, "x")
    # Each call sweeps the names that the one before it has chosen.
    assert [renew(it, lease) for _ in range(2)] == [["renewed"]] * 2
    other = backend_for(own_redis.url)
    for _ in range(2 * HOUSEKEEPING_EVERY):
        assert release(other, grant(other, request("b"))) == "released"
    assert release(it, lease) == "released"


@pytest.mark.parametrize("key", ["WAITERS", "INDEX", "CLOCK"])
@each_type
def test_a_key_of_another_type_stops_nobody(it, own_redis, key, kind):
    lease = grant(it, request())
    with client(own_redis) as stranger:
        put(stranger, globals()[key], kind)
    assert renew(it, lease) == ["renewed"]
    assert it.get("name").owner == lease.owner
    assert it.waiters("name") == [] or kind == "sorted set"
    waiting = request(waits=True)
    assert refuse(it, waiting).owner == lease.owner
    assert waiting.owner in [waiter.owner for waiter in it.waiters("name")]
    it.cancel_acquire(waiting, deadline=it.call_deadline())
    assert release(it, lease) == "released"
    later = grant(it, request())
    assert later.token > lease.token
    assert [info.name for info in it.page(LeaseQuery(), offset=0, limit=9).infos] == ["name"]
    assert it.break_silently("name", owner=later.owner)


@each_type
def test_a_process_of_another_type_hides_no_lock(it, own_redis, kind):
    for name in [*SOUND, "name"]:
        grant(it, request(name))
    with client(own_redis) as stranger:
        stranger.hset(LOCK, "proc", "stranger")
        put(stranger, f"{BASE}p:stranger", kind)
    shown(it)
    assert it.get("name").holder_state in ("unknown", "silent")
    assert refuse(it, request()).process is None


def member(owner="stranger", ttl="1000", kind="held", process="p", metadata="{}") -> str:
    return "\n".join([owner, ttl, kind, process, metadata])


@pytest.mark.parametrize(
    ("entry", "marks"),
    [
        (b"\xff\xfe", ("request",)),
        ("x" * 300_000, ("request",)),
        (member(metadata=METADATA["deep"]), ("metadata",)),
        (member(metadata=METADATA["enormous"]), ("metadata",)),
        (member(metadata='{"path": "\\ud800"}'), ("metadata",)),
        (member(process="stranger"), ("process",)),
        (member(ttl="soon"), ()),
    ],
    ids=["bytes", "long", "deep", "enormous", "surrogate", "process", "ttl"],
)
def test_a_damaged_waiter_is_marked_and_stops_nobody(it, own_redis, entry, marks):
    lease, waiting = grant(it, request()), request(waits=True)
    refuse(it, waiting)
    with client(own_redis) as stranger:
        stranger.zadd(WAITERS, {entry: 1})
        stranger.set(f"{BASE}p:stranger", f"nan {identity(pid=10**30)}")
    found = it.waiters("name")
    assert [waiter.damaged for waiter in found] == [marks, ()]
    assert found[1].owner == waiting.owner
    for waiter in found:
        json.dumps(waiter.as_dict(), allow_nan=False).encode()
        assert len(waiter.who) < 2000
    shown_waiting = it.get("name").waiting
    assert shown_waiting >= 0
    assert renew(it, lease) == ["renewed"]
    assert release(it, lease) == "released"


def test_a_waiter_without_a_duration_is_not_granted_the_lock(it, own_redis):
    """It names a process that listens, so the release would hand the lock over to it."""
    lease = grant(it, request())
    with client(own_redis) as stranger, stranger.pubsub() as listening:
        listening.subscribe(f"{BASE}m:p")
        listening.get_message(timeout=10)
        for number, ttl in enumerate(["soon", "nan", "inf", "-1", "0", "1e400", ""]):
            stranger.zadd(WAITERS, {member(owner=f"o{number}", ttl=ttl): number + 1})
        assert release(it, lease) == "released"
        assert it.get("name") is None
        assert stranger.zcard(WAITERS) == 0


@pytest.mark.django_db
def test_the_commands_mark_what_is_damaged(own_redis):
    entry = {"BACKEND": "django_dlock.backends.redis.RedisBackend", "LOCATION": own_redis.url}
    with override_settings(DLOCKS={"default": entry}):
        for name in SOUND:
            grant(locks["default"], request(name))
        with client(own_redis) as stranger:
            stranger.zadd(INDEX, {"name": 1})
            stranger.set(LOCK, "x")
            stranger.hset(f"{BASE}l:a", "meta", METADATA["deep"])
        text, as_json = StringIO(), StringIO()
        call_command("list_locks", stdout=text)
        call_command("list_locks", "--waiters", format="json", stdout=as_json)
        rows = {row["name"]: row["damaged"] for row in json.loads(as_json.getvalue())}
        assert rows == {"a": ["metadata"], "b": [], "name": ["type"]}
        lines = {line.split()[0]: line for line in text.getvalue().splitlines()}
        assert "damaged: metadata" in lines["a"]
        assert "damaged: type" in lines["name"]
        assert "damaged" not in lines["b"]
        # This server may lose locks when it is full, which is an error of its own.
        with suppress(CommandError):
            call_command("diagnose_locks", stdout=StringIO())
        call_command("clear_stale_locks", stdout=StringIO())
        assert locks["default"].get("name") is None
        assert {info.name for info in locks["default"].list()} == set(SOUND)


def test_any_value_of_a_lock_hides_no_other(it, own_redis):
    hypothesis = pytest.importorskip("hypothesis")
    some = hypothesis.strategies
    fields = ["owner", "until", "kind", "token", "ttl", "at", "n", "proc", "meta", "past"]
    json_values = some.recursive(
        some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
        lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    )
    facts = some.sampled_from(["path", "task_name", "task_id", "user", "pid", "host", "boot_id"])
    objects = some.dictionaries(facts, json_values).map(json.dumps)
    values = some.binary() | objects | some.integers().map(str) | some.floats().map(str)
    for name in SOUND:
        # Longer than the test may take on a busy machine.
        grant(it, request(name, ttl=3600.0))

    @hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @hypothesis.given(some.dictionaries(some.sampled_from(fields), values), values, values)
    def fuzz(written: dict[str, Any], beat: Any, waiter: Any) -> None:
        with client(own_redis) as stranger:
            stranger.delete(LOCK, WAITERS)
            lease = grant(it, request())
            stranger.hset(LOCK, mapping={"proc": "stranger", **written})
            stranger.set(f"{BASE}p:stranger", beat)
            stranger.zadd(WAITERS, {waiter: 1})
            for sort in ("-age", "holder", "ttl", "waiting", "trouble"):
                found = it.page(LeaseQuery(sort=(sort,)), offset=0, limit=None).infos
                assert {info.name for info in found} >= set(SOUND)
                for info in found:
                    json.dumps(info.as_dict(), allow_nan=False)
                    printable(json.dumps(dict(info.metadata), ensure_ascii=False)).encode()
            it.waiters("name")
            renew(it, lease)
            refused = it.acquire(request(waits=True), deadline=it.call_deadline())
            assert refused is not None
            release(it, lease)

    fuzz()
