"""``python -m tests.faults.suite``: all scenarios on real workers and servers.

Writes journals, workers' logs and ``results.json`` into a directory, and the tables of the
documentation. The exit code is 0 only if no guarded task was doubled or lost anywhere, and other
tasks were.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

import django

from testproject.servers import ServerNotFound
from tests.support.postgres import PostgresNotFound
from tests.support.workers import DATABASE, ROOT

from .brokers import BROKERS
from .journal import Journal
from .locks import BACKENDS
from .outcome import Outcome, outcome, play
from .report import overview, table, versions
from .scenarios import SCENARIOS, Scenario
from .stage import POOLS, Stage


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: The command line is wrong; the message says how.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.faults.suite", description=__doc__)
    parser.add_argument("--brokers", nargs="+", choices=list(BROKERS), default=list(BROKERS))
    parser.add_argument("--pools", nargs="+", choices=list(POOLS), default=list(POOLS))
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="redis",
        help="where locks are kept; database: PostgreSQL",
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names)
    parser.add_argument("--keys", type=int, default=200, help="keys of each kind in each scenario")
    parser.add_argument(
        "--busy", type=float, default=8.0, help="seconds for which long bodies keep workers busy"
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "faults")
    parser.add_argument("--table", type=Path, help="write a table for each broker and pool here")
    parser.add_argument("--overview", type=Path, help="write a row for each fault here")
    parser.add_argument(
        "--again", action="store_true", help="run nothing; only judge the journals in --directory"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> list[Outcome]:
    """Run the chosen scenarios and report each one when it is over."""
    outcomes = []
    for broker in options.brokers:
        for pool in options.pools:
            chosen = [
                scenario
                for scenario in SCENARIOS
                if scenario.name in options.scenarios and pool in scenario.pools
            ]
            directory = options.directory / f"{broker}-{pool}"
            if options.again:
                outcomes += _read(broker, pool, chosen, directory)
            else:
                outcomes += _stage(broker, pool, chosen, directory, options)
    return outcomes


def _read(broker: str, pool: str, scenarios: list[Scenario], directory: Path) -> list[Outcome]:
    outcomes = []
    for scenario in scenarios:
        tries = [
            *directory.glob(f"{scenario.name}.jsonl"),
            *directory.glob(f"{scenario.name}-??????.jsonl"),
        ]
        if tries:
            events = Journal(max(tries, key=lambda path: path.stat().st_mtime)).new()
            outcomes.append(outcome(scenario, broker, pool, events))
            print(_line(outcomes[-1]), flush=True)
    return outcomes


def _stage(
    broker: str,
    pool: str,
    scenarios: list[Scenario],
    directory: Path,
    options: argparse.Namespace,
) -> list[Outcome]:
    _empty(directory)
    print(f"{broker}, {pool}: starting", flush=True)
    outcomes = []
    with Stage(
        BROKERS[broker](), POOLS[pool], directory, postgres_needed=True, backend=options.backend
    ) as stage:
        options.versions = versions(stage) | getattr(options, "versions", {})
        for scenario in scenarios:
            outcomes.append(play(stage, scenario, keys=options.keys, busy=options.busy))
            print(_line(outcomes[-1]), flush=True)
    return outcomes


def _empty(directory: Path) -> None:
    """Create an empty directory for the results; delete those of an earlier run."""
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.iterdir():
        if left.is_file():
            left.unlink()


def _line(of: Outcome) -> str:
    kinds = ", ".join(
        f"{kind} {tally.doubles} doubled {tally.lost} lost" for kind, tally in of.tallies.items()
    )
    mark = "FAILED" if of.problems else "ok"
    found = of.follow_ups
    sent = f"follow-ups {found.doubled} doubled {found.lost} lost {found.repeated} repeated"
    if found.by_command:
        sent += f", {found.by_command} published by the command"
    kinds += f"; {found.expected} {sent}"
    if found.hook_lost is not None:
        kinds += f"; by on_commit() {found.hook_lost} lost"
    head = f"  {mark:6} {of.scenario:22} {of.seconds:5.1f} s  {kinds}"
    return "\n".join([head, *(f"         {problem}" for problem in of.problems)])


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Run and report; the exit code says whether all went well."""
    options = parse(arguments)
    if options.backend == DATABASE:
        # The driver reads the holders of locks with the same backend as the workers.
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
        django.setup()
    if not options.again:
        # However this process is ended, it also ends what it started.
        for name in ("SIGTERM", "SIGHUP"):
            signal.signal(getattr(signal, name), _interrupt)
    began = time.monotonic()
    try:
        outcomes = run(options)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    except (ServerNotFound, PostgresNotFound) as error:
        print(error, file=sys.stderr)
        return 1
    results = options.directory / "results.json"
    if options.again:
        known = json.loads(results.read_text())
        options.keys, options.versions, seconds = known["keys"], known["versions"], known["seconds"]
        options.backend = known.get("backend", "redis")
    else:
        seconds = time.monotonic() - began
    facts = {
        "backend": options.backend,
        "versions": options.versions,
        "keys": options.keys,
        "seconds": seconds,
        "outcomes": [asdict(each) for each in outcomes],
    }
    results.write_text(json.dumps(facts, indent=1))
    facts = {"keys": options.keys, "versions": options.versions, "backend": options.backend}
    if options.table:
        options.table.write_text(table(outcomes, **facts))
    if options.overview:
        options.overview.write_text(overview(outcomes, **facts))
    failed = [each for each in outcomes if each.problems]
    print(f"{len(outcomes)} scenarios in {seconds / 60:.0f} min, {len(failed)} failed")
    print(f"Journals, logs and results are in {options.directory}")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
