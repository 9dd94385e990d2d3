"""Renews leases in the background, and reports losses.

One thread per process, whatever the number of locks and aliases. It runs no user code and
never waits long for one alias: a renewal is sent, and if the answer does not come at once, the
thread turns to the others and checks again later.

Leases of one alias that come due within half an interval are renewed together. From then on
they are due at the same time, and one call of the backend renews as many of them as it can take.
"""

from __future__ import annotations

import math
import random
import threading
from dataclasses import dataclass
from functools import partial

from .. import clock, process, signals
from ..backends.base import BaseLockBackend, PendingRenewal, RenewalResults
from ..exceptions import BackendUnavailable
from ..lease import Outcome, ReleaseRequest
from . import dispatch
from .held_lease import HeldLease, registry
from .schedule import Schedule

IDLE = 60.0
"""Seconds without a lease after which the thread ends."""
PATIENCE = 0.05
"""Seconds that the thread waits for one alias before it turns to the others."""
LATE = 1.0
"""Seconds of lateness that are worth a line in the log."""

_PARTLY = "A part of the backend that has these leases did not answer"


@dataclass(slots=True, eq=False, repr=False)
class _SentRenewal:
    """A renewal that was sent and not answered yet."""

    call: PendingRenewal
    leases: list[HeldLease]
    sent_at: float
    deadline: float


class BackendSchedule(Schedule):
    """The schedule of one backend, and its renewal under way.

    Attributes:
        sent: The renewal that was sent and not answered yet.
        latest: When the most recently added lease needs attention for the first time; infinite
            once the thread has planned to wake for it.
        doubted: The backend has reported that its store does not answer.
    """

    def __init__(self, backend: BaseLockBackend) -> None:
        super().__init__(backend.renewals_per_call)
        self.backend = backend
        self.doubted = False
        self.sent: _SentRenewal | None = None
        self.next_beat = 0.0
        self.latest = math.inf

    def beat_after(self, now: float) -> float:
        """When the next heartbeat is due; infinite where the store needs none."""
        heartbeat = self.backend.heartbeat
        return math.inf if heartbeat is None else now + heartbeat


class Watchdog:
    """The schedule and its thread; ``tick`` is the schedule alone, for tests with a fake clock.

    Attributes:
        schedules: One for each backend, by the id of the backend.
        thread: The one that renews; ``None`` if there is none.
        wakes_at: When the thread wakes by itself; infinite while it is awake, so that a lease which
            its current turn may miss always wakes it again.
    """

    def __init__(self) -> None:
        self.schedules: dict[int, BackendSchedule] = {}
        # Reentrant: a signal handler may acquire or release while its own thread does. Entered
        # directly, not through the condition; see core/supervisor.py.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self.thread: threading.Thread | None = None
        self._woken = False
        self._lent: threading.Event | None = None
        self.wakes_at = math.inf

    # -- called by handles -------------------------------------------------------------

    def watch(self, held: HeldLease) -> None:
        """Renew a lease until it ends. Usually this only adds an entry to a dictionary."""
        schedule = self.schedules.get(id(held.backend))
        if schedule is None:
            schedule = self.schedules.setdefault(id(held.backend), BackendSchedule(held.backend))
            held.backend.report_end = partial(self._end, schedule)
            held.backend.report_doubt = partial(self._doubt, schedule)
        first_beat = schedule.beat_after(held.acquired_at)
        if not schedule.leases and not schedule.fresh:
            schedule.next_beat = first_beat
        schedule.fresh[held.owner] = held
        # Compare after adding the entry. Either the thread sees the entry, or it is awake, or it
        # would wake too late and must be woken.
        schedule.latest = wanted = min(held.due, first_beat)
        wakes_at = self.wakes_at
        # If it is overdue, the machine was suspended: the sleep does not count that time.
        if wanted < wakes_at or wakes_at <= held.acquired_at or self.thread is None:
            self.wake()

    def unwatch(self, held: HeldLease) -> None:
        """Stop renewing it, and ignore the answer to a renewal that was sent already."""
        schedule = self.schedules.get(id(held.backend))
        if schedule is not None:
            schedule.discard(held)

    # -- called by backends ------------------------------------------------------------

    def _end(self, schedule: BackendSchedule, owner: str, outcome: Outcome) -> None:
        held = schedule.fresh.get(owner) or schedule.leases.get(owner)
        if held is not None:
            schedule.discard(held)
            held.lose_by_outcome(outcome)
            dispatch.nudge()

    def _doubt(self, schedule: BackendSchedule) -> None:
        schedule.doubted = True
        self.wake()

    # -- the schedule ------------------------------------------------------------------

    def tick(self) -> float:
        """Do what is due; returns when to run again."""
        wakes_at = math.inf
        for schedule in list(self.schedules.values()):
            wakes_at = min(wakes_at, self._serve_safely(schedule))
        dispatch.nudge()
        return wakes_at

    def _serve_safely(self, schedule: BackendSchedule) -> float:
        try:
            return self._serve(schedule)
        except BaseException as error:
            alias = schedule.backend.alias
            dispatch.log_error(error, "The watchdog failed for alias %r", alias, alias=alias)
            schedule.start_over(clock.now())
            return clock.now() + LATE

    def _serve(self, schedule: BackendSchedule) -> float:
        if schedule.doubted:
            schedule.doubted = False
            schedule.doubt_all(clock.now())
        if not self._collect(schedule, 0.0):
            # The backend does not answer, but doubts and deadlines must still be noticed.
            schedule.wait_with(schedule.collect_due(clock.now()))
            return clock.now() + PATIENCE
        while True:
            now = clock.now()
            schedule.collect_due(now)
            leases = schedule.take(now)
            if not leases and (now < schedule.next_beat or not schedule.leases):
                break
            self._send(schedule, leases, now)
            if not self._collect(schedule, PATIENCE):
                schedule.wait_with(leases + schedule.ready)
                return clock.now() + PATIENCE
        # The latest lease may be gone already. Wake for it all the same, so that the next ones need
        # not wake this thread again and again.
        latest, schedule.latest = schedule.latest, math.inf
        wakes_at = latest if latest > clock.now() else math.inf
        if schedule.leases:
            wakes_at = min(wakes_at, schedule.next_time(), schedule.next_beat)
        return wakes_at

    def _send(self, schedule: BackendSchedule, leases: list[HeldLease], now: float) -> None:
        deadline = now + schedule.backend.command_timeout
        renewals = [held.renewal(now) for held in leases]
        schedule.next_beat = schedule.beat_after(now)
        try:
            call = schedule.backend.start_renew(
                renewals, process=process.current().id, deadline=deadline
            )
        except Exception as error:
            self._failed(schedule, leases, now, error)
            return
        schedule.sent = _SentRenewal(call, leases, now, deadline)

    def _collect(self, schedule: BackendSchedule, patience: float) -> bool:
        """Take the answer if it has come; returns ``False`` while it has not."""
        sent = schedule.sent
        if sent is None:
            return True
        try:
            if not sent.call.wait(patience):
                if clock.now() < sent.deadline:
                    return False
                sent.call.abandon()
                raise BackendUnavailable("A renewal was not answered", "", schedule.backend.alias)
            results = sent.call.result()
        except Exception as error:
            schedule.sent = None
            self._failed(schedule, sent.leases, sent.sent_at, error)
            return True
        schedule.sent = None
        self._apply(schedule, sent, results)
        return True

    def _apply(
        self, schedule: BackendSchedule, sent: _SentRenewal, results: RenewalResults
    ) -> None:
        now = clock.now()
        unanswered: list[HeldLease] = []
        for held, (outcome, ttl) in zip(sent.leases, results, strict=True):
            # It was released or lost after the renewal was sent, so the answer does not matter.
            if schedule.leases.get(held.owner) is not held:
                continue
            if held.ended:
                schedule.discard(held)
            elif outcome == "renewed":
                held.renewed(sent.sent_at, ttl, now)
                schedule.plan(held)
            elif outcome == "unanswered":
                unanswered.append(held)
            else:
                schedule.leases.pop(held.owner, None)
                held.refused(sent.sent_at, outcome)
        if unanswered:
            alias = schedule.backend.alias
            error = BackendUnavailable(_PARTLY, "", alias)
            self._failed(schedule, unanswered, sent.sent_at, error)

    def _failed(
        self,
        schedule: BackendSchedule,
        leases: list[HeldLease],
        sent_at: float,
        error: Exception,
    ) -> None:
        """Try again soon, well before the deadline."""
        alias, count = schedule.backend.alias, len(leases)
        if not isinstance(error, BackendUnavailable):
            dispatch.log_error(error, "Alias %r: renewal failed", alias, alias=alias)
        elif not count:
            dispatch.log_warning("Alias %r: a heartbeat failed: %s", alias, error, alias=alias)
        else:
            what = "1 renewal" if count == 1 else f"{count} renewals"
            dispatch.log_warning("Alias %r: %s failed: %s", alias, what, error, alias=alias)
        now, jitter = clock.now(), random.uniform(0.75, 1.25)
        for held in leases:
            held.unanswered(sent_at, error)
            pause = min(max(held.ttl / 30, 0.02), 1.0) * jitter
            held.due = min(now + pause, held.deadline)
            schedule.plan(held)

    # -- the thread --------------------------------------------------------------------

    def wake(self) -> None:
        """Let the thread look at once what is due; starts it if there is none."""
        with self._lock:
            self._woken = True
            self._condition.notify()
            if self.thread is None or not self.thread.is_alive():
                self._arm()
                self.thread = threading.Thread(target=self._run, name="dlock-watchdog", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        idle_since: float | None = None
        while True:
            with self._lock:
                self._woken = False
                lent = self._lent
                if lent is not None:
                    self._lent = self.thread = None
                    break
            began = clock.now()
            wakes_at = self.tick()
            now = clock.now()
            if now - began > LATE:
                # Stopped in the middle, when other leases may have come due.
                self.note_lateness(began)
            if wakes_at < math.inf:
                idle_since = None
            else:
                idle_since = now if idle_since is None else idle_since
                wakes_at = idle_since + IDLE
                if now >= wakes_at:
                    for schedule in list(self.schedules.values()):
                        _close_unused(schedule.backend)
            with self._lock:
                if self._woken:
                    continue
                if idle_since is not None and now >= wakes_at:
                    self.thread = None
                    return
                self.wakes_at = wakes_at
                self._condition.wait(max(0.0, wakes_at - now))
                self.wakes_at = math.inf
            if idle_since is None:
                self.note_lateness(wakes_at)
        dispatch.drain()
        lent.set()

    def note_lateness(self, planned: float) -> None:
        """Tell how much later than planned the thread looks after its leases, unless it is early.

        Whether it can still renew them or not: a renewal that comes too late is late, too.
        """
        late = clock.now() - planned
        if late < 0:
            return
        dispatch.send(signals.renewal_due, Watchdog, late=late)
        if late > LATE:
            dispatch.log_warning(
                "The watchdog woke %.1f s late: the process was starved or suspended", late
            )

    # -- exit and fork -----------------------------------------------------------------

    def _arm(self) -> None:
        """Make this process release its leases when it ends; repeated in each forked child."""
        process.at_fork(after_in_child=self.after_fork)
        # Before ``shutdown``, because exit hooks run in reverse: what that reports is told, too.
        dispatch.prepare()
        process.at_exit(self.shutdown)

    def after_fork(self) -> None:
        """Runs in a forked child, which holds none of its parent's leases."""
        for held in registry.take_all():
            held.lose_silently("fork")
        process.reset()
        self.__init__()  # type: ignore[misc]

    def shutdown(self) -> None:
        """Mark and report all leases as lost, then release them, because the process ends."""
        # A thread that still acquires is not part of the process that counts as ended below.
        ending = process.current().id
        process.reset()
        # ``active`` reports one that has ended by itself.
        leases = [held for held in registry.take_all() if held.active and held.lose("exit")]
        schedules, self.schedules = list(self.schedules.values()), {}
        for schedule in schedules:
            backend = schedule.backend
            try:
                ours = [
                    ReleaseRequest(held.name, held.owner, held.min_hold)
                    for held in leases
                    if held.backend is backend
                ]
                for start in range(0, len(ours), backend.renewals_per_call):
                    batch = ours[start : start + backend.renewals_per_call]
                    backend.release_many(batch, deadline=backend.call_deadline())
                backend.deregister(ending, deadline=backend.call_deadline())
            except BackendUnavailable as error:
                dispatch.log_warning(
                    "Alias %r: leases end with their TTL: %s",
                    backend.alias,
                    error,
                    alias=backend.alias,
                )
            except Exception as error:
                dispatch.log_error(
                    error,
                    "Alias %r: could not release leases",
                    backend.alias,
                    alias=backend.alias,
                )
        # Give receivers time for the last events, but do not let them keep the process from ending.
        if dispatch.is_stranded():
            self._lend_thread()
        dispatch.settle(dispatch.PATIENCE_AT_EXIT)

    def _lend_thread(self) -> None:
        """Let the thread, which has nothing to renew any more, make the calls of other threads."""
        done = threading.Event()
        with self._lock:
            if self.thread is None or not self.thread.is_alive():
                return
            self._lent = done
            self._woken = True
            self._condition.notify()
        done.wait(dispatch.PATIENCE_AT_EXIT)


def _close_unused(backend: BaseLockBackend) -> None:
    """Close connections that nobody has used while this process held nothing."""
    try:
        backend.close_unused()
    except Exception as error:
        alias = backend.alias
        dispatch.log_error(error, "Alias %r: closing connections failed", alias, alias=alias)


_watchdog = Watchdog()
watch = _watchdog.watch
unwatch = _watchdog.unwatch
shutdown = _watchdog.shutdown
