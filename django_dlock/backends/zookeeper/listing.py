"""What operators ask of ZooKeeper: one name, pages of held locks, and who waits.

ZooKeeper has no queries: a page reads all nodes of the alias, whatever it shows, because only the
data of a node says its name, and only its state says when it was created. Many requests are under
way at once, but not so many that a renewal waits long behind them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ... import clock
from ...lease import LeaseInfo, LeasePage, LeaseQuery, Waiter, in_order
from ..alias import AliasOptions
from ..holder_state import holder_state
from ..operator_rows import Judge, lease_row, waiter_row
from .calls import SessionCalls
from .nodes import LockNode, contents, digest_of, lock_node, queue
from .session import Session

T = TypeVar("T")

UNDER_WAY = 100
"""Requests without an answer, at most."""

SETTLED = 10.0
"""Seconds that a node must have been the first of its name before it is kept for the next list.

By then its owner has learned that it holds the name, and writes the node no more."""
READ_AGAIN = 60.0
"""Seconds after which it is read again nevertheless."""

EVERYTHING = LeaseQuery()


class _Kept(NamedTuple):
    """The first node of a name, as a list has read it; times are on ``clock.now()``."""

    node: LockNode
    first_since: float
    read_at: float

    def is_good(self, now: float) -> bool:
        return self.read_at - self.first_since >= SETTLED and now - self.read_at < READ_AGAIN


class ZooKeeperListing:
    """Answers the queries of ``BaseLockBackend``.

    Args:
        remaining: Seconds until the lease of an owner of this process ends; ``None`` for others.
    """

    def __init__(
        self,
        options: AliasOptions,
        sessions: SessionCalls,
        remaining: Callable[[str], float | None],
    ) -> None:
        self._alias, self._command_timeout = options.alias, options.command_timeout
        self._sessions, self._remaining = sessions, remaining
        # By path, so that pages that are read again and again do not read each node every time.
        self._kept: dict[str, _Kept] = {}

    def get(self, name: str) -> LeaseInfo | None:
        now, line = self._queue(name)
        return self._info(name, line, now) if line else None

    def get_many(self, names: Sequence[str]) -> dict[str, LeaseInfo]:
        found = ((name, self.get(name)) for name in names)
        return {name: info for name, info in found if info is not None}

    def waiters(self, name: str, limit: int) -> list[Waiter]:
        now, line = self._queue(name)
        # The first one holds the name. A node ends with its session, so no waiter is silent.
        return [self._waiter(name, each, now) for each in line[1:][: max(0, limit)]]

    def page(self, query: LeaseQuery, offset: int, limit: int | None) -> LeasePage:
        if limit == 0 and query == EVERYTHING:
            return LeasePage([], self._call(self._count))
        now, lines = self._call(self._read_all)
        # Many leases may be of one process.
        judge = functools.cache(holder_state)
        infos = [self._info("", line, now, judge) for line in lines]
        found = in_order(filter(query.matches, infos), query.sort)
        end = None if limit is None else offset + limit
        return LeasePage(found[offset:end], len(found))

    # -- inside ------------------------------------------------------------------------

    def _call(self, step: Callable[[Session], T]) -> T:
        return self._sessions.call(step, "", self._soon())

    def _soon(self) -> float:
        return clock.now() + self._command_timeout

    def _queue(self, name: str) -> tuple[float, list[LockNode]]:
        return self._call(lambda session: queue(session, name, self._soon()))

    def _count(self, session: Session) -> int:
        session.answer(session.beat(), self._soon())
        return len({digest_of(path) for path in self._paths(session)})

    def _read_all(self, session: Session) -> tuple[float, list[list[LockNode]]]:
        """The server's time, and the nodes of each name, in the order of the first one's grant."""
        # A write first, so that the server that answers has seen all earlier ones.
        now: float = session.answer(session.beat(), self._soon()).last_modified
        paths, began, kept = list(self._paths(session)), clock.now(), self._kept
        known = {path: it for path in paths if (it := kept.get(path)) and it.is_good(began)}
        nodes = [it.node for it in known.values()]
        others = (path for path in paths if path not in known)
        for path, answer in self._answers(session, others, session.client.get_async):
            # It may be gone since.
            if answer is not None:
                nodes.append(lock_node(path, *answer))
        lines: dict[str, list[LockNode]] = {}
        for node in sorted(nodes, key=lambda node: node.token):
            lines.setdefault(digest_of(node.path), []).append(node)
        for line in lines.values():
            path, first_since = line[0].path, began
            if (earlier := kept.get(path)) and earlier.node == line[0]:
                first_since = earlier.first_since
            known.setdefault(path, _Kept(line[0], first_since, began))
        self._kept = known
        return now, sorted(lines.values(), key=lambda line: line[0].token)

    def _paths(self, session: Session) -> Iterator[str]:
        root, list_ = session.root, session.client.get_children_async
        buckets = session.answer_or_none(list_(root), self._soon()) or []
        directories = [f"{root}/{bucket}" for bucket in buckets]
        for directory, nodes in self._answers(session, directories, list_):
            for node in nodes or ():
                yield f"{directory}/{node}"

    def _answers(
        self, session: Session, paths: Iterable[str], ask: Callable[[str], Any]
    ) -> Iterator[tuple[str, Any]]:
        """The answer about each path; ``None`` if there is no such node.

        A long list takes as long as it takes, but no answer is late by a ``command_timeout``.
        """
        asked: deque[tuple[str, Any]] = deque()
        for path in paths:
            asked.append((path, ask(path)))
            if len(asked) >= UNDER_WAY:
                first, request = asked.popleft()
                yield first, session.answer_or_none(request, self._soon())
        for path, request in asked:
            yield path, session.answer_or_none(request, self._soon())

    def _info(
        self, name: str, line: Sequence[LockNode], now: float, judge: Judge = holder_state
    ) -> LeaseInfo:
        holder, facts = line[0], contents(line[0])
        own = self._remaining(holder.owner)
        return lease_row(
            name=name or facts.name_of(digest_of(holder.path)) or _name_of(line),
            alias=self._alias,
            owner=holder.owner,
            token=holder.token,
            now=now,
            # A holder that had to wait wrote its node again when it was granted.
            at=holder.changed,
            # The node of a process that has died lasts as long as its session.
            ttl=max(facts.ttl, facts.session) if own is None else own,
            # Only the holder's process knows it and the renewals; nothing is written for them.
            ttl_known=own is not None,
            waiting=len(line) - 1,
            process=facts.process,
            metadata=facts.metadata,
            damaged=facts.damaged,
            judge=judge,
        )

    def _waiter(self, name: str, node: LockNode, now: float) -> Waiter:
        facts = contents(node)
        return waiter_row(
            name=name,
            alias=self._alias,
            owner=node.owner,
            now=now,
            since=node.at,
            process=facts.process,
            metadata=facts.metadata,
            damaged=facts.damaged,
        )


def _name_of(line: Sequence[LockNode]) -> str:
    """The name if another program has written the first node; its digest if it wrote all."""
    digest = digest_of(line[0].path)
    return next((name for node in line if (name := contents(node).name_of(digest))), digest)
