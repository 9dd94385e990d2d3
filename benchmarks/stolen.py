"""Stolen time: processor time that the host of a virtual machine gave to others.

It affects all subjects of a round, but not equally.
"""

from __future__ import annotations

from pathlib import Path

_STAT = Path("/proc/stat")
"""Its first line: user, nice, system, idle, iowait, irq, softirq, steal, … of all processors."""


class Stolen:
    """Measures from its creation on.

    Args:
        stat: The file, as Linux writes it.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = self._read()

    def share(self) -> float | None:
        """The stolen part of the requested processor time, 0 to 1; ``None`` if unknown.

        On a physical machine it is 0.
        """
        now = self._read()
        if now is None or self._before is None:
            return None
        wanted, stolen = (late - early for late, early in zip(now, self._before, strict=True))
        return stolen / wanted if wanted > 0 else 0.0

    def _read(self) -> tuple[int, int] | None:
        try:
            kind, *fields = self._stat.read_text().partition("\n")[0].split()
            user, nice, system, _, _, irq, softirq, stolen = map(int, fields[:8])
        except (OSError, ValueError):
            return None
        if kind != "cpu":
            return None
        return user + nice + system + irq + softirq + stolen, stolen
