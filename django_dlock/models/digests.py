"""The digest by which a table finds a row that is named by several texts."""

from __future__ import annotations

import hashlib


def digest_of(*parts: str) -> str:
    """One digest for several texts, which every database compares exactly."""
    # The lengths distinguish ("a", "bc") from ("ab", "c").
    *before, last = parts
    text = "".join(f"{len(part)}:{part}" for part in before) + last
    return hashlib.sha256(text.encode()).hexdigest()
