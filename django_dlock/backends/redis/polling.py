"""Decides whether to poll for a reply for a moment before sleeping until it comes.

Waking a sleeping thread can take longer than the reply of a server on the same machine. There
polling is faster, but only while replies come at once and no other process needs the processor.
So both ways are timed and the faster one is used; the other is tried now and then.
"""

from __future__ import annotations

import ipaddress
import select
import socket
from collections.abc import Callable
from time import perf_counter
from typing import Any

NEAR = 0.0001
"""Seconds. Replies are polled for only if round trips take less than this on average."""
GIVE_UP = 2 * NEAR
LONGEST = 3 * NEAR
"""Seconds. A longer round trip counts as this, because it says little about the next one."""
GAIN = 0.8
"""Polling costs processor time, so it must shorten round trips to this fraction."""
TRY_EVERY = 256
"""One reply of this many is waited for in the other way."""


class Spin:
    """The average time of round trips, with polling and without.

    Shared by threads without a lock: it is only an estimate.
    """

    __slots__ = ("_polled", "_replies", "_slept")

    def __init__(self) -> None:
        self._polled, self._slept, self._replies = 0.0, NEAR, 0

    def polls(self) -> bool:
        """Whether to poll for the next reply."""
        self._replies += 1
        pays = self._polled < min(NEAR, GAIN * self._slept)
        return pays is not (self._replies % TRY_EVERY == 0)

    def took(self, seconds: float, *, polled: bool) -> None:
        """Record the time of a round trip."""
        seconds = min(seconds, LONGEST)
        if polled:
            self._polled += (seconds - self._polled) / 8
        else:
            self._slept += (seconds - self._slept) / 8


def poller(sock: Any) -> Callable[[], None] | None:
    """A function that polls the socket for a moment; ``None`` for a server on another machine."""
    try:
        is_unix = sock.family == getattr(socket, "AF_UNIX", None)
        is_local = is_unix or ipaddress.ip_address(sock.getpeername()[0]).is_loopback
    except OSError:
        # The connection is already broken; its next use raises.
        is_local = False
    # Windows has no ``poll``. A polling greenlet of gevent or eventlet would block all others.
    known = getattr(getattr(select, "poll", None), "__module__", "") == "select"
    if not (is_local and known):
        return None
    readable = select.poll()
    readable.register(sock, select.POLLIN)

    def poll() -> None:
        give_up_at = perf_counter() + GIVE_UP
        while not readable.poll(0) and perf_counter() < give_up_at:
            pass

    return poll
