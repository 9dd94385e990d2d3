"""Pages of the leases that a quorum holds, for operators.

No node can tell alone which leases a quorum holds, so each page reads the names of all nodes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ... import clock
from ...lease import LeaseInfo, LeasePage, LeaseQuery, in_order
from ..redis.commands import Keys
from ..redis.listing import RedisListing
from .broadcast import PENDING, Answers, Broadcast
from .votes import Votes

__all__ = ["page"]

GRACE = 0.1
"""Seconds that a page waits, at least, for nodes after the quorum."""

Ask = Callable[..., Any]
"""Runs a script on one node; see ``redis.listing.Ask``."""


def page(
    alias: str,
    keys: Keys,
    nodes: Sequence[Ask],
    votes: Votes,
    query: LeaseQuery,
    *,
    offset: int,
    limit: int | None,
) -> LeasePage | Answers:
    """A page as ``BaseLockBackend.page`` says; the answers if too few nodes have answered.

    Args:
        nodes: One function for each node; it raises if the node does not answer.
    """
    # Which leases have a property is known only when all nodes' answers are put together.
    everything = LeaseQuery(query.prefix, query.contains)
    answers = _from_all([RedisListing(alias, keys, ask) for ask in nodes], everything, votes)
    if not votes.has_quorum(answers):
        return answers
    infos = [info for info in _merged(votes, answers) if query.matches(info)]
    # As on one Redis, in the order of the grants.
    infos.sort(key=lambda info: info.token)
    infos = in_order(infos, query.sort)
    return LeasePage(infos[offset:][:limit], len(infos))


def _from_all(nodes: Sequence[RedisListing], query: LeaseQuery, votes: Votes) -> Answers:
    """The leases of each node by name, or why they are not known.

    Reads on a thread per node, because a page may take many calls; it is for operators, and rare.
    """
    collected, began = Broadcast(len(nodes), votes.has_quorum), clock.now()
    for number, node in enumerate(nodes):
        put = partial(collected.put, number)
        threading.Thread(
            target=lambda node=node, put=put: put(_leases(node, query)),
            name="dlock-page",
            daemon=True,
        ).start()
    collected.wait(math.inf)
    # Give the others as much time again, so that a silent one does not delay the page for long.
    until = clock.now() + (clock.now() - began) + GRACE
    while PENDING in collected.answers and clock.now() < until:
        time.sleep(GRACE / 20)
    return list(collected.answers)


def _leases(node: RedisListing, query: LeaseQuery) -> dict[str, LeaseInfo] | Exception:
    try:
        infos = node.page(query, offset=0, limit=None).infos
    except Exception as error:  # noqa: BLE001 - the caller judges it
        return error
    return {info.name: info for info in infos}


def _merged(votes: Votes, answers: Sequence[Any]) -> list[LeaseInfo]:
    names: dict[str, None] = {}
    for answer in answers:
        if isinstance(answer, dict):
            names.update(dict.fromkeys(answer))
    merged = (
        votes.lease([one.get(name) if isinstance(one, dict) else one for one in answers])
        for name in names
    )
    return [info for info in merged if info is not None]
