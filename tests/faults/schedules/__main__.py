"""``python -m tests.faults.schedules``: schedules of faults against one store, or all of them.

The last line of each store says how many violations of each kind the checker found. The exit code
is 0 only if there is none.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
from pathlib import Path

from testproject.servers import ServerNotFound
from tests.support.mariadb import MariadbNotFound
from tests.support.workers import ROOT

from ..suite.__main__ import _interrupt
from ..suite.journal import Journal
from . import beds_others, beds_redis
from .bed import Bed, weights
from .checker import summary
from .draws import faults
from .drive import HISTORY, Crew, Drive
from .report import Outcome, outcome_of, table

BEDS: dict[str, type[Bed]] = {
    bed.store: bed
    for bed in (
        beds_redis.RedisBed,
        beds_redis.SentinelBed,
        beds_redis.ClusterBed,
        beds_redis.RedlockBed,
        beds_others.PostgresBed,
        beds_others.MariadbBed,
        beds_others.SqliteBed,
        beds_others.ZooKeeperBed,
        beds_others.EtcdBed,
        beds_others.FailoverBed,
    )
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: The command line is wrong; the message says how.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.faults.schedules", description=__doc__)
    parser.add_argument("--store", choices=["all", *BEDS], default="all")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each store")
    parser.add_argument("--seed", default="", help="default: a new one, which is printed")
    parser.add_argument("--table", type=Path, help="write a table for each store into this page")
    parser.add_argument("--directory", type=Path, help="default: build/schedules-SEED")
    parser.add_argument("--judge", action="store_true", help="judge the histories of a run again")
    options = parser.parse_args(arguments)
    options.seed = options.seed or secrets.token_hex(4)
    options.directory = options.directory or ROOT / "build" / f"schedules-{options.seed}"
    return options


def run(store: str, options: argparse.Namespace) -> Outcome:
    """Draw schedules for one store, and judge them; print what happens."""
    directory = options.directory / store
    if not options.judge:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        print(f"== {store}: {options.minutes:g} minutes, SEED={options.seed}", flush=True)
        with BEDS[store](directory) as bed:
            drive = Drive(bed, options.seed, tell=lambda line: print(line, flush=True))
            draws = faults(options.seed, weights(drive.faults), drive.recovery + 1.0)
            drive.run(draws, options.minutes * 60)
    outcome = outcome_of(Journal(directory / HISTORY).new())
    for one in outcome.violations:
        print(f"VIOLATION {one.kind} at {one.at:.3f} after {one.fault!r}: {one.text}")
    made, grants = sum(row.times for row in outcome.rows), sum(row.grants for row in outcome.rows)
    print(f"{store}: {made} faults, {grants} grants: {summary(outcome.violations)}", flush=True)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Run and report; the exit code says whether all went well."""
    options = parse(arguments)
    # However this process is ended, it also ends what it started.
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), _interrupt)
    try:
        stores = list(BEDS) if options.store == "all" else [options.store]
        outcomes = [run(store, options) for store in stores]
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    except (ServerNotFound, MariadbNotFound) as error:
        print(error, file=sys.stderr)
        return 1
    crew = Crew()
    told = (
        f"{crew.clients} processes with {crew.threads} threads and {crew.coroutines} coroutines "
        f"each, for {crew.names} names"
    )
    if options.table:
        options.table.write_text(table(outcomes, told))
    print(f"SEED={options.seed}; histories and logs are in {options.directory}")
    return 1 if any(one.violations for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
