"""The scenarios: the faults, and what is expected of the tasks under them."""

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
from .web import clients_leave

BOTH = (GUARDED, PLAIN)
ALL_POOLS = ("prefork", "threads", "solo")
ROUNDS = 3
KILLS = 40
PAST_TTL = SHORT_TTL + 1.0
LIMIT = 1.5
READ_ONLY = 2.0
"""Seconds for which a database accepts no writes; bodies begin and end meanwhile."""
DISTANCE = 0.02
"""Seconds that each reply of a distant broker takes."""
BROKEN = "lock broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row of the table.

    Attributes:
        name: For files and the command line.
        title: For the table.
        on_database: The title if locks are in a table; empty if it is the same.
        play: Makes the faults; afterwards the run waits for the end.
        kinds: The tasks that are compared; some of them are always unguarded.
        task: The guarded one.
        pools: The pools in which it is possible.
        on_sqlite: Whether it is possible if only one transaction at a time may write.
        publish_again: Some messages fail finally in this scenario; the driver publishes their keys
            again.
        free_within: Seconds after a death until the lock must be free, in pools with a parent
            process that notices it.
        short: Whether it is part of the short form, too, which has one for each part that fails.
        overlaps: Why guarded bodies may overlap here although both consider the lock theirs; empty
            if they may not.
        explained: What the row means, where it is not about tasks; in the notes of the table.
        is_variant: Whether it differs little from another one; the manual's table leaves it out.
        harmless: By broker and pool, as in ``redis solo``: why unguarded tasks are not damaged
            there. Everywhere else they must be.
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
    short: bool = False
    overlaps: str = ""
    explained: str = ""
    is_variant: bool = False
    harmless: Mapping[str, str] = field(default_factory=dict)


def rounds(run: Run, begun: int) -> list[int]:
    """Some numbers, one after another, of long bodies that must have begun."""
    count = max(1, min(2 * ROUNDS if few(run) else ROUNDS, begun // 4))
    step = max(1, begun // (count + 1))
    # Kinds alternate, so every second number meets another kind.
    return [(turn + 1) * step + turn % 2 * 2 for turn in range(count)]


def few(run: Run) -> bool:
    """Whether a fault meets only a few bodies."""
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
        run.until_hit(finished)
        run.fault("redelivery")
        run.stage.redeliver()


def some(at: Callable[[str, int], dict[str, str]]) -> Callable[[str, int], dict[str, str]]:
    """Every second key of the guarded task, and every fourth of the others.

    A worker cannot replace more than a few children a second.

    Args:
        at: Given the kind and how many of it came before.
    """

    def plan(kind: str, number: int) -> dict[str, str]:
        turn, left = divmod(number, 2 if kind == GUARDED else 4)
        return {} if left else at(kind, turn)

    return plan


# -- deaths ------------------------------------------------------------------------------


def child_killed_before_commit(run: Run) -> None:
    # For tasks acknowledged early, an effect that already exists cannot be lost any more.
    run.publish_all(at=some(lambda kind, turn: {"began" if kind == EARLY else "written": "die"}))


def child_killed_after_commit(run: Run) -> None:
    run.publish_all(at=some(lambda kind, turn: {("committed", "done")[turn % 2]: "die"}))


def stop_half(run: Run, what: str) -> tuple[list[Worker], list[int]]:
    """Stop half of the workers (SIGSTOP) and note it; return the processes of their bodies."""
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
        if killed % 4 == 1:
            # Every second unguarded one only after its effect. On some machines the others die so
            # early that they do no damage.
            run.until(functools.partial(has_effect, run, body), "a body has its effect")
            if body not in run.watch.running():
                continue
        run.fault("SIGKILL", [body["pid"]])
        with contextlib.suppress(ProcessLookupError):
            os.kill(body["pid"], signal.SIGKILL)
            run.killed([body["pid"]])
        killed += 1
        # The next process dies when the lock of this one has been freed.
        run.until(functools.partial(is_free, run, body), "the lock of a dead body is free")


def has_effect(run: Run, body: Event) -> bool:
    """Whether the body has had its effect, or has ended."""
    done = any(event["run"] == body["run"] for event in run.watch.events("committed"))
    return done or body not in run.watch.running()


def next_one(run: Run, kind: str, met: set[tuple[object, ...]], long: int) -> bool:
    """Whether a body runs, or no further one will."""
    return running(run, kind, met) is not None or run.long("begin") >= long


def is_free(run: Run, body: Event) -> bool:
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
            # RabbitMQ has noticed the end of the connection.
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
            # Do not stop one that is about to commit: others cannot change the rows it has written.
            stopped = [body for body in run.watch.running() if body["pid"] in pids]
            run.stage.redeliver()
            time.sleep(PAST_TTL / 2)
            let_others_take_over(run, stopped)
        finally:
            for worker in victims:
                worker.resume()
        # Choose others next time.
        run.stage.workers[:] = run.stage.workers[len(victims) :] + victims


def let_others_take_over(run: Run, stopped: list[dict[str, object]]) -> None:
    done = functools.partial(taken_over, run, stopped)
    try:
        run.until(done, "others took over what was stopped", patience=15)
    except OutOfTime:
        # Threads share one AMQP connection, and one may have read the reply that another waits for;
        # later, a missing heartbeat would end that connection.
        run.stage.redeliver()
        # A requeued message is behind all waiting ones, so it runs last.
        run.until(done, "others took over what was stopped and delivered twice", patience=90)


def taken_over(run: Run, stopped: list[dict[str, object]]) -> bool:
    """Whether others have done the work of the stopped bodies."""
    done = {(event["kind"], event["key"]) for event in run.watch.events("committed")}
    return all((body["kind"], body["key"]) in done for body in stopped)


def hard_limit(run: Run) -> None:
    # The guarded body is stopped at the same moment, because its lock is not held longer. A body
    # inside a call that cannot be interrupted is not.
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
        held = {(event["kind"], event["key"]) for event in run.watch.events("hit")}
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


def interrupted_publishes(run: Run) -> None:
    long = run.publish_all(work=2.5, at=lambda kind, number: {"began": "publish"})
    run.stage.broker.stand_off(DISTANCE)
    try:
        for begun in rounds(run, long):
            run.until_begun(begun)
            break_locks(run)
            run.fault("redelivery")
            run.stage.redeliver()
        run.settle()
    finally:
        run.stage.broker.stand_off(0.0)


def break_locks(run: Run) -> None:
    """Take the locks of all running guarded bodies, as operators do."""
    for body in run.watch.running():
        if body["kind"] != GUARDED:
            continue
        run.fault(BROKEN, [body["pid"]])
        lease = run.stage.site.locks.get(str(body["key"]))
        if lease is not None:
            run.stage.site.locks.break_(lease.name, owner=lease.owner)


def database_cut(run: Run) -> None:
    def cut(kind: str, number: int) -> dict[str, str]:
        # The statement that completes the work: without a transaction that is the INSERT itself.
        statement = "COMMIT" if kind == GUARDED else "INSERT"
        return {"began": f"{('answer lost', 'not sent')[number % 2]}: {statement}"}

    run.publish_all(at=cut)


def database_read_only(run: Run) -> None:
    long = run.publish_all(work=1.0)
    for begun in rounds(run, long):
        run.until_begun(begun)
        run.fault("database read-only")
        with run.stage.database_read_only():
            time.sleep(READ_ONLY)


# -- follow-ups --------------------------------------------------------------------------

BETWEEN = ("committed", "published", "publishing")
"""Points between COMMIT and the row that marks all as published; see ``workload``."""


def sender_killed(run: Run) -> None:
    def plan(kind: str, turn: int) -> dict[str, str]:
        return {BETWEEN[turn % len(BETWEEN)] if kind == GUARDED else "committed": "die"}

    run.publish_all(at=some(plan), hook=True)


def sender_over_limit(run: Run) -> None:
    # Its message is acknowledged and not delivered again: only the command publishes.
    run.publish_all(at=some(lambda kind, turn: {"committed": "block"}), hook=True, time_limit=LIMIT)


def broker_away(run: Run) -> None:
    without_broker(run, lambda turn: "wait")


def broker_away_and_sender_killed(run: Run) -> None:
    without_broker(run, lambda turn: ("wait", "wait, then die")[turn % 2])


def without_broker(run: Run, what: Callable[[int], str]) -> None:
    """Make bodies wait after their COMMIT until the broker is gone, and then continue."""
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
            continue_without_broker(run, bodies)
            if turn % 2:
                # Beat does so sooner or later; otherwise their messages would be redelivered first.
                run.publish_pending()
            run.stage.redeliver()
    finally:
        run.journal.open(EVERYBODY)


def continue_without_broker(run: Run, bodies: list[Event]) -> None:
    """Let them continue; bring the broker back once they have failed to publish."""
    run.fault("broker down")
    run.stage.broker.go_away(run.stage.workers)
    try:
        waiting = [body for body in bodies if body["kind"] == GUARDED and body["what"] == "wait"]
        # If a body had committed before the command ran, the command has published for it.
        senders = run.with_pending(body["key"] for body in waiting)
        for body in bodies:
            run.journal.open(gate(body["kind"], body["key"]))
        if not senders:
            return
        until_tried(run, len(senders))
        if run.publish_pending() == 0:
            raise OutOfTime("the command has published although the broker is away")
    finally:
        run.stage.broker.come_back()


def those_that_wait(run: Run, met: set[tuple[str, int]], count: int) -> list[Event]:
    """The waiting bodies, once there are ``count``; after a timeout, those there are.

    After deaths of its children, Celery's parent may end by itself when it connects again. It first
    finishes the bodies that it has fetched.
    """

    def found() -> list[Event]:
        return [
            event
            for event in run.watch.events("hit")
            if event["what"].startswith("wait") and (event["kind"], event["key"]) not in met
        ]

    with contextlib.suppress(OutOfTime):
        run.until(lambda: len(found()) >= count, f"{count} bodies have committed", patience=20)
    return found()


def until_tried(run: Run, senders: int) -> None:
    """Wait until these bodies have tried to publish and failed."""
    deadline = time.monotonic() + 30
    while (tried := run.attempts()) < senders and time.monotonic() < deadline:
        time.sleep(0.1)
    if not tried:
        raise OutOfTime("no body has tried to publish without a broker")


SCENARIOS = (
    Scenario(name="duplicates", title="simultaneous duplicates", play=duplicates),
    Scenario(name="late", title="late duplicates", play=late_duplicates),
    Scenario(
        name="redelivered-running",
        title="redelivery while running",
        play=redelivered_while_running,
        on_sqlite=False,
        short=True,
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
        is_variant=True,
    ),
    Scenario(
        name="child-before-commit",
        title="child SIGKILL before the commit",
        play=child_killed_before_commit,
        kinds=KINDS,
        pools=("prefork",),
        short=True,
    ),
    Scenario(
        name="child-after-commit",
        title="child SIGKILL after the commit, before the acknowledgement",
        play=child_killed_after_commit,
        pools=("prefork",),
        short=True,
    ),
    Scenario(
        name="worker-killed",
        title="whole worker SIGKILL",
        play=worker_killed,
        kinds=KINDS,
        short=True,
    ),
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
        short=True,
        overlaps="the store has lost the locks, and a holder learns this at its next renewal",
    ),
    Scenario(
        name="locks-paused",
        title="lock Redis paused past TTL",
        on_database="lock table locked past TTL",
        play=locks_paused,
        task="guarded",
        short=True,
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
        name="interrupted-publishes",
        title="locks broken and messages redelivered while bodies publish to a distant broker",
        play=interrupted_publishes,
        task="guarded",
        on_sqlite=False,
        overlaps="an operator has broken the locks, and a holder learns this at its next renewal",
    ),
    Scenario(
        name="database-cut",
        title="database connection cut at completion",
        play=database_cut,
        on_sqlite=False,
        publish_again=True,
        short=True,
    ),
    Scenario(
        name="database-read-only",
        title="database read-only, its sessions ended",
        play=database_read_only,
        on_sqlite=False,
        short=True,
    ),
    Scenario(
        name="sender-killed",
        title="child SIGKILL between the commit and its outbox messages",
        play=sender_killed,
        pools=("prefork",),
        short=True,
    ),
    Scenario(
        name="sender-over-limit",
        title="hard time limit between the commit and its outbox messages",
        play=sender_over_limit,
        pools=("prefork",),
        publish_again=True,
        is_variant=True,
    ),
    Scenario(
        name="broker-away",
        title="broker down between the commit and its outbox messages",
        play=broker_away,
    ),
    Scenario(
        name="broker-away-sender-killed",
        title="broker down and child SIGKILL between the commit and its outbox messages",
        play=broker_away_and_sender_killed,
        pools=("prefork",),
        is_variant=True,
    ),
    Scenario(
        name="client-gone",
        title="client goes away and repeats its request",
        play=clients_leave,
        # The workers have no part in it.
        pools=("prefork",),
        short=True,
        explained="the bodies are asynchronous views under uvicorn, guarded by `idempotent_view`; "
        "each client closes its socket while the thread of its view is at work",
    ),
)
