"""Servers take every script, with as many keys and arguments as its file names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from django_dlock.backends.redis import scripts
from django_dlock.backends.redis.commands import Command
from django_dlock.backends.redis.lua_source import LUA, Script
from django_dlock.backends.redlock import scripts as redlock_scripts
from django_dlock.lease import Contention, Lease, LeaseQuery, Renewal
from django_dlock.process import current
from testproject.servers import RedisServer
from tests.support.lua_files import COMMANDS, LuaFile
from tests.support.nodes import Nodes
from tests.support.redis_calls import backend_for, client, grant, refuse, release, renew, request

FILES = {file.name: file for file in COMMANDS}

OF_REDIS = {
    getattr(scripts, name): [file]
    for name, file in ((name.upper(), file) for name, file in FILES.items())
    if file.path.parent == LUA
}
"""The files of each script."""
OF_REDLOCK = {
    redlock_scripts.RAISE_TOKEN: [FILES["raise_token"]],
    redlock_scripts.WITHDRAW: [FILES["withdraw"]],
    redlock_scripts.ACQUIRE_AGAIN: [FILES["next_try"], FILES["guard"], FILES["acquire"]],
    **{
        guarded: [FILES["guard"], *OF_REDIS[script]]
        for script, guarded in redlock_scripts.GUARDED.items()
    },
}

Calls = dict[Script, list[tuple[int, int]]]
"""The numbers of keys and of arguments in each call of a script."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found: Calls = defaultdict(list)
    make = Command.__init__

    def noted(
        self: Command[Any], script: Script, keys: Sequence[Any], args: Sequence[Any], *rest: Any
    ) -> None:
        found[script].append((len(keys), len(args)))
        make(self, script, keys, args, *rest)

    monkeypatch.setattr(Command, "__init__", noted)
    return found


def assert_as_named(calls: Calls, files: dict[Script, list[LuaFile]]) -> None:
    for script, of in files.items():
        assert calls[script], of[-1].name
        for numbers in calls[script]:
            for title, number in zip(("KEYS", "ARGV"), numbers, strict=True):
                said = [name for file in of for name in file.section(title) if name != "script..."]
                least = sum(name.isidentifier() for name in said)
                assert number >= least, (of[-1].name, title)
                assert number == least or least < len(said), (of[-1].name, title)


@pytest.mark.parametrize(
    "script",
    [*OF_REDIS, *OF_REDLOCK],
    ids=lambda script: {**OF_REDIS, **OF_REDLOCK}[script][-1].name,
)
def test_a_server_takes_the_script(redis_server: RedisServer, script: Script) -> None:
    with client(redis_server) as asking:
        assert asking.script_load(script.source) == script.sha


def test_calls_have_the_keys_and_arguments_that_the_files_name(
    own_redis: RedisServer, calls: Calls
) -> None:
    backend = backend_for(own_redis.url)
    held, waiting = request(), request(waits=True)
    lease, deadline = grant(backend, held), backend.call_deadline()
    refuse(backend, waiting)
    # With a lease that ends earlier, waiters ask again.
    shorter = Renewal(lease.name, lease.owner, lease.ttl / 2, shorten=1)
    backend.renew([shorter], process=current().id, deadline=deadline)
    renew(backend, lease, grant(backend, request("other")))
    backend.locked("name", deadline=deadline)
    assert backend.waiters("name")
    # More leases than one page has, so that the index is cleaned.
    assert backend.page(LeaseQuery(), limit=1).total == 2
    backend.cancel_acquire(waiting, deadline=deadline)
    release(backend, lease)
    backend.break_("other", owner="nobody")
    backend.deregister(current().id, deadline=deadline)
    assert_as_named(calls, OF_REDIS)


def test_calls_of_redlock_have_the_keys_and_arguments_that_the_files_name(calls: Calls) -> None:
    with Nodes(3) as nodes:
        backend, asked = nodes.backend(), request()
        deadline = backend.call_deadline()
        rivals = [backend_for(node.server.url, key_prefix=nodes.prefix) for node in nodes.all[:2]]
        held = [grant(rival, request()) for rival in rivals]
        # No quorum: it is withdrawn, and tried again.
        assert isinstance(backend.acquire(asked, deadline=deadline), Contention)
        for rival, lease in zip(rivals, held, strict=True):
            release(rival, lease)
        assert isinstance(backend.acquire(asked, deadline=deadline), Lease)
        assert backend.locked("name", deadline=deadline)
        assert backend.page(LeaseQuery()).total == 1
    assert_as_named(calls, OF_REDLOCK)
