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
from dataclasses import dataclass, field

from . import clock, events, process, signals
from .backends.base import BaseLockBackend, PendingRenewal
from .exceptions import BackendUnavailable
from .hold import Hold, holder_ended, registry

__all__ = ["Watchdog", "shutdown", "unwatch", "watch"]

logger = logging.getLogger("django_dlock")

BATCH = 500
"""Leases renewed in one call."""
HEARTBEAT = 5.0
IDLE = 60.0
"""Seconds without a lease after which the thread goes."""
PATIENCE = 0.05
"""Seconds that the thread waits for one alias before it turns to the others."""
LATE = 1.0
"""Seconds of lateness that are worth a line in the log."""
PATIENCE_AT_EXIT = 1.0
"""Seconds that the end of the process waits for events."""


@dataclass
class _Sent:
    """A renewal on its way."""

    call: PendingRenewal
    holds: list[Hold]
    ttls: list[float]
    sent_at: float
    deadline: float


@dataclass
class _Lane:
    """All that the watchdog knows of one backend."""

    backend: BaseLockBackend
    holds: dict[str, Hold] = field(default_factory=dict)
    sent: _Sent | None = None
    next_beat: float = 0.0
    next_look: float = -math.inf
    """When a hold or the heartbeat next needs attention."""
    unplanned: bool = True
    """``next_look`` is not to be trusted: there may be holds that it does not know."""
    latest: float = math.inf
    """When the hold that came last first needs attention; infinite once that was heeded."""


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
        if not lane.holds:
            lane.next_beat = first_beat
        lane.holds[hold.owner] = hold
        # Another alias may wake the thread before this hold is due.
        lane.unplanned = True
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
            lane.holds.pop(hold.owner, None)

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
            lane.unplanned = True
            return clock.now() + LATE

    def _serve(self, lane: _Lane) -> float:
        if lane.sent is not None:
            if not self._collect(lane, 0.0):
                # The backend does not answer; deadlines go on all the same.
                if clock.now() >= lane.next_look:
                    for hold in self._look(lane):
                        hold.failures += 1
                    lane.next_look = max(lane.next_look, clock.now() + 4 * PATIENCE)
                return clock.now() + PATIENCE
            # What could not be sent while this answer was awaited is next.
            lane.unplanned = True
        while lane.holds and (lane.unplanned or clock.now() >= lane.next_look):
            due = self._look(lane)
            if not due and clock.now() < lane.next_beat:
                break
            for start in range(0, len(due) or 1, BATCH):
                self._send(lane, due[start : start + BATCH])
                if not self._collect(lane, PATIENCE):
                    return clock.now() + PATIENCE
        if lane.holds:
            return lane.next_look
        # Some may have come and gone: as if the last were still there, so that those that follow
        # need not wake the thread again and again. ``unplanned`` stays: one may just come.
        latest, lane.latest = lane.latest, math.inf
        return latest if latest > clock.now() else math.inf

    def _look(self, lane: _Lane) -> list[Hold]:
        """End what must end, and gather what is to be renewed now."""
        lane.unplanned = False
        now = clock.now()
        next_look = math.inf
        due: list[Hold] = []
        close: list[Hold] = []
        for hold in lane.holds.copy().values():
            if not hold.active:
                lane.holds.pop(hold.owner, None)
                continue
            if hold.renews:
                if hold.handle() is None:
                    hold.stop_renewing("collected")
                elif holder_ended(hold.key):
                    hold.stop_renewing("holder_ended")
                else:
                    hold.tell_doubt(now)
            if hold.due < hold.deadline:
                if hold.due <= now:
                    due.append(hold)
                    continue
                if hold.due <= now + (hold.due - hold.confirmed_at) / 2:
                    close.append(hold)
            next_look = min(next_look, hold.due, hold.deadline)
        if due:
            # The most urgent first; whoever comes due soon goes along while a call has room.
            due.sort(key=lambda hold: hold.deadline)
            due.extend(close[: -len(due) % BATCH])
        lane.next_look = min(next_look, lane.next_beat)
        return due

    def _send(self, lane: _Lane, holds: list[Hold]) -> None:
        now = clock.now()
        deadline = now + lane.backend.command_timeout
        renewals = [hold.renewal(now) for hold in holds]
        lane.next_beat = now + HEARTBEAT
        for hold in holds:
            # Until the answer comes: not due again in this look.
            hold.due = deadline
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
        for hold, ttl, fate in zip(sent.holds, sent.ttls, fates, strict=True):
            # Released or lost while the renewal was on its way: the answer is nobody's.
            if lane.holds.get(hold.owner) is not hold or hold.ended:
                continue
            if fate == "renewed":
                hold.confirm(sent.sent_at, ttl)
                lane.next_look = min(lane.next_look, hold.due)
                events.send(signals.renewed, hold.sender, **hold.facts())
            else:
                lane.holds.pop(hold.owner, None)
                hold.lose_by_fate(fate)
        return True

    def _failed(self, lane: _Lane, holds: list[Hold], error: Exception) -> None:
        """No answer: try again soon, well before the deadline."""
        if isinstance(error, BackendUnavailable):
            events.warn("Alias %r: %d renewals failed: %s", lane.backend.alias, len(holds), error)
        else:
            events.complain(error, "Alias %r: renewal failed", lane.backend.alias)
        now = clock.now()
        for hold in holds:
            hold.failures += 1
            pause = min(max(hold.ttl / 30, 0.02), 1.0) * random.uniform(0.75, 1.25)
            hold.due = min(now + pause, hold.deadline)
            lane.next_look = min(lane.next_look, hold.due)

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
