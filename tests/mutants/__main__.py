"""Breaks one mechanism after another and checks that the tests notice.

    python -m tests.mutants [--list] [--all] [--since COMMIT] [--jobs N] [G1 … | NAME …]

A mutant, such as ``g05/own_grant_unknown.mutant``, names a guarantee, a text of the package and
what replaces it, and the tests that must then fail. They run in a changed copy of the working
tree; the tree itself stays unchanged. If you name none, 120 are chosen at random, always the same
ones for one commit. The exit code is 0 only if a test failed, or hung, with every mutant that ran.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.mutants.from_diff import from_diff
from tests.mutants.mutant import BrokenMutant, Mutant, all_mutants
from tests.mutants.node_ids import Suite
from tests.mutants.places import Package
from tests.mutants.runner import GOOD, Result, run_all
from tests.mutants.selection import MOST, changed_since, drawn, is_checkout, near, seed_of

ROOT = Path(__file__).resolve().parents[2]
INDENT = " " * 7


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.from_diff:
        sections = from_diff(ROOT)
        print(f"Guarantee: G…\nBreaks: …\nTest: …\n\n{sections}", end="")
        return 0
    mutants = list(all_mutants())
    for word in options.wanted:
        if not any(mutant.answers_to(word) for mutant in mutants):
            parser.error(f"no mutant of {word}")
    if options.wanted:
        mutants = [each for each in mutants if any(map(each.answers_to, options.wanted))]
    left_out: dict[str, list[str]] = {}
    if options.since:
        if not is_checkout(ROOT):
            parser.error("--since needs a git checkout")
        try:
            changed = changed_since(ROOT, options.since)
        except subprocess.CalledProcessError as error:
            parser.error(error.stderr.strip())
        nearby = near(mutants, changed, Package.read(ROOT), Suite(ROOT))
        left_out[f"unchanged since {options.since}"] = _names(mutants, besides=_names(nearby))
        mutants = nearby
    if not options.wanted and not options.all:
        seed = seed_of(ROOT)
        names = drawn(_names(mutants), seed)
        left_out[f"not chosen for {seed}"] = _names(mutants, besides=names)
        mutants = [mutant for mutant in mutants if mutant.name in names]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.guarantee:<5}  {mutant.name}: {mutant.breaks}")
            print(*(f"         {test}" for test in mutant.tests), sep="\n")
        results = []
    else:
        results = run_all(mutants, ROOT, options.jobs) if mutants else []
        show(results)
    show_left_out(left_out)
    # By name at the very end, where a reader of a long log looks.
    unnoticed = [result for result in results if result.verdict not in GOOD]
    for result in unnoticed:
        print(f"not noticed: {result.mutant.name} ({result.verdict})")
    return 1 if unnoticed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "wanted",
        nargs="*",
        metavar="G1|NAME",
        help=f"only those of a guarantee, or with this in their name (default: {MOST} of all)",
    )
    parser.add_argument("--all", action="store_true", help="run all of them")
    parser.add_argument(
        "--since",
        metavar="COMMIT",
        help="only those whose code, test or .mutant file has changed since then",
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    parser.add_argument(
        "--from-diff",
        action="store_true",
        help="print what you have changed since the last commit as a mutant, and run none",
    )
    return parser


def _names(mutants: Sequence[Mutant], besides: Collection[str] = ()) -> list[str]:
    return [mutant.name for mutant in mutants if mutant.name not in besides]


def show(results: Sequence[Result]) -> None:
    print("\nguarantee  taken out                                                       went")
    print("---------  --------------------------------------------------------------  ------")
    for result in results:
        print(f"{result.mutant.guarantee:<9}  {result.mutant.breaks:<62}  {result.verdict}")
    red = sum(result.verdict in GOOD for result in results)
    print(f"\n{red} of {len(results)} mutants went red")


def show_left_out(left_out: Mapping[str, Sequence[str]]) -> None:
    """Which mutants did not run, and why."""
    for reason, names in left_out.items():
        if names:
            print(f"\n{len(names)} mutants did not run: {reason}")
        for folder, group in groupby(names, key=lambda name: name.rpartition("/")[0]):
            listed = ", ".join(name.rpartition("/")[2] for name in group)
            print(
                textwrap.fill(listed, 100, initial_indent=f"{folder:<7}", subsequent_indent=INDENT)
            )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenMutant as broken:
        sys.exit(str(broken))
