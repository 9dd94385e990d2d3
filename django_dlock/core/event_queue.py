"""A queue of calls, the thread that makes them in order, and what happens if one takes too long.

Each kind of call has a queue, and so a thread, of its own, so that no kind waits for another; see
``dispatch``. A thread starts with the first call and ends after a minute without one. A thread
cannot be killed, so a call that takes too long is *given up*: the log names its function, another
thread makes the calls of the other functions, and the later calls of this function wait until it
returns.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
import traceback
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from .. import clock, process
from .event_call import Call, close_all_connections, close_old_connections, name_of

HANGING_AFTER = 10.0
"""Seconds after which the log names the function of a call."""
MOST_HANGING = 8
"""Threads of one queue that may be inside calls that were given up. With one more, it waits."""
MAX_QUEUED = 100_000
"""Calls that may wait in one queue; further ones are not made, but counted and logged."""
MOST_OF_ONE = 10_000
"""The same for the calls of a function that was given up."""
MOST_NAMED = 20
"""Functions that the log names at a time, if their calls are not made."""
TELL_EVERY = 60.0
"""Seconds between two lines about calls that are not made."""
RETRY_EVERY = 1.0
"""Seconds between two attempts to start a thread in place of one that hangs."""
LINGER = 1.0
"""Seconds without a call after which a thread closes its connections to databases."""
IDLE = 60.0
"""Seconds without a call after which a thread ends."""


class Watcher(Protocol):
    """What a queue needs; see ``supervisor``."""

    lock: threading.RLock

    def adopt(self, queue: EventQueue) -> object: ...

    def prepare(self) -> object: ...

    def expect(self, queue: EventQueue, at: float) -> object: ...

    def tell(self, level: int, message: str, *args: Any, **facts: Any) -> object: ...


class _Worker:
    """A thread of a queue.

    Attributes:
        call: What it makes now, since ``since``.
        told: Whether the log has named the function of this call.
        counted: Whether ``take_undone`` has counted it.
        rests: Whether it has closed its connections, because there is nothing to do.
    """

    __slots__ = ("call", "counted", "rests", "since", "thread", "told")

    def __init__(self) -> None:
        self.call: Call | None = None
        self.since, self.told, self.counted, self.rests = math.inf, False, False, False
        self.thread = threading.current_thread()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive()


class EventQueue:
    """A queue of calls, and the thread that makes them in order.

    Args:
        watcher: Looks at it when a call may have taken too long.
        name: Of the thread.
        is_log: Whether its calls write log lines.
        calls_users: Whether its calls are functions of the project: other functions no longer wait
            for one that takes too long. False if all calls are of one function.
        given_up_after: Seconds that are too long; ``None`` for ``HANGING_AFTER``.
        most_at_once: Calls of one function that may run at the same time, once the earlier ones
            were given up.
        uses_databases: Whether its calls may open connections of Django, which are then closed
            as they are after a request.
        undone: How the log says that the process has ended before a call; has ``%s`` for the
            function.
    """

    _calls: collections.deque[Call]
    _leader: _Worker | None
    """The thread that takes the next call."""
    _given_up: list[_Worker]
    """Threads whose call was given up."""
    _set_aside: dict[Hashable, collections.deque[Call]]
    """Calls that wait for one of them, by key."""
    _dropped: collections.Counter[str]
    """Calls that were not made, since the log last told."""
    _waited_for: tuple[_Worker, float] | None
    """For which call ``settle`` has waited in vain."""

    def __init__(
        self,
        watcher: Watcher,
        name: str,
        *,
        is_log: bool = False,
        calls_users: bool = False,
        given_up_after: float | None = None,
        most_at_once: int = 1,
        uses_databases: bool = False,
        undone: str = "%s was not called, or did not return, before the process ended",
    ) -> None:
        self._watcher, self._name, self.is_log, self.undone = watcher, name, is_log, undone
        self.calls_users = calls_users
        self._given_up_after, self._most_at_once = given_up_after, most_at_once
        self._uses_databases = uses_databases
        self.after_fork()
        watcher.adopt(self)

    @property
    def _patience(self) -> float:
        if not self.calls_users:
            return math.inf
        return HANGING_AFTER if self._given_up_after is None else self._given_up_after

    # -- posting -----------------------------------------------------------------------

    def post(
        self, make: Callable[[], object], function: object = None, key: Hashable = None
    ) -> None:
        """Queue a call; never blocks and never raises what the call raises. See ``Call``."""
        call = Call(make, make if function is None else function, key)
        with self._lock:
            if len(self._calls) >= MAX_QUEUED:
                self._drop(call)
                return
            self._calls.append(call)
            self._ready.notify()
            self._ensure_worker()

    def put(self, make: Callable[[], object], function: object) -> None:
        """Queue a call for the thread that is there, or for the next one."""
        self._calls.append(Call(make, function, None))

    def nudge(self) -> None:
        """Wake the thread for what was ``put``."""
        if self._calls:
            with self._lock:
                self._ready.notify()
                self._ensure_worker()

    # -- waiting -----------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued or under way, but for what was given up."""
        with self._lock:
            return bool(self._calls) or self.is_calling

    @property
    def is_idle(self) -> bool:
        """Whether it has a thread that waits for a call."""
        with self._lock:
            return self._has_worker() and not self.is_busy

    @property
    def is_stranded(self) -> bool:
        """Whether calls wait and no thread could start, as at the end of the interpreter."""
        with self._lock:
            return bool(self._calls) and not self._has_worker()

    def flush(self, timeout: float) -> bool:
        """Wait until everything posted before has been called; false after ``timeout``."""
        done = threading.Event()
        self.post(done.set, "")
        return done.wait(timeout)

    def settle(self, timeout: float) -> None:
        """Wait for the calls that are queued or under way, if any; at the end of the process."""
        worker = self._leader
        if not self._has_worker() or worker is None or not self.is_busy:
            return
        if self._waited_for != (worker, worker.since):
            self.flush(timeout)
            if self.is_busy:
                # Once is enough, although several parts of the package wait.
                self._waited_for = (worker, worker.since)

    def drain(self) -> None:
        """Make the calls on this thread, if no other one makes them."""
        with self._lock:
            if self._has_worker():
                return
            me = self._leader = _Worker()
        while (call := self._next(me, waits=False)) is not None:
            self._make(call)

    def take_undone(self) -> collections.Counter[str]:
        """How many calls of each function were not made, or have not returned; each only once."""
        with self._lock:
            undone, self._dropped = self._dropped, collections.Counter()
            calls = [*self._calls]
            self._calls.clear()
            for waiting in self._set_aside.values():
                calls += waiting
                waiting.clear()
            for worker in (self._leader, *self._given_up):
                if worker is not None and worker.call is not None and not worker.counted:
                    worker.counted = True
                    calls.append(worker.call)
            undone.update(name for call in calls if (name := name_of(call.function)))
            return undone

    # -- forks -------------------------------------------------------------------------

    @property
    def is_calling(self) -> bool:
        """Whether a call is under way on another thread, but for what was given up."""
        worker = self._leader
        return (
            worker is not None
            and worker.call is not None
            and worker.is_alive
            and worker.thread is not threading.current_thread()
        )

    def after_fork(self) -> None:
        """Forget threads and calls of the parent, and take the new lock."""
        self._calls = collections.deque()
        self._lock = self._watcher.lock
        self._ready = threading.Condition(self._lock)
        self._leader = self._waited_for = None
        self._given_up, self._set_aside = [], {}
        self._dropped, self._told_dropped = collections.Counter(), -math.inf

    # -- the threads -------------------------------------------------------------------

    def _has_worker(self) -> bool:
        return self._leader is not None and self._leader.is_alive

    def _ensure_worker(self) -> None:
        if not self._has_worker():
            self._start_worker()

    def _start_worker(self) -> bool:
        self._watcher.prepare()
        worker = _Worker()
        worker.thread = threading.Thread(
            target=self._run, args=(worker,), name=self._name, daemon=True
        )
        earlier, self._leader = self._leader, worker
        try:
            worker.thread.start()
        except RuntimeError:
            # The interpreter is ending, see ``supervisor``, or the system has too many threads.
            self._leader = earlier
            return False
        return True

    def _run(self, me: _Worker) -> None:
        while True:
            call = self._next(me)
            if call is not None:
                self._make(call)
            elif me is not self._leader:
                break
            else:
                self._close(close_all_connections)
        if self._uses_databases:
            # One whose call was given up has them still.
            self._close(close_all_connections)
            process.thread_ends()

    def _next(self, me: _Worker, *, waits: bool = True) -> Call | None:
        """The next call of this thread; ``None`` if it ends, or is to close its connections."""
        with self._lock:
            returned, me.call = me.call, None
            if me is not self._leader:
                return self._next_of_same(me, returned)
            while True:
                while self._calls:
                    call = self._calls.popleft()
                    if not (self._given_up and self._must_wait(call)):
                        return self._begin(me, call)
                if not waits:
                    self._leader = None
                    return None
                if me.rests or not self._uses_databases:
                    if not self._ready.wait(IDLE) and not self._calls:
                        self._leader = None
                        return None
                elif not self._ready.wait(LINGER) and not self._calls:
                    me.rests = True
                    return None

    def _begin(self, me: _Worker, call: Call) -> Call:
        me.call, me.since = call, clock.now()
        me.told = me.counted = me.rests = False
        self._watcher.expect(self, me.since + min(self._patience, HANGING_AFTER))
        return call

    def _must_wait(self, call: Call) -> bool:
        """Set a call aside if enough calls of its function were given up and have not returned."""
        waiting = self._set_aside.get(call.key)
        inside = sum(each.call is not None and each.call.key == call.key for each in self._given_up)
        if waiting is None and inside < self._most_at_once:
            return False
        if waiting is None:
            waiting = self._set_aside[call.key] = collections.deque()
        if len(waiting) < MOST_OF_ONE:
            waiting.append(call)
        else:
            self._drop(call)
        return True

    def _next_of_same(self, me: _Worker, returned: Call | None) -> Call | None:
        """After a call that was given up has returned: the next one of its function."""
        waiting = None if returned is None else self._set_aside.get(returned.key)
        if waiting:
            return self._begin(me, waiting.popleft())
        if me in self._given_up:
            self._given_up.remove(me)
        if returned is not None:
            self._set_aside.pop(returned.key, None)
        # The queue may stand still because too many were given up.
        self._watcher.expect(self, clock.now())
        return None

    def _make(self, call: Call) -> None:
        try:
            call.make()
        except BaseException as error:  # noqa: BLE001 - the thread must live
            self._raised(call, error)
        if self._uses_databases:
            # Not before a call, too: a thread that has nothing to do soon closes all of them.
            self._close(close_old_connections)

    def _raised(self, call: Call, error: BaseException) -> None:
        if self.is_log:
            # A handler of the log, which cannot log its own failure.
            traceback.print_exception(error)
            return
        self._watcher.tell(
            logging.ERROR,
            "A callback for a lock event raised: %s",
            name_of(call.function),
            exc_info=error,
        )

    def _close(self, close_connections: Callable[[], None]) -> None:
        try:
            close_connections()
        except Exception as error:  # noqa: BLE001 - the thread must live
            self._watcher.tell(
                logging.ERROR, "Could not close a connection: %s", error, exc_info=error
            )

    # -- what takes too long, or is too much -------------------------------------------

    def _drop(self, call: Call) -> None:
        if not (name := name_of(call.function)):
            return
        if not self._dropped:
            self._watcher.expect(self, self._told_dropped + TELL_EVERY)
        self._dropped[name] += 1

    def look(self, now: float) -> float:
        """Give up what takes too long, and log it; returns when to look again."""
        slow: list[tuple[Call, bool]] = []
        with self._lock:
            due = math.inf
            if (first := self._leader) is not None and first.call is not None:
                due = first.since + self._patience
                if now >= due:
                    due = math.inf
                    if len(self._given_up) < MOST_HANGING:
                        if self._start_worker():
                            self._given_up.append(first)
                        else:
                            # The system may have too many threads just now.
                            due = now + RETRY_EVERY
            for worker in (self._leader, *self._given_up):
                if worker is None or worker.call is None or worker.told:
                    continue
                if now < worker.since + HANGING_AFTER:
                    due = min(due, worker.since + HANGING_AFTER)
                    continue
                worker.told = True
                slow.append((worker.call, worker is not self._leader))
        for call, is_given_up in slow:
            name, seconds = name_of(call.function), HANGING_AFTER
            if is_given_up:
                self._watcher.tell(
                    logging.ERROR,
                    "%s has taken %g s for a lock event; only its own later calls wait for it",
                    name,
                    seconds,
                )
            else:
                self._watcher.tell(
                    logging.ERROR,
                    "%s has taken %g s for a lock event; others wait for it",
                    name,
                    seconds,
                )
        return min(due, self._tell_dropped(now))

    def _tell_dropped(self, now: float) -> float:
        """Log which calls were not made, if that is due; returns when it is due again."""
        with self._lock:
            if not self._dropped:
                return math.inf
            if now < self._told_dropped + TELL_EVERY:
                return self._told_dropped + TELL_EVERY
            dropped, self._dropped = self._dropped, collections.Counter()
            self._told_dropped = now
        named = dropped.most_common(MOST_NAMED)
        if rest := dropped.total() - sum(count for _, count in named):
            # Each row has a name of its own.
            named.append(("others", rest))
        for name, count in named:
            self._watcher.tell(
                logging.ERROR,
                "%d calls of %s for lock events were not made: too many wait",
                count,
                name,
            )
        return math.inf
