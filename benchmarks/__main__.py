"""``python -m benchmarks``: measure, print, store; ``python -m benchmarks compare`` compares."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from testproject.servers import ServerNotFound

from . import compare, store
from .beds import BEDS
from .bench import Bench
from .budgets import judge
from .model import Result, Row
from .progress import Progress
from .report import render
from .rows import all_rows
from .runner import QUICK_ROUNDS, run_row
from .stolen import Stolen


def main(argv: Sequence[str] | None = None) -> int:
    options = _options().parse_args(argv)
    if options.command == "compare":
        return _compare(options)
    return _run(options)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure django-dlock beside its floors and its peers. "
        "Exit code 1 if a budget does not hold.",
    )
    parser.set_defaults(command="run")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows or families")
    beds = ", ".join(BEDS)
    parser.add_argument("--beds", nargs="+", metavar="BED", help=f"only rows on these: {beds}")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds of every row")
    parser.add_argument("--quick", action="store_true", help="rough numbers in a few minutes")
    parser.add_argument("--no-postgres", action="store_true", help="leave out its rows and peer")
    parser.add_argument("--cycles", type=int, default=0, metavar="N", help="cycles of db.bloat")
    parser.add_argument("--output", type=Path, default=store.DIRECTORY, metavar="DIRECTORY")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    commands = parser.add_subparsers()
    comparing = commands.add_parser("compare", help="compare two results")
    comparing.set_defaults(command="compare")
    comparing.add_argument("files", nargs="*", type=Path, help="default: the two latest")
    return parser


def _compare(options: argparse.Namespace) -> int:
    files = options.files
    if len(files) not in (0, 2):
        print("compare takes two files, or none for the two latest", file=sys.stderr)
        return 2
    try:
        first, second = (store.read(path) for path in files or store.latest(2))
    except (OSError, ValueError, KeyError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    print(compare.render(first, second))
    return 0


def _run(options: argparse.Namespace) -> int:
    # With an exception, so that the servers are stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Bench(
            quick=options.quick, postgres=not options.no_postgres, cycles=options.cycles
        ) as bench:
            return _run_on(bench, options)
    except ServerNotFound as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run_on(bench: Bench, options: argparse.Namespace) -> int:
    rows = [row for row in all_rows(bench) if _chosen(row, options.rows, options.beds)]
    if not rows or options.list:
        print("\n".join(f"{row.name}: {row.title}" for row in all_rows(bench)))
        return 0 if options.list else 2
    planned = {row.name: (row, _rounds(row, options)) for row in rows}
    progress = Progress(planned, quick=options.quick)
    about = store.environment(bench.redis.url, bench.postgres_url)
    result, stolen = Result(store.now(), options.quick, about), Stolen()
    for row, rounds in planned.values():
        bench.clear()
        seconds = math.inf if options.rounds else row.seconds
        with bench.bed(row.bed):
            result.rows[row.name] = run_row(row, rounds, progress, seconds=seconds)
        about |= {"stolen": stolen.share(), "stores": dict(bench.stores.versions)}
        # Store intermediate results, so that an interrupted run is not lost.
        path = store.write(result, options.output)
    progress.done()
    verdicts = judge(result.rows.values())
    print(render(result, verdicts))
    print(f"\n{path}")
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _chosen(row: Row, names: Sequence[str] | None, beds: Sequence[str] | None) -> bool:
    """Whether both its name and its bed were chosen, or belong to a chosen one."""
    return all(
        not wanted or any(is_ == one or is_.startswith((f"{one}.", f"{one}-")) for one in wanted)
        for is_, wanted in ((row.name, names), (row.bed, beds))
    )


def _rounds(row: Row, options: argparse.Namespace) -> int:
    if options.rounds:
        return int(options.rounds)
    return min(row.rounds, QUICK_ROUNDS) if options.quick else row.rounds


if __name__ == "__main__":
    sys.exit(main())
