"""``python -m tests.faults.suite.soak``: random faults while tasks run.

A seed determines the faults. They are made while keys are processed. At the end, every key must
have had its effect once, and each of its follow-ups must have arrived. The same seed gives the same
faults at the same times; their targets depend on what is running then. The last line says how many
keys were doubled, lost or hung, and how many follow-ups were lost. The exit code is 0 only if the
checker found nothing.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from statistics import median

from testproject.servers import ServerNotFound
from tests.support.postgres import PostgresNotFound
from tests.support.workers import ROOT

from .__main__ import _empty, _interrupt
from .brokers import BROKERS
from .checker import FollowUps, Tally, check, follow_ups, overlapping
from .draws import Draw, faults
from .journal import Event
from .kinds import GUARDED
from .stage import Pool, Stage
from .stream import Stream
from .trouble import BROKEN, EMPTIED, Trouble

POOLS = {
    pool.name: pool for pool in (Pool("prefork", 2, 6), Pool("threads", 2, 6), Pool("solo", 4, 1))
}
CLAIM = 2.0
"""Seconds by which the lock of a body may be older than the body."""

PAUSE = 0.1
EVERY = 30.0
"""Seconds between two lines of progress."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: The command line is wrong; the message says how.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.faults.suite.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", default="", help="default: a new one, which is printed")
    parser.add_argument("--broker", choices=list(BROKERS), default="redis")
    parser.add_argument("--pool", choices=list(POOLS), default="prefork")
    parser.add_argument("--directory", type=Path, help="default: build/soak-SEED")
    parser.add_argument("--list", action="store_true", help="show the faults and make none")
    options = parser.parse_args(arguments)
    options.seed = options.seed or secrets.token_hex(4)
    # A separate directory for each: two runs would read each other's journals.
    options.directory = options.directory or ROOT / "build" / f"soak-{options.seed}"
    return options


def soak(options: argparse.Namespace) -> int:
    """Run; return the number of problems."""
    _empty(options.directory)
    print(
        f"{options.minutes:g} min of faults, {options.broker}, {options.pool}: SEED={options.seed}",
        flush=True,
    )
    broker, pool = BROKERS[options.broker](), POOLS[options.pool]
    with Stage(broker, pool, options.directory, postgres_needed=True) as stage:
        stream = Stream(stage, options.seed)
        # Before any fault, and by one thread.
        stage.web_server()
        made: Counter[str] = Counter()
        with stream.watched():
            trouble = Trouble(stream)
            try:
                _make_faults(stream, trouble, options, made)
            finally:
                trouble.end()
            _say(options.minutes * 60, "no more faults; waiting for running messages")
            stream.settle()
        events = stream.finish()
    print(f"\nSEED={options.seed}; journal and logs are in {options.directory}")
    return _report(events, made)


def _make_faults(
    stream: Stream, trouble: Trouble, options: argparse.Namespace, made: Counter[str]
) -> None:
    began = time.monotonic()
    told = 0.0
    coming = faults(options.seed, options.pool)
    draw = next(coming)
    while (now := time.monotonic() - began) < options.minutes * 60:
        stream.go_on()
        if now >= draw.at:
            made[draw.what] += 1
            _tell(now, draw, trouble.make(draw))
            draw = next(coming)
        for log in stream.stage.replace_ended_workers():
            _say(now, f"a worker ended by itself, and was replaced; see {log}")
        if now - told > EVERY:
            told = now
            _say(now, f"{len(stream.keys)} keys published, {stream.under_way} messages under way")
        time.sleep(PAUSE)


def _tell(now: float, draw: Draw, met: str) -> None:
    _say(now, f"{draw.what}: {met}")


def _say(seconds: float, what: str) -> None:
    print(f"{seconds:7.1f} s  {what}", flush=True)


def _report(events: Collection[Event], made: Counter[str]) -> int:
    tally, sent = check(events)[GUARDED], follow_ups(events)
    problems = judge(tally, events)
    print(f"{sum(made.values())} faults:")
    for what, count in made.most_common():
        print(f"  {count:5} {what}")
    print(
        f"{tally.keys} keys, {tally.bodies} bodies, {tally.hit} keys met by faults, "
        f"{tally.failed} messages failed and were answered by new ones"
    )
    taken = [seconds for seconds in tally.takeovers if seconds != float("inf")]
    if taken:
        print(
            f"{len(taken)} bodies died and were taken over, after {median(taken):.1f} s in the "
            f"median and {max(taken):.1f} s at the most"
        )
    vanished = sum(event["event"] == "vanished" for event in events)
    if vanished:
        print(f"{vanished} messages got lost between the queue and a worker, and were sent again")
    print(
        f"{sent.expected} follow-ups, {sent.repeated} of them delivered again under the same id, "
        f"{sent.by_command} published by the command"
    )
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print(summary(tally, sent, events) + (": FAILED" if problems else ": clean"))
    return len(problems)


def summary(tally: Tally, sent: FollowUps, events: Collection[Event]) -> str:
    """The four numbers, which must be 0."""
    doubled = tally.doubles + sent.doubled
    hung = tally.endless + sum(event["event"] == "stuck" for event in events)
    lost = max(sent.lost, sent.pending)
    return f"{doubled} doubled, {tally.lost} lost, {hung} hung, {lost} follow-ups lost"


def judge(tally: Tally, events: Collection[Event]) -> list[str]:
    """The problems found."""
    wrong = {
        "double effects": tally.doubles,
        "lost keys": tally.lost,
        "effects of unknown keys": tally.unknown,
        "stale writes": tally.stale_writes,
        "bodies without an end": tally.endless,
        "overlaps of bodies that nobody took the lock from": _unexplained(events),
        **follow_ups(events).problems,
    }
    problems = [f"{count} {what}" for what, count in wrong.items() if count]
    if not tally.keys:
        problems.append("nothing was published")
    return problems + [f"stuck: {event['what']}" for event in events if event["event"] == "stuck"]


def _unexplained(events: Collection[Event]) -> int:
    """Overlaps in which the first body did not lose its lock to a fault of the lock's store.

    After such a fault, a body learns of the loss at its next renewal, and another one may begin
    before.
    """
    forgot = [event for event in events if event["event"] == "fault"]
    count = 0
    for one, other in overlapping(GUARDED, events):
        count += not any(
            one.start - CLAIM <= event["at"] <= other.start
            and (event["what"] in EMPTIED or (event["what"] == BROKEN and event["key"] == one.key))
            for event in forgot
        )
    return count


def main(arguments: list[str] | None = None) -> int:
    """Run and report; the exit code says whether all went well."""
    options = parse(arguments)
    if options.list:
        for draw in faults(options.seed, options.pool):
            if draw.at > options.minutes * 60:
                return 0
            _tell(draw.at, draw, f"aims at {draw.aim:.3f}, for {draw.lasts:.1f} s")
    # However this process is ended, it also ends what it started.
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), _interrupt)
    try:
        problems = soak(options)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    except (ServerNotFound, PostgresNotFound) as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
