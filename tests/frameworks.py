"""``python -m tests.frameworks``: what works where, for the documentation.

Writes the end of ``docs/reference/frameworks.md`` from the places that ``test_frameworks.py``
tries; a test compares the page with them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import django

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "frameworks.md"
HEADING = "## What works where\n"

INTRODUCTION = """
Each row is a test in `tests/integration/test_frameworks.py`.
`.venv/bin/python -m tests.frameworks` writes this part of the page.

"Before the authentication" means that a stranger can take the lock, or get a stored answer.
If the key of the lock contains the user, or keys belong to users, a stranger is refused anyway.
"""


def id_of(place: Any) -> str:
    """The name of the place in the tests."""
    return re.sub(r"\W+", "-", f"{place.framework} {place.where}").strip("-")


def section() -> str:
    """What the page says below its heading."""
    # Loaded here, because it needs the settings.
    from tests.support.placements import PLACES

    lines = [INTRODUCTION]
    for framework in dict.fromkeys(place.framework for place in PLACES):
        lines += [
            f"### Places in {framework}",
            "",
            "| where the decorator stands | `locked_view` | `idempotent_view` |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {place.where} | {place.locked} | {place.idempotent} |"
            for place in PLACES
            if place.framework == framework
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(before + HEADING + section())
    print(f"Written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
