"""What operators ask of etcd: one name, and pages of held locks.

A page in the order of grants, or of names, is one read that etcd sorts and cuts. For any other
filter or order, this process reads all keys, some hundred at a time and all at one revision of the
store, and keeps those that match.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Sequence

from ... import clock
from ...lease import LeaseInfo, LeasePage, LeaseQuery, in_order
from ..holder_state import SILENT_AFTER, holder_state
from ..operator_rows import Judge, lease_row
from .client import RevisionGone
from .entries import Entry, Json, after, encoded, entries_of, now_of, range_after, read
from .store import PER_TRANSACTION, Store

KEYS_PER_READ = 500

TARGETS = {"name": ("KEY", "ASCEND"), "token": ("CREATE", "ASCEND"), "age": ("CREATE", "DESCEND")}
"""Orders that etcd knows. It numbers the revisions that create keys, so an order by age is one by
tokens, backwards."""
ALWAYS_EQUAL = ("alias", "waiting")
"""All are of one alias, and of none it is known who waits."""
BACKWARDS = {"ASCEND": "DESCEND", "DESCEND": "ASCEND"}


OVERDUE = 2.0
"""Seconds for which a lease may outlive its time because times are whole seconds and etcd deletes
its key a little later. A lease that outlives it for longer was given its whole TTL again, by the
new leader after an election."""


class EtcdListing:
    """Answers the queries of ``BaseLockBackend``."""

    def __init__(self, alias: str, store: Store, command_timeout: float) -> None:
        self._alias, self._store, self._command_timeout = alias, store, command_timeout

    def get(self, name: str) -> LeaseInfo | None:
        deadline = self._soon()
        answer = self._store.transaction([read(self._store.key(name))], deadline)
        (entry,) = entries_of(answer)
        if entry is None:
            return None
        # Ask etcd itself: after an election, its leases live longer than they were granted for.
        left = self._store.left(entry, deadline)
        return self._info(name, entry, now_of(answer), None if left is None else float(left))

    def get_many(self, names: Sequence[str]) -> dict[str, LeaseInfo]:
        found: dict[str, LeaseInfo] = {}
        for start in range(0, len(names), PER_TRANSACTION):
            part = names[start : start + PER_TRANSACTION]
            reads = [read(self._store.key(name)) for name in part]
            answer = self._store.transaction(reads, self._soon())
            now = now_of(answer)
            for name, entry in zip(part, entries_of(answer), strict=True):
                if entry is not None:
                    found[name] = self._info(name, entry, now, _left(entry, now))
        return found

    def page(self, query: LeaseQuery, offset: int, limit: int | None) -> LeasePage:
        try:
            return self._page(query, offset, limit)
        except RevisionGone:
            # It was compacted between two reads.
            return self._page(query, offset, limit)

    # -- inside ------------------------------------------------------------------------

    def _page(self, query: LeaseQuery, offset: int, limit: int | None) -> LeasePage:
        area = {
            "key": encoded(self._store.prefix + query.prefix),
            "range_end": range_after(self._store.prefix + query.prefix),
        }
        order = _order(query)
        if limit == 0 and order is not None:
            answer = self._read({**area, "count_only": True})
            return LeasePage([], int(answer.get("count", 0)))
        # Many leases may be of one process.
        judge = functools.cache(holder_state)
        if order is None or limit is None:
            found: list[LeaseInfo] = []
            for pairs, now in self._walk(area):
                # Those that do not match are not kept.
                found += filter(query.matches, self._infos(pairs, now, judge))
            found.sort(key=lambda info: info.token)
            found = in_order(found, query.sort)
            return LeasePage(found[offset:][:limit], len(found))
        target, direction = order
        asked = {**area, "sort_target": target, "sort_order": direction}
        answer = self._read({**asked, "limit": str(offset + limit), "keys_only": offset > 0})
        pairs, total = answer.get("kvs", ())[offset:], int(answer.get("count", 0))
        if offset and pairs:
            # Only the keys of what comes before the page were read.
            pairs = self._values(pairs, answer["header"]["revision"])
        return LeasePage(list(self._infos(pairs, now_of(answer), judge)), total)

    def _soon(self) -> float:
        return clock.now() + self._command_timeout

    def _read(self, body: Json) -> Json:
        return self._store.call("kv/range", body, self._soon())

    def _walk(self, area: Json) -> Iterator[tuple[Sequence[Json], float]]:
        """All keys of an area, as they were at the first read, some at a time."""
        body = {**area, "limit": str(KEYS_PER_READ)}
        while True:
            answer = self._read(body)
            pairs = answer.get("kvs", ())
            yield pairs, now_of(answer)
            if not answer.get("more"):
                return
            revision = body.get("revision", answer["header"]["revision"])
            body = {**body, "key": after(pairs[-1]["key"]), "revision": revision}

    def _values(self, pairs: Sequence[Json], revision: str) -> list[Json]:
        """The keys again, with their values at this revision."""
        found: list[Json] = []
        for start in range(0, len(pairs), PER_TRANSACTION):
            part = pairs[start : start + PER_TRANSACTION]
            reads = [{"request_range": {"key": pair["key"], "revision": revision}} for pair in part]
            answer = self._store.transaction(reads, self._soon())
            found += [kv for one in answer["responses"] for kv in one["response_range"]["kvs"]]
        return found

    def _infos(self, pairs: Sequence[Json], now: float, judge: Judge) -> Iterator[LeaseInfo]:
        for pair in pairs:
            key = base64.b64decode(pair["key"]).decode(errors="replace")
            entry = Entry.parse(pair)
            name = key.removeprefix(self._store.prefix)
            yield self._info(name, entry, now, _left(entry, now), judge)

    def _info(
        self,
        name: str,
        entry: Entry,
        now: float,
        left: float | None,
        judge: Judge = holder_state,
    ) -> LeaseInfo:
        granted, overdue = entry.number("ttl"), left is not None and left < -OVERDUE
        if overdue:
            left = float(granted)
        # etcd has no heartbeats, but a renewal is as good as one. Half of a TTL after the last one,
        # a holder that renews is in doubt itself.
        heard = max(entry.number("at"), entry.number("renewed"))
        on_time = max(SILENT_AFTER, granted / 2 if entry.number("renewals") else 0.0)
        return lease_row(
            name=name,
            alias=self._alias,
            kind=entry.kind,
            owner=entry.owner,
            token=entry.token,
            now=now,
            at=entry.number("at"),
            ttl=None if left is None else max(0.0, left),
            ttl_known=not overdue,
            granted_ttl=granted or None,
            renewals=entry.number("renewals"),
            # Waiters ask etcd to be told of a deletion, and it does not say who asks.
            waiting=None,
            process=entry.process,
            metadata=entry.metadata,
            signs_of_life=now - heard <= on_time,
            damaged=entry.damaged,
            judge=judge,
        )


def _left(entry: Entry, now: float) -> float | None:
    """Seconds left by the time of the last grant or renewal; ``None`` if it never ends.

    Less than 0 if the lease has outlived that time.
    """
    if not entry.lease:
        return None
    written = entry.number("renewed") or entry.number("at")
    return written + entry.number("ttl") - now


def _order(query: LeaseQuery) -> tuple[str, str] | None:
    """What etcd sorts by; ``None`` if it cannot answer the query alone."""
    if query != LeaseQuery(query.prefix, sort=query.sort):
        return None
    # Neither names nor tokens are ever equal.
    key = next((key for key in query.sort if key.removeprefix("-") not in ALWAYS_EQUAL), "token")
    target, direction = TARGETS.get(key.removeprefix("-"), ("", ""))
    if not target:
        return None
    return target, BACKWARDS[direction] if key.startswith("-") else direction
