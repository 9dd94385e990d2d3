"""One server of the quorum: its connection, and the commands that wait for it or its replies.

Only the thread of the exchange uses anything but ``address``. Commands are sent and answered in
order, on one connection, so a withdrawal never overtakes the request that it withdraws.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, Final

from redis import exceptions as errors

from ... import process
from ...log import logger
from ..redis.commands import Command
from ..redis.connection import ConnectionBroken, ErrorReply
from .link import Link

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.3
"""Seconds between two attempts to connect; in between, commands fail at once."""
BREAKS = 3
"""After this many broken connections a command fails, unless it is kept."""
MOST_KEPT = 1000
"""The most commands that are kept for a node that cannot be reached; then the oldest are dropped,
and the leases that they would have ended end with their TTL."""


class Job:
    """One command for one node.

    Args:
        build: Makes the command when it is sent, because it may name the server's run id.
        answer: Called with what the reply means, or with an exception.
        until: When to give up, on ``clock.now()``.
        keep: Whether it is kept until then even if the node cannot be reached, as a withdrawal
            is; other commands fail at once.

    Attributes:
        was_sent: Whether a node may have received it.
    """

    __slots__ = ("answer", "breaks", "build", "keep", "until", "was_sent")

    def __init__(
        self,
        build: Callable[[Link], Command[Any]],
        answer: Callable[[Any], None],
        until: float,
        *,
        keep: bool,
    ) -> None:
        self.build, self.answer = build, answer
        self.until, self.keep, self.breaks = until, keep, 0
        self.was_sent = False

    def survives(self, error: BaseException, now: float) -> bool:
        """Whether it is sent again after a connection broke."""
        self.breaks += 1
        if now >= self.until:
            return False
        return self.keep or (self.breaks < BREAKS and isinstance(error, ConnectionBroken))


class _SentCommand:
    __slots__ = ("at", "command", "job")

    def __init__(self, job: Job, command: Command[Any], at: float) -> None:
        self.job, self.command, self.at = job, command, at


class _Attempt(threading.Thread):
    """Connects on a thread, because a name server may take longer than any caller waits."""

    def __init__(self, connect: Callable[[], Link], wake: Callable[[], None], until: float) -> None:
        super().__init__(name="dlock-connect", daemon=True)
        self._connect, self._wake = connect, wake
        self.until, self.is_unwanted = until, False
        self.outcome: Link | BaseException | None = None

    def begin(self) -> None:
        try:
            self.start()
        except RuntimeError:
            # No thread can start while the interpreter ends; connect here for a last release.
            self.run()

    def run(self) -> None:
        try:
            with process.connecting(ends=True):
                outcome: Link | BaseException = self._connect()
        except BaseException as error:  # noqa: BLE001 - the node's commands fail with it
            # The traceback refers to this frame, and so to this thread: a cycle.
            outcome = error.with_traceback(None)
        if self.is_unwanted and isinstance(outcome, Link):
            outcome.close()
        self.outcome = outcome
        self._wake()


class Node:
    """See the module.

    Args:
        connect: Makes a link; called on a thread.
        timeout: Seconds in which it must be connected, and each command answered.
        is_taken: Whether another node of the quorum is this very server, by its run id.
    """

    def __init__(
        self,
        address: str,
        connect: Callable[[], Link],
        timeout: float,
        is_taken: Callable[[Node, str], bool],
    ) -> None:
        self.address: Final = address
        self._connect, self._timeout, self._is_taken = connect, timeout, is_taken
        self.wake: Callable[[], None] = lambda: None
        self.forget()

    def forget(self) -> None:
        """Start again without commands and connections."""
        self.link: Link | None = None
        self._queue: collections.deque[Job] = collections.deque()
        # Jobs that are kept while the node cannot be reached; older than those in the queue.
        self._kept: collections.deque[Job] = collections.deque(maxlen=MOST_KEPT)
        self._sent: collections.deque[_SentCommand] = collections.deque()
        self._attempt: _Attempt | None = None
        self._failures, self._retry_at = 0, 0.0
        self._error: BaseException = errors.ConnectionError("not connected")

    @property
    def is_busy(self) -> bool:
        return bool(self._queue or self._sent or self._kept)

    # -- called by the exchange --------------------------------------------------------

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def step(self, now: float) -> float:
        """Connect, send and give up what is due; returns when to call this again at the latest."""
        self._take_link(now)
        self._give_up_overdue(now)
        if (self._queue or self._kept) and self.link is None:
            self._reach(now)
        try:
            self._send(now)
        except ConnectionBroken as error:
            self.broke(error, now)
        if self._sent and now >= self._sent[0].at + self._timeout:
            self.broke(errors.TimeoutError("no reply within the time allowed"), now)
        return self._next_time(now)

    def receive(self, now: float) -> None:
        """Take the replies that have come; called when the link is readable."""
        try:
            replies = self.link.replies() if self.link is not None else []
            for reply in replies:
                self._answered(reply)
        except (ConnectionBroken, errors.TimeoutError) as error:
            self.broke(error, now)

    def broke(self, error: BaseException, now: float) -> None:
        """The link cannot be used any more: connect again and repeat what may be repeated."""
        link, self.link = self.link, None
        if link is not None:
            link.close()
        sent, self._sent = self._sent, collections.deque()
        again = [one.job for one in sent if one.job.survives(error, now)]
        self._queue.extendleft(reversed(again))
        self._error = error
        if self._failures > 1:
            # Several connections in a row have brought no answer.
            self._pause(now)
        for one in sent:
            if one.job not in again:
                one.job.answer(error)

    def close(self, error: BaseException) -> None:
        """Close the link, and fail what has not been answered."""
        link, attempt = self.link, self._attempt
        jobs = [*(one.job for one in self._sent), *self._kept, *self._queue]
        self.forget()
        if attempt is not None:
            attempt.is_unwanted = True
            if isinstance(attempt.outcome, Link):
                attempt.outcome.close()
        if link is not None:
            link.close()
        for job in jobs:
            job.answer(error)

    # -- inside ------------------------------------------------------------------------

    def _take_link(self, now: float) -> None:
        attempt = self._attempt
        if attempt is None or attempt.outcome is None:
            return
        self._attempt, outcome = None, attempt.outcome
        if isinstance(outcome, Link):
            if not self._is_taken(self, outcome.run_id):
                # Counts as a failure until the first reply.
                self.link, self._failures = outcome, self._failures + 1
                self._queue.extendleft(reversed(self._kept))
                self._kept.clear()
                return
            outcome.close()
            outcome = errors.ResponseError("it is the same server as another node of the quorum")
            if str(outcome) != str(self._error):
                logger.error("Redlock: node %s cannot be used: %s", self.address, outcome)
        self._error = outcome
        self._failures += 1
        self._pause(now)
        self._fail_waiting()

    def _reach(self, now: float) -> None:
        if self._attempt is None and now >= self._retry_at:
            while self._kept and now >= self._kept[0].until:
                self._kept.popleft()
            self._attempt = _Attempt(self._connect, self.wake, now + self._timeout)
            self._attempt.begin()
        elif self._attempt is None:
            self._fail_waiting()
        elif now >= self._attempt.until:
            self._error = errors.TimeoutError("no connection within the time allowed")
            self._fail_waiting()

    def _pause(self, now: float) -> None:
        self._retry_at = now + min(FIRST_PAUSE * 2 ** min(self._failures, 8), LONGEST_PAUSE)

    def _fail_waiting(self) -> None:
        jobs, self._queue = self._queue, collections.deque()
        self._kept.extend(job for job in jobs if job.keep)
        for job in jobs:
            # Its caller need not wait for what may still happen.
            job.answer(self._error)

    def _give_up_overdue(self, now: float) -> None:
        if any(now >= job.until for job in self._queue):
            jobs, self._queue = self._queue, collections.deque()
            for job in jobs:
                if now < job.until:
                    self._queue.append(job)
                else:
                    job.answer(errors.TimeoutError("the node was not reached in time"))

    def _send(self, now: float) -> None:
        if self.link is None:
            return
        self.link.flush()
        while self._queue:
            job = self._queue.popleft()
            try:
                command = job.build(self.link)
            except Exception as error:  # noqa: BLE001 - its caller raises it
                job.answer(error)
                continue
            job.was_sent = True
            # Noted first, so that a broken connection finds it.
            self._sent.append(_SentCommand(job, command, now))
            self.link.send(command)

    def _answered(self, reply: Any) -> None:
        if not self._sent:
            raise ConnectionBroken("a reply that nobody asked for")
        if isinstance(reply, ConnectionBroken):
            raise reply
        if isinstance(reply, ErrorReply) and reply.code == "NOSCRIPT":
            # Other commands may have been sent already, so only a new connection keeps their order.
            raise ConnectionBroken("the server has forgotten its scripts")
        self._failures = 0
        one = self._sent.popleft()
        answer = reply
        if not isinstance(reply, BaseException):
            try:
                answer = one.command.read(reply, one.at)
                if answer == "unknown" and not one.job.breaks:
                    # Its release can have been forgotten only if an earlier attempt made it.
                    answer = "refused"
            except (ValueError, TypeError, KeyError) as error:
                answer = errors.ResponseError(f"an unreadable answer: {error}")
        one.job.answer(answer)

    def _next_time(self, now: float) -> float:
        times = [job.until for job in self._queue]
        if self._sent:
            times.append(self._sent[0].at + self._timeout)
        if (self._queue or self._kept) and self.link is None:
            if self._attempt is None:
                times.append(self._retry_at)
            elif now < self._attempt.until:
                times.append(self._attempt.until)
        return min(times, default=float("inf"))
