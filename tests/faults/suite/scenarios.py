"""The scenarios: what is done to the tasks, and what may be expected of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.support.workers import Worker

from .journal import EVERYBODY, Event, gate
from .kinds import EARLY, GUARDED, KINDS, PLAIN, SHORT_TTL
from .run import OutOfTime, Run

__all__ = ["SCENARIOS", "Scenario"]

BOTH = (GUARDED, PLAIN)
ALL_POOLS = ("prefork", "threads", "solo")
ROUNDS = 3
KILLS = 40
PAST_TTL = SHORT_TTL + 1.0
LIMIT = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row of the table.

    Attributes:
        name: For files and the command line.
        title: For the table.
        on_database: The same, where locks are in a table; empty where it makes no difference.
        play: Does it; afterwards the run settles by itself.
        kinds: Which tasks are compared; always some that are not guarded.
        task: The guarded one.
        pools: Where it is possible.
        on_sqlite: Whether it is possible where only one transaction at a time may write.
        publish_again: Ends some messages with a final failure, which is answered by publishing
            the key again.
        free_within: Seconds after a death until the lock must be free, where there is a parent
            to see it.
        short: Whether the short form plays it, too.
        overlaps: Why guarded bodies may overlap here, believing that they hold; empty where
            they may not.
        harmless: By broker and pool, as in ``redis solo``, why unguarded tasks do not suffer
            there; elsewhere they must.
    """

    name: str
    title: str
    on_database: str = ""
    play: Callable[[Run], None]
    kinds: tuple[str, ...] = BOTH
    task: str = "guarded_long"
    pools: tuple[str, ...] = ALL_POOLS
    on_sqlite: bool = True
    publish_again: bool = False
    free_within: float | None = None
    short: bool = True
    overlaps: str = ""
    harmless: Mapping[str, str] = field(default_factory=dict)


def rounds(run: Run, begun: int) -> list[int]:
    """Some moments, one after another, at which ever more of the long bodies have begun."""
    count = max(1, min(2 * ROUNDS if few(run) else ROUNDS, begun // 4))
    step = max(1, begun // (count + 1))
    # Kinds take turns; every second moment is to meet another one.
    return [(turn + 1) * step + turn % 2 * 2 for turn in range(count)]


def few(run: Run) -> bool:
    """Whether a fault meets no more than a few bodies."""
    return run.stage.pool.all_slots < 10


# -- messages ----------------------------------------------------------------------------


def duplicates(run: Run) -> None:
    run.publish_all(copies=3)


def late_duplicates(run: Run) -> None:
    run.publish_all()
    run.settle()
    run.publish_all()


def redelivered_while_running(run: Run) -> None:
    long = run.publish_all(work=1.0)
    for begun in rounds(run, long):
        run.until_begun(begun)
        run.fault("redelivery")
        run.stage.redeliver()


def redelivered_after_success(run: Run) -> None:
    long = run.publish_all(work=1.0, at=lambda kind, number: {"done": "linger"})
    for finished in rounds(run, long):
        run.until_struck(finished)
        run.fault("redelivery")
        run.stage.redeliver()


def some(at: Callable[[str, int], dict[str, str]]) -> Callable[[str, int], dict[str, str]]:
    """Every second key of the guarded task, and every fourth of the others.

    A worker replaces no more than a few children a second.

    Args:
        at: From the kind and how many of it were before.
    """

    def plan(kind: str, number: int) -> dict[str, str]:
        turn, left = divmod(number, 2 if kind == GUARDED else 4)
        return {} if left else at(kind, turn)

    return plan


# -- deaths ------------------------------------------------------------------------------


def child_killed_before_commit(run: Run) -> None:
    # Acknowledged early, an effect that is there already is not lost any more.
    run.publish_all(at=some(lambda kind, turn: {"began" if kind == EARLY else "written": "die"}))


def child_killed_after_commit(run: Run) -> None:
    run.publish_all(at=some(lambda kind, turn: {("committed", "done")[turn % 2]: "die"}))


def stop_half(run: Run, what: str) -> tuple[list[Worker], list[int]]:
    """Stop half of the workers (SIGSTOP), and note it; the processes of the bodies in them."""
    stopped = run.stage.workers[: len(run.stage.workers) // 2]
    for worker in stopped:
        run.stage.broker.pause(worker)
    pids = [pid for worker in stopped for pid in run.pids(worker.process.pid)]
    run.fault(what, pids)
    return stopped, pids


def child_killed(run: Run) -> None:
    long = run.publish_all(work=4.0)
    turn = itertools.cycle((GUARDED, PLAIN))
    met: set[tuple[object, ...]] = set()
    killed = 0
    while killed < KILLS:
        kind = next(turn)
        run.until(functools.partial(next_one, run, kind, met, long), f"a {kind} body runs")
        body = running(run, kind, met)
        if body is None:
            break
        met.add((kind, body["key"]))
        run.fault("SIGKILL", [body["pid"]])
        with contextlib.suppress(ProcessLookupError):
            os.kill(body["pid"], signal.SIGKILL)
            run.killed([body["pid"]])
        killed += 1
        # The next one dies when this one's lock is seen to.
        run.until(functools.partial(seen_to, run, body), "the lock of a dead body is free")


def next_one(run: Run, kind: str, met: set[tuple[object, ...]], long: int) -> bool:
    """Whether a body runs, or none will any more."""
    return running(run, kind, met) is not None or run.long("begin") >= long


def seen_to(run: Run, body: Event) -> bool:
    return not run.watch.pending() and body not in run.watch.running()


def running(run: Run, kind: str, met: set[tuple[object, ...]]) -> Event | None:
    """A running long body of a key that was not chosen before."""
    bodies = (body for body in run.watch.running() if body["long"] and body["kind"] == kind)
    return next((body for body in bodies if (kind, body["key"]) not in met), None)


def worker_killed(run: Run) -> None:
    long = run.publish_all(work=2.5 if run.stage.pool.all_slots < 50 else 1.0)
    for begun in rounds(run, long):
        run.until_begun(begun)
        victims, _ = stop_half(run, "SIGKILL")
        for worker in victims:
            pids = run.pids(worker.process.pid)
            run.stage.kill(worker)
            run.killed(pids)
        if run.stage.broker.name == "redis":
            # RabbitMQ has seen the connection end.
            run.stage.redeliver()
        for _ in victims:
            run.stage.start_worker()


def worker_stopped(run: Run) -> None:
    long = run.publish_all(work=2.5 if run.stage.pool.all_slots < 50 else 1.0)
    for begun in rounds(run, long):
        run.until_begun(begun)
        victims, pids = stop_half(run, "SIGSTOP")
        try:
            time.sleep(PAST_TTL / 2)
            # Not one that was about to commit: what it has written, nobody else can touch.
            stopped = [body for body in run.watch.running() if body["pid"] in pids]
            run.stage.redeliver()
            time.sleep(PAST_TTL / 2)
            let_others_take_over(run, stopped)
        finally:
            for worker in victims:
                worker.resume()
        # The next are to be others.
        run.stage.workers[:] = run.stage.workers[len(victims) :] + victims


def let_others_take_over(run: Run, stopped: list[dict[str, object]]) -> None:
    done = functools.partial(taken_over, run, stopped)
    try:
        run.until(done, "others took over what was stopped", patience=15)
    except OutOfTime:
        # Threads share one AMQP connection, and one may have read the answer for which another
        # waits; a heartbeat would end that connection later.
        run.stage.redeliver()
        # What was requeued is behind all waiting messages, so it runs last.
        run.until(done, "others took over what was stopped and delivered twice", patience=90)


def taken_over(run: Run, stopped: list[dict[str, object]]) -> bool:
    """Whether the work of stopped bodies was done by others."""
    done = {(event["kind"], event["key"]) for event in run.watch.events("committed")}
    return all((body["kind"], body["key"]) in done for body in stopped)


def hard_limit(run: Run) -> None:
    # The guarded body is stopped at the same moment, for the lock is not held longer; but not
    # one that is in a call which nothing interrupts.
    run.publish_all(
        at=some(lambda kind, turn: {"written": ("block", "hold")[turn % 2]}), time_limit=LIMIT
    )


def terminated(run: Run) -> None:
    plans = some(lambda kind, turn: {"written": "hold"})
    run.publish_all(at=plans)
    total = sum(bool(plans(kind, number)) for kind in BOTH for number in range(len(run.keys)))
    revoked: set[str] = set()
    deadline = time.monotonic() + 60
    while len(revoked) < total and time.monotonic() < deadline:
        held = {(event["kind"], event["key"]) for event in run.watch.events("struck")}
        new = [
            body["delivery"]
            for body in run.watch.running()
            if (body["kind"], body["key"]) in held and body["delivery"] not in revoked
        ]
        if new:
            revoked.update(new)
            half = len(new) // 2
            for ids, name in ((new[:half], "SIGTERM"), (new[half:], "SIGKILL")):
                if ids:
                    run.stage.site.app.control.revoke(ids, terminate=True, signal=name)
        time.sleep(0.2)
    if len(revoked) < total:
        raise OutOfTime(f"not within 60 s: {total} bodies to terminate, {len(revoked)} were")


# -- outages -----------------------------------------------------------------------------


def locks_emptied(run: Run) -> None:
    long = run.publish_all(work=1.5, copies=2)
    for begun in rounds(run, long):
        run.until_begun(begun)
        run.fault("lock Redis restarted")
        run.stage.locks.restart()


def locks_paused(run: Run) -> None:
    long = run.publish_all(work=PAST_TTL, copies=2)
    for begun in rounds(run, long)[:2]:
        run.until_begun(begun)
        run.fault("lock Redis stopped")
        run.stage.locks.pause()
        try:
            time.sleep(PAST_TTL)
        finally:
            run.stage.locks.resume()


def broker_cut(run: Run) -> None:
    long = run.publish_all(work=1.0)
    for begun in rounds(run, long):
        run.until_begun(begun)
        run.fault("broker connections cut")
        run.stage.broker.cut(run.stage.workers)


def database_cut(run: Run) -> None:
    def cut(kind: str, number: int) -> dict[str, str]:
        # What completes the work: without a transaction it is the INSERT itself.
        statement = "COMMIT" if kind == GUARDED else "INSERT"
        return {"began": f"{('answer lost', 'not sent')[number % 2]}: {statement}"}

    run.publish_all(at=cut)


# -- follow-ups --------------------------------------------------------------------------

BETWEEN = ("committed", "published", "publishing")
"""Moments between COMMIT and the row that says that all is published; see ``workload``."""


def sender_killed(run: Run) -> None:
    def plan(kind: str, turn: int) -> dict[str, str]:
        return {BETWEEN[turn % len(BETWEEN)] if kind == GUARDED else "committed": "die"}

    run.publish_all(at=some(plan), hook=True)


def sender_over_limit(run: Run) -> None:
    # Its message is acknowledged, and comes no more: only the command publishes.
    run.publish_all(at=some(lambda kind, turn: {"committed": "block"}), hook=True, time_limit=LIMIT)


def broker_away(run: Run) -> None:
    without_broker(run, lambda turn: "wait")


def broker_away_and_sender_killed(run: Run) -> None:
    without_broker(run, lambda turn: ("wait", "wait, then die")[turn % 2])


def without_broker(run: Run, what: Callable[[int], str]) -> None:
    """Let bodies wait after their COMMIT until the broker is gone, and then continue."""
    plans = some(lambda kind, turn: {"committed": what(turn) if kind == GUARDED else "wait"})
    run.publish_all(at=plans, hook=True)
    left = sum(bool(plans(kind, number)) for kind in BOTH for number in range(len(run.keys)))
    met: set[tuple[str, int]] = set()
    try:
        for turn in range(ROUNDS):
            count = min(left, max(2, run.stage.pool.all_slots // 2))
            if not count:
                break
            bodies = those_that_wait(run, met, count)
            if not bodies:
                break
            met |= {(body["kind"], body["key"]) for body in bodies}
            left -= len(bodies)
            go_on_without_broker(run, bodies)
            if turn % 2:
                # As Beat does, sooner or later; otherwise their messages come again first.
                run.publish_pending()
            run.stage.redeliver()
    finally:
        run.journal.open(EVERYBODY)


def go_on_without_broker(run: Run, bodies: list[Event]) -> None:
    """End their waiting, and have the broker back when they could not publish."""
    run.fault("broker away")
    run.stage.broker.go_away(run.stage.workers)
    try:
        for body in bodies:
            run.journal.open(gate(body["kind"], body["key"]))
        senders = [body for body in bodies if body["kind"] == GUARDED and body["what"] == "wait"]
        if not senders:
            return
        until_tried(run, len(senders))
        if run.publish_pending() == 0:
            raise OutOfTime("the command has published to a broker that is away")
    finally:
        run.stage.broker.come_back()


def those_that_wait(run: Run, met: set[tuple[str, int]], count: int) -> list[Event]:
    """The waiting bodies, once there are ``count``; after a timeout, those that there are.

    Celery's parent may end by itself when it connects again after children of it have died, and
    only after the bodies that it has at hand.
    """

    def found() -> list[Event]:
        return [
            event
            for event in run.watch.events("struck")
            if event["what"].startswith("wait") and (event["kind"], event["key"]) not in met
        ]

    with contextlib.suppress(OutOfTime):
        run.until(lambda: len(found()) >= count, f"{count} bodies have committed", patience=20)
    return found()


def until_tried(run: Run, senders: int) -> None:
    """Wait until these bodies have tried to publish, and could not."""
    deadline = time.monotonic() + 30
    while (tried := run.attempts()) < senders and time.monotonic() < deadline:
        time.sleep(0.1)
    if not tried:
        raise OutOfTime("nobody has tried to publish without a broker")


SCENARIOS = (
    Scenario(name="duplicates", title="simultaneous duplicates", play=duplicates),
    Scenario(name="late", title="late duplicates", play=late_duplicates),
    Scenario(
        name="redelivered-running",
        title="redelivery while running",
        play=redelivered_while_running,
        on_sqlite=False,
    ),
    Scenario(
        name="redelivered-finished",
        title="redelivery after success, before the acknowledgement",
        play=redelivered_after_success,
    ),
    Scenario(
        name="child-killed",
        title="child SIGKILL at any moment, one after another",
        play=child_killed,
        pools=("prefork",),
        free_within=1.0,
    ),
    Scenario(
        name="child-before-commit",
        title="child SIGKILL before the commit",
        play=child_killed_before_commit,
        kinds=KINDS,
        pools=("prefork",),
    ),
    Scenario(
        name="child-after-commit",
        title="child SIGKILL after the commit, before the acknowledgement",
        play=child_killed_after_commit,
        pools=("prefork",),
    ),
    Scenario(name="worker-killed", title="whole worker SIGKILL", play=worker_killed, kinds=KINDS),
    Scenario(
        name="worker-stopped",
        title="worker SIGSTOP past TTL, then resumed",
        play=worker_stopped,
        task="guarded",
        on_sqlite=False,
    ),
    Scenario(
        name="hard-limit",
        title="hard time limit",
        play=hard_limit,
        pools=("prefork",),
        on_sqlite=False,
        publish_again=True,
    ),
    Scenario(
        name="terminated",
        title="revoke(terminate=True)",
        play=terminated,
        pools=("prefork",),
        on_sqlite=False,
        publish_again=True,
    ),
    Scenario(
        name="locks-emptied",
        title="lock Redis killed and restarted empty",
        on_database="rows of the lock table deleted",
        play=locks_emptied,
        task="guarded",
        overlaps="the store has lost the locks, and a holder learns this at its next renewal",
    ),
    Scenario(
        name="locks-paused",
        title="lock Redis paused past TTL",
        on_database="lock table locked past TTL",
        play=locks_paused,
        task="guarded",
    ),
    Scenario(
        name="broker-cut",
        title="broker connections cut",
        play=broker_cut,
        harmless={
            "redis solo": "the worker reads nothing while its body runs, and its client connects "
            "again for the acknowledgement"
        },
    ),
    Scenario(
        name="database-cut",
        title="database connection cut at completion",
        play=database_cut,
        on_sqlite=False,
        publish_again=True,
    ),
    Scenario(
        name="sender-killed",
        title="child SIGKILL between the commit and its follow-ups",
        play=sender_killed,
        pools=("prefork",),
    ),
    Scenario(
        name="sender-over-limit",
        title="hard time limit between the commit and the follow-ups",
        play=sender_over_limit,
        pools=("prefork",),
        publish_again=True,
    ),
    Scenario(
        name="broker-away",
        title="broker away between the commit and the follow-ups",
        play=broker_away,
        short=False,
    ),
    Scenario(
        name="broker-away-sender-killed",
        title="broker away and child SIGKILL between the commit and the follow-ups",
        play=broker_away_and_sender_killed,
        short=False,
        pools=("prefork",),
    ),
)
