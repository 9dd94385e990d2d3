"""Tells the waiters of this process that a name may be free.

* A process has one watch, whatever the number of its waiting threads and coroutines: one HTTP
  answer that does not end, with the deletions of all keys of the alias, read by one thread. A
  release deletes a key, and so does the end of a lease.
* A waiter knows the revision at which it found the name held. If its key was deleted after that,
  it asks again. So nothing is lost between finding the name held and waiting.
* A deletion wakes the waiter for the key that has waited longest; the others notice it within half
  a second, if they still wait then.
* A watch that was cut goes on after the last revision it has seen. If that is compacted, or the
  store begins anew, all waiters ask again.
* A watch that is silent for a while is replaced: its connection may be dead without a sign.
* While there is no watch, waiters ask again every few tenths of a second.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from ... import clock
from ...log import logger
from ...process.points import reached
from ..shared.waiting import CHECK_EVERY, POLL_INTERVAL, Waiter, Waiters, poll_at
from .client import Client, Stream
from .entries import Json, encoded, range_after

SILENCE = 5.0
"""Seconds without a line after which a watch is replaced."""
RETRY = 0.1, 5.0
"""Seconds before the watch is tried again after a failure: at first, and at most."""
LINGER = 10.0
"""Seconds for which the watch stays after the last waiter has left."""
MOST_DELETIONS = 10_000
"""Deletions that are remembered, for waiters that are about to wait."""


class _StartOver(Exception):
    """Deletions may have been missed; the watch goes on after the revision ``seen``."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen


class _Waiter(Waiter):
    """Waits until its key is deleted after a revision.

    Attributes:
        relies: There is a watch, so it does not poll.
    """

    __slots__ = ("key", "relies", "revision")

    def __init__(self, owner: str, key: str, revision: int, *, relies: bool) -> None:
        super().__init__(owner)
        self.key, self.revision, self.relies = key, revision, relies


class Watch:
    """See the module.

    Every operation on a dictionary here is atomic by itself, so that no lock can be left held by a
    fork, a signal handler or a finalizer.
    """

    def __init__(self, client: Client, prefix: str, timeout: float) -> None:
        self._client, self._prefix, self._timeout = client, prefix, timeout
        # A forked child must not close these: a thread of the parent may have held their locks.
        self._left_to_parent: list[Stream] = []
        self._stream: Stream | None = None
        self._waiters: Waiters[_Waiter] = Waiters()
        self.forget()

    def forget(self) -> None:
        """Start again in a forked child."""
        if self._stream is not None:
            self._left_to_parent.append(self._stream)
        self._stream = None
        self._waiters.forget()
        self._thread: dict[str, threading.Thread] = {}
        self._deleted: dict[str, int] = {}
        # The deletions after the revision ``_floor`` and up to ``_seen`` are in ``_deleted``.
        self._floor = self._seen = 0
        self._works = False
        self._try_at = float("-inf")
        self._failures = 0

    def close(self) -> None:
        """Stop watching, until somebody waits again."""
        thread = self._thread.pop("", None)
        stream = self._stream
        if stream is not None:
            stream.interrupt()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout + 1)

    def wake(self, key: str) -> None:
        """Make all waiters for the key check whether it was deleted."""
        for waiter in self._waiters:
            if waiter.key == key:
                waiter.wake()

    def wait(
        self, owner: str, key: str, revision: int, *, until: float, interrupted: Callable[[], bool]
    ) -> None:
        """Block until the key may have been deleted since the revision; may be wrong.

        Args:
            owner: Of the waiter.
            until: When to return at the latest, on ``clock.now()``.
            interrupted: See ``Waiters.wait``.
        """
        waiter = _Waiter(owner, key, revision, relies=self._works)
        until = until if waiter.relies else poll_at(until)
        self._waiters.wait(waiter, until, interrupted, partial(self._is_over, waiter))

    async def async_wait(
        self,
        owner: str,
        key: str,
        revision: int,
        *,
        until: float,
        interrupted: Callable[[], bool],
        abandoned: Callable[[], object],
    ) -> None:
        """As ``wait``, for coroutines; takes no thread.

        Args:
            abandoned: See ``Waiters.async_wait``.
        """
        waiter = _Waiter(owner, key, revision, relies=self._works)
        until = until if waiter.relies else poll_at(until)
        is_over = partial(self._is_over, waiter)
        await self._waiters.async_wait(waiter, until, interrupted, abandoned, is_over)

    def _is_over(self, waiter: _Waiter) -> bool:
        self._ensure_thread()
        return (
            (waiter.relies and not self._works)
            or waiter.revision < self._floor
            or self._deleted.get(waiter.key, 0) > waiter.revision
        )

    # -- the thread --------------------------------------------------------------------

    def _ensure_thread(self) -> None:
        if self._thread:
            return
        thread = threading.Thread(target=self._run, name="dlock-listener-etcd", daemon=True)
        try:
            # Entered before it starts, so that two waiters start one thread.
            if self._thread.setdefault("", thread) is thread:
                thread.start()
        except BaseException as error:
            self._end_thread(thread)
            # No new threads while the interpreter ends: waiters ask again and again.
            if not isinstance(error, RuntimeError):
                raise

    def _end_thread(self, thread: threading.Thread) -> None:
        if self._thread.get("") is thread:
            self._thread.pop("", None)

    def _is_needed(self, me: threading.Thread) -> bool:
        return self._waiters.are_needed(LINGER) and self._thread.get("") is me

    def _run(self) -> None:
        me = threading.current_thread()
        try:
            # The watch begins at the oldest revision that a waiter knows. A waiter that comes later
            # with an older one asks again.
            self._floor = self._seen = min(
                (waiter.revision for waiter in self._waiters), default=self._seen
            )
            self._deleted.clear()
            while self._is_needed(me):
                if (pause := self._try_at - clock.now()) > 0.0:
                    time.sleep(min(pause, CHECK_EVERY))
                else:
                    self._listen(me)
        finally:
            # Another thread may have begun after ``close``.
            if self._thread.get("") in (me, None):
                self._works = False
            self._end_thread(me)
            # A waiter that came meanwhile found this thread.
            if self._waiters.by_owner:
                self._ensure_thread()

    def _listen(self, me: threading.Thread) -> None:
        """Read one watch until it breaks or nobody waits any more; survives any error."""
        began = clock.now()
        try:
            stream = self._stream = self._open()
            try:
                for answer in stream:
                    self._handle(answer, stream)
                    if not self._is_needed(me):
                        return
            finally:
                if self._stream is stream:
                    self._stream = None
                stream.close()
            raise ConnectionError("etcd has ended the watch")
        except _StartOver as restart:
            self._start_over(restart.seen)
        except Exception as error:  # noqa: BLE001 - nobody else could handle it
            # Silence is no failure, and neither is a cut after a while.
            if self._is_needed(me) and clock.now() - began < SILENCE:
                self._failed(error)

    def _open(self) -> Stream:
        request: Json = {
            "key": encoded(self._prefix),
            "range_end": range_after(self._prefix),
            "filters": ["NOPUT"],
            "start_revision": str(self._seen + 1),
        }
        return self._client.stream("/v3/watch", {"create_request": request}, timeout=self._timeout)

    def _handle(self, answer: Json, stream: Stream) -> None:
        result = answer.get("result")
        if not isinstance(result, dict):
            raise ConnectionError(f"etcd ends the watch: {answer.get('error')}")
        if result.get("canceled"):
            if "compact_revision" in result:
                raise _StartOver(int(result["compact_revision"]) - 1)
            self._client.authenticate_again()
            raise ConnectionError(f"etcd ends the watch: {result.get('cancel_reason')}")
        if result.get("created"):
            revision = int(result.get("header", {}).get("revision", 0))
            if revision < self._seen:
                # The store began anew. The watch would be silent until its revision reaches ours.
                raise _StartOver(revision)
            stream.be_patient(SILENCE)
            self._failures, self._works = 0, True
            reached("listener.listening", store="etcd")
        self._note(result.get("events", ()))

    def _note(self, deletions: Iterable[Json]) -> None:
        keys = set()
        for deletion in deletions:
            key, revision = deletion["kv"]["key"], int(deletion["kv"]["mod_revision"])
            self._deleted[key] = self._seen = revision
            keys.add(key)
        for waiter in self._waiters:
            # Only the one that has waited longest: the others would ask in vain. If it leaves
            # without asking, they notice the deletion at their next check.
            if waiter.key in keys:
                keys.discard(waiter.key)
                waiter.wake()
        if len(self._deleted) > MOST_DELETIONS:
            self._start_over(self._seen)

    def _start_over(self, seen: int) -> None:
        """Make each waiter ask again."""
        self._floor = self._seen = seen
        self._deleted.clear()
        self._waiters.end_waits()

    def _failed(self, error: Exception) -> None:
        if not self._failures:
            logger.warning(
                "Alias %r: no watch in etcd, so waiters ask again every %s to %s s: %s",
                self._client.alias,
                *POLL_INTERVAL,
                error,
                alias=self._client.alias,
            )
        pause = min(RETRY[0] * 2**self._failures, RETRY[1]) * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 10)
        self._try_at = clock.now() + pause
        self._works = False
        self._waiters.end_waits()
        reached("listener.failed", store="etcd")
