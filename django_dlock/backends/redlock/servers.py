"""What the nodes' servers report about themselves, each asked as a separate Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ...exceptions import BackendUnavailable
from ..base import AliasOptions, Fact, Problem
from ..redis import RedisBackend
from ..redis.information import RESTART

Servers = Iterable[tuple[str, AliasOptions]]
"""Their addresses, and how to connect to each."""


def problems(servers: Servers) -> Iterator[Problem]:
    """What is wrong with the settings of each server, and with their number."""
    known: dict[str, str] = {}
    for address, options in servers:
        with contextlib.closing(RedisBackend(options)) as backend:
            try:
                # Nothing is published here, so the permission to publish is not needed.
                yield from (it for it in backend.store_problems() if it.id != "W006")
                run_id = backend.run_id(deadline=backend.call_deadline())
            except BackendUnavailable as error:
                message = f"Node {address} of alias {options.alias!r} cannot be used: {error}"
                hint = "The locks work as long as a majority does. Start it, or correct LOCATION."
                yield Problem("W008", message, hint)
                continue
        other = known.setdefault(run_id, address) if run_id else address
        if other != address:
            message = (
                f"Nodes {other} and {address} of alias {options.alias!r} are one server, which "
                "has one vote: they are two addresses of it, or nodes of one Redis Cluster."
            )
            hint = "List servers in LOCATION that share no machine, no cluster and no replication."
            yield Problem("W013", message, hint)


def facts(servers: Servers, deadline: float, kept_out: float) -> Iterator[Fact]:
    """What each server reports about itself; those that do not answer are among the problems.

    Args:
        kept_out: Seconds for which a server grants nothing after a restart.
    """
    for address, options in servers:
        found: list[Fact] = []
        backend = RedisBackend(options)
        with contextlib.suppress(BackendUnavailable), contextlib.closing(backend):
            found += backend.facts(deadline=deadline)
            uptime = backend.uptime(deadline=deadline)
            if uptime is not None and uptime < kept_out:
                hint = (
                    f"Restart no other server until {kept_out:g} s after its start: before that it "
                    "grants nothing, even if it has kept its data."
                )
                found.append(Fact("restart", f"started {uptime:g} s ago", hint))
        for topic, text, hint in found:
            # A node that was restarted grants nothing until all leases that it forgot are over.
            yield Fact(topic, f"{address}: {text}", "" if hint == RESTART else hint)
