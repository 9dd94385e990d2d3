"""Renews leases in the background; reports a loss.

One thread per process, whatever the number of locks and aliases. It runs no user code and
never waits long for one alias: a renewal is sent, and if the answer does not come at once, the
thread turns to the others and looks again later.

Leases of one alias that come due within half an interval are renewed together, so that they
fall into step and cost one round trip for 500.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import sys
import threading
from dataclasses import dataclass

from . import clock, events, process, signals
from .backends.base import BaseLockBackend, Fates, PendingRenewal
from .exceptions import BackendUnavailable
from .hold import Hold, registry
from .schedule import Schedule

__all__ = ["Watchdog", "shutdown", "unwatch", "watch"]

logger = logging.getLogger("django_dlock")

HEARTBEAT = 5.0
IDLE = 60.0
"""Seconds without a lease after which the thread goes."""
PATIENCE = 0.05
"""Seconds that the thread waits for one alias before it turns to the others."""
LATE = 1.0
"""Seconds of lateness that are worth a line in the log."""
PATIENCE_AT_EXIT = 1.0
"""Seconds that the end of the process waits for events."""


@dataclass(slots=True, eq=False, repr=False)
class _Sent:
    """A renewal on its way."""

    call: PendingRenewal
    holds: list[Hold]
    ttls: list[float]
    sent_at: float
    deadline: float


class _Lane(Schedule):
    """All that the watchdog knows of one backend.

    Attributes:
        sent: What was not answered yet.
        latest: When the hold that came last first needs attention; infinite once that was heeded.
    """

    __slots__ = ("backend", "latest", "next_beat", "sent")

    def __init__(self, backend: BaseLockBackend) -> None:
        super().__init__()
        self.backend = backend
        self.sent: _Sent | None = None
        self.next_beat = 0.0
        self.latest = math.inf


class Watchdog:
    """The schedule and its thread; ``tick`` is the schedule alone, for tests with a fake clock.

    Attributes:
        lateness: Seconds by which the thread last woke too late; a sign of a starved or
            suspended process.
    """

    def __init__(self) -> None:
        self.lateness = 0.0
        self._lanes: dict[int, _Lane] = {}
        # Reentrant: a signal handler may acquire or release while its own thread does. Entered
        # as it is and not as the condition, see events.py.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._poked = False
        # When the thread wakes by itself; infinite while it is awake, so that every new hold
        # that might escape its present look is announced.
        self._wakes_at = math.inf
        self._armed_pid = 0
        self._hooked = False

    # -- called by handles -------------------------------------------------------------

    def watch(self, hold: Hold) -> None:
        """Look after a hold until it ends. Costs a dictionary entry in the usual case."""
        lane = self._lanes.get(id(hold.backend))
        if lane is None:
            lane = self._lanes.setdefault(id(hold.backend), _Lane(hold.backend))
        first_beat = hold.confirmed_at + HEARTBEAT
        if not lane.holds and not lane.fresh:
            lane.next_beat = first_beat
        lane.fresh[hold.owner] = hold
        # Compared after the entry is made: either the thread sees the entry, or it is awake or
        # wakes too late for it and is poked.
        lane.latest = wanted = min(hold.due, first_beat)
        wakes_at = self._wakes_at
        # Overdue: its sleep is not measured on our clock, and is longer where the machine slept.
        if wanted < wakes_at or wakes_at <= hold.confirmed_at or self._thread is None:
            self._poke()

    def unwatch(self, hold: Hold) -> None:
        """Renew it no more; what is on its way is ignored."""
        lane = self._lanes.get(id(hold.backend))
        if lane is not None:
            lane.discard(hold)

    # -- the schedule ------------------------------------------------------------------

    def tick(self) -> float:
        """Do what is due, and answer when to look again."""
        wakes_at = math.inf
        for lane in list(self._lanes.values()):
            wakes_at = min(wakes_at, self._serve_or_stumble(lane))
        events.nudge()
        return wakes_at

    def _serve_or_stumble(self, lane: _Lane) -> float:
        try:
            return self._serve(lane)
        except BaseException as error:
            events.complain(error, "The watchdog stumbled over alias %r", lane.backend.alias)
            lane.start_over(clock.now())
            return clock.now() + LATE

    def _serve(self, lane: _Lane) -> float:
        if not self._collect(lane, 0.0):
            # The backend does not answer; doubts and deadlines go on all the same.
            lane.wait_with(lane.look(clock.now()))
            return clock.now() + PATIENCE
        while True:
            now = clock.now()
            lane.look(now)
            holds = lane.take(now)
            if not holds and (now < lane.next_beat or not lane.holds):
                break
            self._send(lane, holds, now)
            if not self._collect(lane, PATIENCE):
                lane.wait_with(holds + lane.ready)
                return clock.now() + PATIENCE
        # Some may have come and gone: as if the last were still there, so that those that follow
        # need not wake the thread again and again.
        latest, lane.latest = lane.latest, math.inf
        wakes_at = latest if latest > clock.now() else math.inf
        return min(wakes_at, lane.next_look(), lane.next_beat) if lane.holds else wakes_at

    def _send(self, lane: _Lane, holds: list[Hold], now: float) -> None:
        deadline = now + lane.backend.command_timeout
        renewals = [hold.renewal(now) for hold in holds]
        lane.next_beat = now + HEARTBEAT
        try:
            call = lane.backend.start_renew(
                renewals, process=process.current().id, deadline=deadline
            )
        except Exception as error:
            self._failed(lane, holds, error)
            return
        lane.sent = _Sent(call, holds, [renewal.ttl for renewal in renewals], now, deadline)

    def _collect(self, lane: _Lane, patience: float) -> bool:
        """Take the answer if it is there; false while it is still awaited."""
        sent = lane.sent
        if sent is None:
            return True
        try:
            if not sent.call.wait(patience):
                if clock.now() < sent.deadline:
                    return False
                sent.call.abandon()
                raise BackendUnavailable("A renewal was not answered", "", lane.backend.alias)
            fates = sent.call.result()
        except Exception as error:
            lane.sent = None
            self._failed(lane, sent.holds, error)
            return True
        lane.sent = None
        self._heed(lane, sent, fates)
        return True

    def _heed(self, lane: _Lane, sent: _Sent, fates: Fates) -> None:
        now = clock.now()
        sender, heard = None, False
        for hold, ttl, fate in zip(sent.holds, sent.ttls, fates, strict=True):
            # Released or lost while the renewal was on its way: the answer is nobody's.
            if lane.holds.get(hold.owner) is not hold:
                continue
            if hold.ended:
                lane.discard(hold)
            elif fate == "renewed":
                hold.confirm(sent.sent_at, ttl, now)
                lane.plan(hold)
                if hold.sender is not sender:
                    sender = hold.sender
                    heard = signals.renewed.has_listeners(sender)
                if heard:
                    events.send(signals.renewed, sender, **hold.facts())
            else:
                lane.holds.pop(hold.owner, None)
                hold.lose_by_fate(fate)

    def _failed(self, lane: _Lane, holds: list[Hold], error: Exception) -> None:
        """No answer: try again soon, well before the deadline."""
        if isinstance(error, BackendUnavailable):
            events.warn("Alias %r: %d renewals failed: %s", lane.backend.alias, len(holds), error)
        else:
            events.complain(error, "Alias %r: renewal failed", lane.backend.alias)
        now, jitter = clock.now(), random.uniform(0.75, 1.25)
        for hold in holds:
            hold.failures += 1
            pause = min(max(hold.ttl / 30, 0.02), 1.0) * jitter
            hold.due = min(now + pause, hold.deadline)
            lane.plan(hold)

    # -- the thread --------------------------------------------------------------------

    def _poke(self) -> None:
        with self._lock:
            self._poked = True
            self._condition.notify()
            if self._thread is None or not self._thread.is_alive():
                self._arm()
                self._thread = threading.Thread(
                    target=self._run, name="dlock-watchdog", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        idle_since: float | None = None
        while True:
            with self._lock:
                self._poked = False
            wakes_at = self.tick()
            now = clock.now()
            if wakes_at < math.inf:
                idle_since = None
            else:
                idle_since = now if idle_since is None else idle_since
                wakes_at = idle_since + IDLE
            with self._lock:
                if self._poked:
                    continue
                if idle_since is not None and now >= wakes_at:
                    self._thread = None
                    return
                self._wakes_at = wakes_at
                self._condition.wait(max(0.0, wakes_at - now))
                self._wakes_at = math.inf
                self._note_lateness(wakes_at)

    def _note_lateness(self, planned: float) -> None:
        self.lateness = max(0.0, clock.now() - planned)
        if self.lateness > LATE and not self._poked:
            events.warn(
                "The watchdog woke %.1f s late: the process was starved or suspended",
                self.lateness,
            )

    # -- exit and fork -----------------------------------------------------------------

    def _arm(self) -> None:
        """Make sure that this process gives its leases back when it ends, and once per fork."""
        if not self._hooked:
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.after_fork)
            atexit.register(self.shutdown)
            self._hooked = True
        if self._armed_pid != os.getpid():
            self._armed_pid = os.getpid()
            for module in ("multiprocessing.util", "billiard.util"):
                # Children of a pool skip atexit but run these.
                util = sys.modules.get(module)
                if util is not None:
                    util.Finalize(None, self.shutdown, exitpriority=100)

    def after_fork(self) -> None:
        """Runs in a forked child: it holds nothing, whatever its handles say."""
        for hold in registry.take_all():
            hold.lose_silently("fork")
        process.forget()
        armed_pid, hooked = self._armed_pid, self._hooked
        self.__init__()  # type: ignore[misc]
        self._armed_pid, self._hooked = armed_pid, hooked

    def shutdown(self) -> None:
        """Mark all leases lost, then give them back: the process ends in order."""
        held = [hold for hold in registry.take_all() if hold.lose_silently("exit")]
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            backend = lane.backend
            try:
                for hold in held:
                    if hold.backend is backend:
                        backend.release(
                            hold.name,
                            hold.owner,
                            min_hold=hold.min_hold,
                            deadline=backend.call_deadline(),
                        )
                backend.goodbye(process.current().id, deadline=backend.call_deadline())
            except BackendUnavailable as error:
                logger.warning("Alias %r: leases end with their TTL: %s", backend.alias, error)
            except Exception:
                logger.exception("Alias %r: could not give leases back", backend.alias)
        # The last loss is told, too, but no receiver can keep the process from ending.
        events.settle(PATIENCE_AT_EXIT)


_watchdog = Watchdog()
watch = _watchdog.watch
unwatch = _watchdog.unwatch
shutdown = _watchdog.shutdown
