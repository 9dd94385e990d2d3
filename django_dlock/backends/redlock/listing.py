"""What operators read of a quorum: pages of the leases that it holds, and answers of all nodes.

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
from ..redis.commands import Ask
from ..redis.keys import Keys
from ..redis.listing import RedisListing
from .broadcast import PENDING, Answers, Broadcast, Decided
from .votes import Votes

GRACE = 0.1
"""Seconds that a page waits, at least, for nodes after the quorum."""


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
    """The leases of each node by name, or why they are not known."""
    began = clock.now()
    reads = [partial(_leases, node, query) for node in nodes]
    collected = ask_all(reads, votes.has_quorum)
    collected.wait(math.inf)
    # Give the others as much time again, so that a silent one does not delay the page for long.
    until = clock.now() + (clock.now() - began) + GRACE
    while PENDING in collected.answers and clock.now() < until:
        time.sleep(GRACE / 20)
    return list(collected.answers)


def ask_all(reads: Sequence[Callable[[], Any]], decided: Decided) -> Broadcast:
    """What each function returns or raises; each one reads from one node.

    Reads on a thread per node, because it may take several calls; it is for operators, and rare.
    """
    collected = Broadcast(len(reads), decided)

    def run(number: int, read: Callable[[], Any]) -> None:
        try:
            answer = read()
        except Exception as error:  # noqa: BLE001 - the caller judges it
            answer = error
        collected.put(number, answer)

    for number, read in enumerate(reads):
        threading.Thread(target=run, args=(number, read), name="dlock-page", daemon=True).start()
    return collected


def _leases(node: RedisListing, query: LeaseQuery) -> dict[str, LeaseInfo]:
    infos = node.page(query, offset=0, limit=None).infos
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
