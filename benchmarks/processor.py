"""The number of processors, and the processor time of a process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def count() -> int:
    """How many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def children(pid: int) -> list[int]:
    """The running children of a process."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    if path.exists():
        return [int(child) for child in path.read_text().split()]
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


def used(pid: int) -> float:
    """Seconds of processor time of all threads of a process so far, including ended ones."""
    if sys.platform == "linux":
        # The id of a process's processor-time clock, as clock_getcpuclockid(3) computes it. It
        # counts nanoseconds, while /proc/<pid>/stat counts in ticks of 10 ms.
        return time.clock_gettime((~pid << 3) | 2)
    else:  # noqa: RET505 - type checkers need the branch for other platforms
        import psutil

        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
