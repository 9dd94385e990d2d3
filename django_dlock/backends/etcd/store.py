"""What the backend asks of etcd: transactions on the keys of an alias, and leases of etcd."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...exceptions import BackendUnavailable
from .client import Client
from .entries import Entry, Json, encoded, now_of

PER_TRANSACTION = 100
"""Leases in one transaction; etcd takes 128 operations unless it is told otherwise."""


class Granted(NamedTuple):
    """A lease of etcd, with whole seconds, and the member's time of the grant."""

    id: int
    ttl: int
    at: float


class Store:
    """See the module.

    Attributes:
        prefix: What all keys of the alias begin with.
    """

    def __init__(self, client: Client, prefix: str) -> None:
        self._client, self.prefix = client, prefix

    def key(self, name: str) -> str:
        """The key of a lock, in Base64."""
        return encoded(self.prefix + name)

    def call(self, path: str, body: Json, deadline: float) -> Json:
        return self._client.call(f"/v3/{path}", body, deadline=deadline)

    def transaction(self, operations: Sequence[Json], deadline: float) -> Json:
        """Carry out some operations in one step."""
        return self.call("kv/txn", {"success": operations}, deadline)

    def grant(self, ttl: float, deadline: float) -> Granted:
        """A lease of etcd that lives for at least ``ttl`` seconds from now."""
        answer = self.call("lease/grant", {"TTL": str(whole(ttl))}, deadline)
        return Granted(int(answer["ID"]), int(answer["TTL"]), now_of(answer))

    def discard(self, leases: Iterable[int], deadline: float) -> None:
        """Revoke leases of etcd; those that remain end by themselves."""
        for lease in leases:
            with contextlib.suppress(BackendUnavailable):
                self.call("lease/revoke", {"ID": str(lease)}, deadline)

    def left(self, entry: Entry, deadline: float) -> int | None:
        """Whole seconds until the lease ends, rounded down; ``None`` if it never does."""
        if not entry.lease:
            return None
        answer = self.call("lease/timetolive", {"ID": str(entry.lease)}, deadline)
        # -1 if it has ended since.
        return max(0, int(answer.get("TTL", 0)))


def whole(ttl: float) -> int:
    """The seconds for which etcd is asked."""
    return max(1, math.ceil(ttl))
