"""The text of a statement that a session of PostgreSQL prepares; no I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any


class Prepared:
    """A statement that a session prepares.

    Args:
        purpose: A word that stands in its name, which operators see in ``pg_stat_activity``.
        types: Those of its parameters ``$1``, ``$2``, …
    """

    def __init__(self, purpose: str, types: Sequence[str], text: str) -> None:
        digest = hashlib.blake2b(f"{types}{text}".encode(), digest_size=6).hexdigest()
        self.name = f"dlock_{purpose}_{digest}"
        marks = ", ".join(["%s"] * len(types))
        self.execute = f"EXECUTE {self.name} ({marks})"
        self.prepare = f"PREPARE {self.name} ({', '.join(types)}) AS {text}; {self.execute}"
        self.plain = re.sub(r"\$(\d+)", lambda mark: f"%s::{types[int(mark[1]) - 1]}", text)
        self._numbers = [int(number) - 1 for number in re.findall(r"\$(\d+)", text)]

    def plain_values(self, values: Sequence[Any]) -> list[Any]:
        """The parameters of ``plain``, given those of ``execute``."""
        return [values[number] for number in self._numbers]
