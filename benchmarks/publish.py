"""Turns a result into what the documentation shows; ``python -m benchmarks.publish [FILE]``.

The result is stored in ``benchmarks/results`` under the version that it measured. Tables and
pictures are then made from the stored results.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import pictures, readme, store, tables
from .model import OURS, Result

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
KEPT, IMAGES = HERE / "results", DOCS / "images"
DIGITS = 5
ADDED = (
    "started",
    "quick",
    "redis_server",
    "postgresql",
    "stores",
    "load_at_start",
    "stolen",
)
"""Values stored about rows that another run has added."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish",
        description="Store a result; make the tables and pictures of the documentation again.",
    )
    parser.add_argument("file", nargs="?", type=Path, help="default: the latest")
    parser.add_argument("--add", action="store_true", help="add its rows to the stored ones")
    parser.add_argument("--again", action="store_true", help="only use the stored results")
    options = parser.parse_args(argv)
    try:
        if not options.again:
            keep(store.read(options.file or store.latest(1)[0]), add=options.add)
        results = kept()
        newest = list(results)[-1]
        written = [
            _write(KEPT / f"{name}.md", text) for name, text in tables.all_tables(results).items()
        ]
        text = readme.with_times(readme.README.read_text(), results[newest])
        written.append(_write(readme.README, text.removesuffix("\n")))
        written += pictures.draw(results[newest], IMAGES, source(newest))
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"cannot publish: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in written))
    return 0


def keep(result: Result, *, add: bool = False) -> Path:
    """Store a result under its version, with few digits and without derived values.

    Args:
        add: Only add its rows to the stored ones of that version, with the time and the machine of
            their measurement.
    """
    version = result.environment["packages"][OURS]
    if add:
        about, rows = {**result.environment, "started": result.started}, result.rows
        about["quick"] = result.quick
        result = store.read(KEPT / f"{version}.json")
        result.rows |= rows
        added = result.environment.setdefault("added", {})
        added |= {name: {key: about.get(key) for key in ADDED} for name in rows}
    text = json.dumps(_short(dataclasses.asdict(result)), ensure_ascii=False, indent=1)
    return _write(KEPT / f"{version}.json", text)


def kept() -> dict[str, Result]:
    """All stored results, by version, the newest last.

    Raises:
        FileNotFoundError: There is none.
    """
    found = {path.stem: store.read(path) for path in KEPT.glob("*.json")}
    if not found:
        raise FileNotFoundError(f"no result in {KEPT}")
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def digest(version: str) -> str:
    """The note in a picture about the origin of its numbers."""
    return hashlib.sha256((KEPT / f"{version}.json").read_bytes()).hexdigest()[:16]


def source(version: str) -> str:
    return f"benchmarks/results/{version}.json {digest(version)}"


def _order(version: str) -> list[tuple[int, str]]:
    # Compare numbers by value; pre-releases do not matter here.
    return [(int(part) if part.isdigit() else 0, part) for part in version.split(".")]


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(one) for one in value]
    return value


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
