"""What the Redis backend stores, and under which keys.

All keys share the tag ``{prefix:bucket}``, so that the keys of one lock are in one slot of a
cluster. After the tag comes ``FORMAT``, so that incompatible versions never share keys.

* ``…:l:<name>``: hash of one name. ``owner``; ``until`` and ``at`` in milliseconds and ``token`` in
  microseconds on the server's clock; ``ttl`` in milliseconds; ``kind``, or after the lease's end
  ``released`` or ``broken``; ``n``, the number of renewals, -1 for a lease that was handed over and
  that its owner has not used yet; ``short``, the last renewal for which the holder set a TTL, as
  ``<owner>:<number>``; ``proc``, the id of the holder's process; ``meta``, JSON; ``past``, earlier
  owners and how their leases ended, each as ``;<owner>:<first letter of the outcome>``, the latest
  first, with ``;+`` at the end if some were dropped; ``breaker``, the id of the last call that
  broke a lease. The key outlives the lease by its TTL, at least by a minute, to remember how it
  ended.
* ``…:q:<name>``: sorted set of waiters, in the order of their arrival. A member is the waiter's
  whole request: owner, TTL, kind, process id and metadata, one per line.
* ``…:i``: sorted set of the held names by token, and so in the order of their grants: the index.
* ``…:p:<process>``: the last heartbeat of a process in milliseconds, and its identity as JSON; the
  time is negative after the process deregistered.
* ``…:clock``: the highest token so far. ``…:u:<owner>``: marks a request of which a copy may still
  be under way: ``1`` after it was cancelled, ``granted`` after it was granted.
* ``…:m:<process>``: the channel that a process subscribes to.
"""

from __future__ import annotations

from ...process import current

FORMAT = 2
"""Incremented with every change that scripts of an earlier version would misread."""

LOCKS, CHANNELS = "l:", "m:"
"""What scripts replace by one another to get from a lock's key to its name and to a channel."""


class Keys:
    """The names of all keys of one alias, which are in one slot of a cluster."""

    def __init__(self, prefix: str) -> None:
        base = self.base = f"{{{prefix}:0}}:{FORMAT}:"
        self.locks, self.waiters, self.processes = f"{base}{LOCKS}", f"{base}q:", f"{base}p:"
        self.channels, self.cancelled, self.tries = f"{base}{CHANNELS}", f"{base}u:", f"{base}w:"
        self.index, self.clock = f"{base}i", f"{base}clock"

    def of(self, name: str) -> list[str]:
        """The keys that granting or ending a lease needs, in the scripts' order."""
        return [self.locks + name, self.waiters + name, self.index, self.clock]

    @property
    def channel(self) -> str:
        """The channel for leases that are handed over to this process."""
        return self.channels + current().id
