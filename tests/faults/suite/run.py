"""One scenario on one stage: publish, make faults, wait for the end, record the final state."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery.states import FAILURE, READY_STATES, REVOKED

from tests.support.workers import ROOT

from .journal import Event, Journal
from .kinds import EARLY, FOLLOWER, FOLLOWERS, GUARDED, KINDS, RECORDED_FOLLOWER
from .stage import LONGEST_DELAY, Stage
from .watch import Watch

PAUSE = 0.1
LONGEST_TRIES = 5
QUIET = LONGEST_DELAY + 2.0
"""Seconds without events after which unacknowledged messages are delivered again."""
LOST = 2 * QUIET
"""Seconds without events after which a missing follow-up counts as lost."""

COMMAND_TIMEOUT = 60.0


class OutOfTime(Exception):
    """Something did not happen in time; the message says what."""


class Run:
    """What the scenarios use.

    Args:
        name: Of the journal's file.
        keys: How many keys of each kind.
        busy: Seconds for which all slots shall be busy with long bodies.
        kinds: The tasks that are compared.
        task: The guarded one.
        publish_again: Whether a key is published again after a final failure, as a business would
            do.
        patience: Seconds until everything must have finished.

    Attributes:
        patient: Seconds for which ``until`` waits.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        *,
        keys: int,
        busy: float,
        kinds: Sequence[str] = KINDS,
        task: str = "guarded_long",
        publish_again: bool = False,
        patience: float = 120.0,
    ) -> None:
        self.stage, self.name, self.busy, self.kinds, self.task = stage, name, busy, kinds, task
        self.publish_again, self.patience = publish_again, patience
        self.keys = [next(stage.keys) for _ in range(keys)]
        path = stage.directory / f"{name}.jsonl"
        if path.exists():
            # The rest of an earlier try may still write to the earlier file.
            path = stage.directory / f"{name}-{uuid.uuid4().hex[:6]}.jsonl"
        self.journal = Journal(path)
        self.watch = Watch(Journal(path), stage.site.locks)
        self._sent: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {}
        self._open: set[str] = set()
        self._last_seen: object = None
        self._heard = time.monotonic()
        self._tries: dict[tuple[str, int], int] = {}
        self._first_follow_up = self._last_follow_up()
        self._unfollowed_since = math.inf
        self._producer: Any = None

    @contextmanager
    def watched(self) -> Iterator[Run]:
        """The context in which everything happens."""
        self.stage.broker.calibrate()
        with self.watch, self.stage.site.app.producer_pool.acquire(block=True) as producer:
            self._producer = producer
            yield self

    # -- publishing --------------------------------------------------------------------

    def publish_all(
        self,
        *,
        work: float = 0.0,
        at: Callable[[str, int], dict[str, str]] | None = None,
        copies: int = 1,
        again: float = 0.02,
        hook: bool = False,
        **options: Any,
    ) -> int:
        """Publish every key of every kind.

        Args:
            work: Seconds that the first body of a key takes. Only so many keys are long that all
                slots are busy for the requested time; the others are short.
            at: Given kind and number of the key, what shall happen at which point of its body.
            copies: Messages per key.
            again: Seconds that all other bodies take.
            hook: Whether guarded bodies also send something with ``on_commit()``.

        Returns:
            How many first bodies are long.
        """
        bodies = len(self.keys) * len(self.kinds)
        long = bodies if not work else min(bodies, self._busy_bodies(work))
        body = itertools.count()
        for number, key in enumerate(self.keys):
            for kind in self.kinds:
                # Spread evenly, because a worker fetches many messages at once.
                at_hand = next(body)
                is_long = at_hand * long // bodies < (at_hand + 1) * long // bodies
                plan = {
                    "journal": str(self.journal.path),
                    "work": work if is_long else again,
                    "again": again,
                    "at": at(kind, number) if at else {},
                    "hook": hook,
                }
                for _ in range(copies):
                    self.publish(kind, key, plan, **options)
        return long

    def publish(self, kind: str, key: int, plan: dict[str, Any], **options: Any) -> str:
        """Publish one message; return its id."""
        delivery = str(uuid.uuid4())
        plan = {"hook": False, **plan, "queue": self.stage.queue}
        self._sent[delivery] = (kind, key, plan, options)
        self._open.add(delivery)
        facts = {"kind": kind, "key": key, "delivery": delivery}
        if kind == GUARDED:
            facts |= {"follow_ups": len(FOLLOWERS), "hook": plan["hook"]}
        self.journal.write("sent", **facts)
        task = self.task if kind == GUARDED else kind
        self.stage.site.send(
            task,
            kind,
            key,
            plan,
            task_id=delivery,
            queue=self.stage.queue,
            producer=self._producer,
            **options,
        )
        return delivery

    def _busy_bodies(self, work: float) -> int:
        slots = self.stage.pool.all_slots
        return max(2 * slots, 32, int(slots * self.busy / work))

    # -- faults -----------------------------------------------------------------------

    def fault(self, what: str, pids: Sequence[int] = ()) -> None:
        """Note a fault; call this just before making it.

        Args:
            pids: The affected processes; all if empty.
        """
        self.journal.write("fault", what=what, pids=list(pids))

    def killed(self, pids: Sequence[int]) -> None:
        """Note deaths just caused; on a busy machine the watch sees them late."""
        for pid in pids:
            self.journal.write("death", pid=pid)

    def pids(self, session: int) -> list[int]:
        """The processes of a worker's running bodies."""
        found = []
        for body in self.watch.running():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(body["pid"]) == session:
                    found.append(int(body["pid"]))
        return found

    def until(self, ask: Callable[[], Any], why: str, patience: float = 30.0) -> Any:
        """Wait until ``ask`` returns something true, and return that.

        Raises:
            OutOfTime: It did not within that time.
        """
        deadline = time.monotonic() + patience
        while not (answer := ask()):
            self._replace_ended_workers()
            self._redeliver_when_quiet(self.watch.count())
            if time.monotonic() > deadline:
                raise OutOfTime(f"not within {patience:g} s: {why}")
            time.sleep(PAUSE / 5)
        return answer

    def long(self, event: str) -> int:
        """How often this event happened to a long body."""
        return sum(each["long"] for each in self.watch.events(event))

    def until_begun(self, count: int) -> None:
        """Wait until ``count`` long bodies have begun."""
        self.until(lambda: self.long("begin") >= count, f"{count} long bodies have begun")

    def until_hit(self, count: int) -> None:
        """Wait until so many long bodies have met their own fault."""
        self.until(lambda: self.long("hit") >= count, f"{count} faults in long bodies")

    def _redeliver_when_quiet(self, now: object) -> None:
        """Deliver unacknowledged messages again if nothing else happens.

        The broker would do so later: after a cut, messages that a worker had fetched stay behind.
        """
        if now != self._last_seen or self.watch.running():
            self._last_seen, self._heard = now, time.monotonic()
        elif time.monotonic() - self._heard > QUIET:
            self.stage.redeliver()
            self._replace_lost()
            self._heard = time.monotonic()

    def _replace_lost(self) -> None:
        """Publish again what was lost between the queue and the workers.

        Only as many as the broker itself misses, so that a message that a worker once had is never
        mistaken for one of these.
        """
        broker = self.stage.broker
        gone = [delivery for delivery in self._open if self._sent[delivery][0] == GUARDED]
        unfollowed = self._unfollowed()
        count = len(gone) + len(unfollowed)
        if not count or broker.waiting(self.stage.queue) or count > broker.missing():
            return
        for delivery in gone:
            kind, key, plan, options = self._sent[delivery]
            self.journal.write("vanished", kind=kind, key=key, delivery=delivery)
            self._open.remove(delivery)
            self.publish(kind, key, plan, **options)
        for delivery, message in unfollowed.items():
            signature = json.loads(message)
            name, queue = signature["task"].rpartition(".")[2], signature["options"]["queue"]
            self.journal.write("vanished", delivery=delivery)
            self.stage.site.send(name, *signature["args"], task_id=delivery, queue=queue)
        broker.calibrate()

    def _replace_ended_workers(self) -> None:
        for log in self.stage.replace_ended_workers():
            self.journal.write("restarted", log=log)

    # -- waiting for the end ----------------------------------------------------------------------

    def settle(self) -> bool:
        """Wait until every message has finished; return whether it has."""
        deadline = time.monotonic() + self.patience
        before: object = None
        quiet = 0
        while quiet < 2:
            self._replace_ended_workers()
            now = (self._collect(), self.watch.count())
            if now != before:
                before, quiet = now, 0
            if self._settled():
                quiet += 1
            elif time.monotonic() > deadline:
                self._give_up()
                return False
            else:
                self._redeliver_when_quiet(now)
            time.sleep(PAUSE)
        return True

    def _settled(self) -> bool:
        return (
            not any(self._sent[delivery][0] == GUARDED for delivery in self._open)
            and not self.watch.running()
            and not self.watch.pending()
            and self.stage.broker.waiting(self.stage.queue) == 0
            and self._followed()
        )

    # -- follow-ups --------------------------------------------------------------------

    def publish_pending(self) -> int:
        """Run ``publish_pending_followups`` as Beat or cron would; return its exit code."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "django", "publish_pending_followups"),
                *("--older-than", "0", "--format", "json"),
            ],
            cwd=ROOT,
            env=self.stage.site.env,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)
        found = json.loads(done.stdout) if done.returncode == 0 else {"said": done.stderr[-500:]}
        self.journal.write("command", code=done.returncode, **found)
        return done.returncode

    def attempts(self) -> int:
        """How many pending follow-ups somebody has tried to publish."""
        return int(
            self.stage.site.query(
                "SELECT count(*) FROM django_dlock_followup "
                "WHERE published_at IS NULL AND error <> '' AND id > ?",
                self._first_follow_up,
            )[0][0]
        )

    def with_pending(self, keys: Iterable[int]) -> set[int]:
        """Which of these keys have a run that has recorded a follow-up that is unpublished."""
        rows = self.stage.site.query(
            "SELECT DISTINCT r.key FROM django_dlock_followup f "
            "JOIN django_dlock_idempotencyrecord r ON r.id = f.record_id "
            "WHERE f.published_at IS NULL AND f.id > ?",
            self._first_follow_up,
        )
        return {int(key) for (key,) in rows} & set(keys)

    def _followed(self) -> bool:
        """Whether every follow-up was received or counts as lost, and nothing else is running.

        The command publishes follow-ups that no task will publish any more.
        """
        if self._pending():
            self.publish_pending()
            return False
        if not self._unfollowed():
            self._unfollowed_since = math.inf
            return True
        self._unfollowed_since = min(self._unfollowed_since, time.monotonic())
        return time.monotonic() - self._unfollowed_since > LOST

    def _pending(self) -> int:
        """How many follow-ups of this run are unpublished."""
        return int(
            self.stage.site.query(
                "SELECT count(*) FROM django_dlock_followup WHERE published_at IS NULL AND id > ?",
                self._first_follow_up,
            )[0][0]
        )

    def _unfollowed(self) -> dict[str, str]:
        """The published messages that have not finished, by their ids."""
        rows = self.stage.site.query(
            "SELECT task_id, message FROM django_dlock_followup "
            "WHERE published_at IS NOT NULL AND id > ?",
            self._first_follow_up,
        )
        followed = {
            event["delivery"] for event in self.watch.events("followed") if event["by"] == FOLLOWER
        }
        # A follower may have written its event and then been requeued.
        ran = self.stage.site.query(
            "SELECT delivery FROM shop_effect WHERE by = ? AND order_number BETWEEN ? AND ?",
            RECORDED_FOLLOWER,
            self.keys[0],
            self.keys[-1],
        )
        followed |= {delivery for (delivery,) in ran}
        return {task_id: message for task_id, message in rows if task_id not in followed}

    def _last_follow_up(self) -> int:
        rows = self.stage.site.query("SELECT coalesce(max(id), 0) FROM django_dlock_followup")
        return int(rows[0][0])

    def _collect(self) -> int:
        """Note which messages have finished, and react to failures; return how many are left."""
        backend = self.stage.site.app.backend
        waited = list(self._open)
        keys = [backend.get_key_for_task(delivery) for delivery in waited]
        for delivery, found in zip(waited, backend.mget(keys) if keys else [], strict=True):
            state = json.loads(found)["status"] if found else ""
            if state not in READY_STATES:
                continue
            kind, key, plan, options = self._sent[delivery]
            self._open.remove(delivery)
            self.journal.write("final", kind=kind, key=key, delivery=delivery, state=state)
            if state in (FAILURE, REVOKED) and self.publish_again:
                self._answer(kind, key, plan, options)
        return len(self._open)

    def _answer(self, kind: str, key: int, plan: dict[str, Any], options: dict[str, Any]) -> None:
        tries = self._tries[kind, key] = self._tries.get((kind, key), 0) + 1
        if tries < LONGEST_TRIES:
            self.publish(kind, key, plan, **options)

    def _give_up(self) -> None:
        lost = [delivery for delivery in self._open if self._sent[delivery][0] != EARLY]
        self.journal.write(
            "stuck",
            what=f"after {self.patience:g} s {len(lost)} messages have no result, "
            f"{len(self.watch.running())} bodies run, and the broker has "
            f"{self.stage.broker.waiting(self.stage.queue)} messages",
            deliveries=lost[:20],
        )

    def finish(self) -> list[Event]:
        """Add the rows of the database to the journal; return all events."""
        rows = self.stage.site.query(
            "SELECT id, by, order_number, token, delivery FROM shop_effect "
            "WHERE order_number BETWEEN ? AND ? ORDER BY id",
            self.keys[0],
            self.keys[-1],
        )
        for _, kind, key, token, run in rows:
            self.journal.write("effect", kind=kind, key=key, token=token, run=run)
        if pending := self._pending():
            self.journal.write("pending", count=pending)
        return Journal(self.journal.path).new()
