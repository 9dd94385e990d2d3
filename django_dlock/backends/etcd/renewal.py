"""How leases are renewed: their keys are attached to a new lease of etcd.

Each key is read first, and is written only if nobody has written or deleted it since. So a renewal
that is overtaken by another one, or by a release, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...lease import Renewal, RenewalResult
from .entries import Entry, Json, entries_of, put_if_unchanged, read, value_of
from .store import Granted, Store, whole

BYTES_PER_TRANSACTION = 500_000
"""Of values; etcd takes requests of 1.5 MiB unless it is told otherwise."""


def renew_once(
    store: Store, renewals: Sequence[Renewal], deadline: float
) -> list[RenewalResult | None]:
    """Renew leases of different names; ``None`` for what another renewal has overtaken."""
    found = entries_of(store.transaction([read(store.key(one.name)) for one in renewals], deadline))
    results: list[RenewalResult | None] = []
    groups: dict[int, list[tuple[int, Entry]]] = {}
    for number, (renewal, entry) in enumerate(zip(renewals, found, strict=True)):
        if entry is None:
            results.append(RenewalResult("unknown"))
        elif entry.owner != renewal.owner:
            results.append(RenewalResult("refused"))
        else:
            results.append(None)
            seconds = _seconds(store, entry, renewal, deadline)
            groups.setdefault(seconds, []).append((number, entry))
    for seconds, group in groups.items():
        granted = store.grant(seconds, deadline)
        for number in _attach(store, granted, renewals, group, deadline):
            results[number] = RenewalResult("renewed", renewals[number].ttl)
    return results


def _seconds(store: Store, entry: Entry, renewal: Renewal, deadline: float) -> int:
    """The TTL of the new lease, which ends no earlier than the old one unless it is shortened."""
    seconds = whole(renewal.ttl)
    if renewal.shorten > entry.number("shortened") or seconds >= entry.number("ttl"):
        return seconds
    left = store.left(entry, deadline)
    # What is left was rounded down.
    return seconds if left is None else max(seconds, min(left + 1, entry.number("ttl")))


def _attach(
    store: Store,
    granted: Granted,
    renewals: Sequence[Renewal],
    group: Sequence[tuple[int, Entry]],
    deadline: float,
) -> Iterator[int]:
    """Attach keys to a new lease of etcd; yields the numbers of those that were attached."""
    writes: list[tuple[int, Json]] = []
    size = 0
    for number, entry in group:
        renewal = renewals[number]
        facts = {
            **entry.facts,
            "ttl": granted.ttl,
            "renewals": entry.number("renewals") + 1,
            "renewed": int(granted.at),
            "shortened": max(renewal.shorten, entry.number("shortened")),
            "shared": len(group) > 1,
        }
        key, value = store.key(renewal.name), value_of(entry.owner, facts, *entry.context)
        if writes and size + len(value) > BYTES_PER_TRANSACTION:
            yield from _written(store, writes, deadline)
            writes, size = [], 0
        write = put_if_unchanged(key, value, granted.id, entry.revision)
        writes.append((number, {"request_txn": write}))
        size += len(value)
    yield from _written(store, writes, deadline)


def _written(store: Store, writes: Sequence[tuple[int, Json]], deadline: float) -> Iterator[int]:
    answer = store.transaction([write for _, write in writes], deadline)
    for (number, _), response in zip(writes, answer["responses"], strict=True):
        if response["response_txn"].get("succeeded"):
            yield number
