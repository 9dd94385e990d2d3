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
Each of these places is a test in `tests/integration/test_frameworks.py`.
`.venv/bin/python -m tests.frameworks` writes this part of the page.

* **early**: it works before the authentication, so a stranger can take the lock, or get a stored
  answer, unless the key of the lock contains the user, or keys belong to users.
* **refused**: at import.
"""


def id_of(place: Any) -> str:
    """The name of the place in the tests."""
    return re.sub(r"\W+", "-", f"{place.framework} {place.where}").strip("-")


def told(locked: str, idempotent: str) -> str:
    """How both decorators fare at a place."""
    if locked == idempotent:
        return f"**{locked}:**"
    return f"`locked_view` **{locked}**, `idempotent_view` **{idempotent}:**"


def section() -> str:
    """What the page says below its heading."""
    # Loaded here, because it needs the settings.
    from tests.support.placements import PLACES

    lines = [INTRODUCTION]
    for framework in dict.fromkeys(place.framework for place in PLACES):
        lines += [f"### Places in {framework}", ""]
        where: dict[tuple[str, str], list[str]] = {}
        for place in PLACES:
            if place.framework == framework:
                where.setdefault((place.locked, place.idempotent), []).append(place.where)
        lines += [f"* {told(*both)} {'; '.join(alike)}" for both, alike in where.items()]
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
