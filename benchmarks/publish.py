"""Turns a result into what the documentation shows; ``python -m benchmarks.publish [FILE]``.

The result is kept beside the documentation under the version that it measured; tables and
pictures are made anew from what is kept there.
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

from . import pictures, store, tables
from .model import OURS, Result

__all__ = ["IMAGES", "KEPT", "digest", "kept", "main"]

DOCS = Path(__file__).resolve().parent.parent / "docs"
KEPT, IMAGES = DOCS / "benchmarks", DOCS / "images"
DIGITS = 5
ADDED = ("started", "quick", "redis_server", "postgresql", "load_at_start", "stolen")
"""What is told of rows that another run has added."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish",
        description="Keep a result beside the documentation; draw its tables and pictures anew.",
    )
    parser.add_argument("file", nargs="?", type=Path, help="the latest by default")
    parser.add_argument("--add", action="store_true", help="its rows to those that are kept")
    parser.add_argument("--again", action="store_true", help="only draw what is kept anew")
    options = parser.parse_args(argv)
    try:
        if not options.again:
            keep(store.read(options.file or store.latest(1)[0]), add=options.add)
        results = kept()
        newest = list(results)[-1]
        written = [
            _write(KEPT / f"{name}.md", text) for name, text in tables.all_tables(results).items()
        ]
        written += pictures.draw(results[newest], IMAGES, source(newest))
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"cannot publish: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in written))
    return 0


def keep(result: Result, *, add: bool = False) -> Path:
    """Store a result under its version, in few digits and without what follows from it.

    Args:
        add: Its rows only, beside others of that version; when and on what they were measured is
            kept with them.
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
    """All results that are kept, by version, the newest last.

    Raises:
        FileNotFoundError: There is none.
    """
    found = {path.stem: store.read(path) for path in KEPT.glob("*.json")}
    if not found:
        raise FileNotFoundError(f"no result in {KEPT}")
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def digest(version: str) -> str:
    """By which a picture tells what it was drawn from."""
    return hashlib.sha256((KEPT / f"{version}.json").read_bytes()).hexdigest()[:16]


def source(version: str) -> str:
    return f"docs/benchmarks/{version}.json {digest(version)}"


def _order(version: str) -> list[tuple[int, str]]:
    # Numbers by their size; a pre-release does not matter here.
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
