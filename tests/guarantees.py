"""``python -m tests.guarantees``: which tests each guarantee has, for the documentation.

Reads the names of the tests (``test_g5_…``) and writes ``contributing/guarantees.md``; a test
compares the page with the tests.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "contributing" / "guarantees.md"

PARTS = {
    "contract": "django_dlock/testing/",
    "unit": "tests/unit/",
    "backends": "tests/backends/",
    "integration": "tests/integration/",
    "faults": "tests/faults/",
}
"""Column of the table → the folder of its tests."""
NAMES = {
    "G1": "Lease",
    "G2": "Told",
    "G3": "Fenced",
    "G4": "Recovers",
    "G5": "Idempotent commands",
    "G6": "Bounded watchdog",
    "G7": "Interrupt-safe",
    "G8": "Fork-safe",
    "G9": "Clock-safe",
    "G10": "Bounded calls",
    "G11": "Replication",
    "G12": "Effectively once",
    "G13": "Never lost by the guard",
    "G14": "Same key, other payload",
    "G15": "Commit before release",
}


def counted() -> dict[str, Counter[str]]:
    """Guarantee → file, relative to the project → tests that have its number in their name."""
    found: dict[str, Counter[str]] = {guarantee: Counter() for guarantee in NAMES}
    contract = (ROOT / "django_dlock" / "testing").glob("contract*.py")
    for file in [*contract, *(ROOT / "tests").rglob("test_*.py")]:
        for name in re.findall(r"def test_((?:g\d+_)+)", file.read_text()):
            for number in re.findall(r"g(\d+)_", name):
                found[f"G{number}"][str(file.relative_to(ROOT))] += 1
    return found


def page() -> str:
    """What the page says."""
    found = counted()

    def cell(guarantee: str, folder: str) -> str:
        return str(
            sum(count for file, count in found[guarantee].items() if file.startswith(folder)) or "–"
        )

    columns = "".join(f" {part} |" for part in PARTS)
    table = [f"| |{columns}", f"| --- |{' ---: |' * len(PARTS)}"]
    table += [
        f"| {guarantee} {name} | {' | '.join(cell(guarantee, part) for part in PARTS.values())} |"
        for guarantee, name in NAMES.items()
    ]
    files = [
        f"**{guarantee}**: {', '.join(f'`{file}`' for file in sorted(found[guarantee]))}\n"
        for guarantee in NAMES
    ]
    return "\n".join(
        [
            "# The tests of each guarantee",
            "",
            "`.venv/bin/python -m tests.guarantees` writes this page.",
            "Each cell counts the tests, in one folder, with this guarantee in their names;",
            "[Guarantees](../docs/reference/guarantees.md) says what it promises.",
            "A test of the contract runs on each store that has the capability which it needs.",
            "",
            *table,
            "",
            "These are the files:",
            "",
            *files,
        ]
    )


def main() -> None:
    PAGE.write_text(page())
    print(f"Written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
