"""Source and wheel of this tree, without other files of the working tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import missing

ROOT = Path(__file__).resolve().parents[2]


def copy_source(target: Path) -> Path:
    """What git knows or would add, as in a clone."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    # Outside a repository, as in an unpacked sdist, all files are taken.
    names = listed.stdout.splitlines() if listed.returncode == 0 else _all_files()
    for name in names:
        if (ROOT / name).is_file():
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    return target


def build(source: Path, out: Path) -> Path:
    """The wheel; the sdist is beside it."""
    built = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        need_network(built.stdout + built.stderr)
        pytest.fail(built.stdout + built.stderr)
    (wheel,) = out.glob("*.whl")
    return wheel


def need_network(printed: str) -> None:
    """If pip has failed because it reaches no package index: skip at home, fail in CI."""
    if "Retrying (Retry(" in printed:
        missing("pip reaches no package index")


def _all_files() -> list[str]:
    return [str(file.relative_to(ROOT)) for file in ROOT.rglob("*") if ".venv" not in file.parts]
