"""What the ZooKeeper servers report about themselves, for checks and for ``diagnose_locks``."""

from __future__ import annotations

import re

from ..base import AliasOptions, Fact, Problem

COMMAND = b"srvr"
"""The one command of this kind that a server permits unless it is told otherwise."""


def problems(options: AliasOptions, granted: float, wanted: float) -> list[Problem]:
    """W009, if the servers grant a shorter session than asked."""
    if granted >= wanted:
        return []
    message = (
        f"The ZooKeeper of alias {options.alias!r} keeps a silent session for {granted:g} s and "
        f"not for the {wanted:g} s asked for, so its leases are good for {granted / 2:g} s."
    )
    hint = "Raise maxSessionTimeout there, or lower OPTIONS['session_timeout'] (or TTL) here."
    return [Problem("W009", message, hint)]


def facts(answer: str, granted: float) -> list[Fact]:
    """Facts from the answer to ``COMMAND``, and from the session's timeout."""
    found = [Fact("session", f"ends {granted:g} s after the last sign of life")]
    version = re.search(r"^Zookeeper version: ([^-,\s]+)", answer, re.MULTILINE)
    mode = re.search(r"^Mode: (\w+)", answer, re.MULTILINE)
    if version:
        role = f", {mode[1]}" if mode else ""
        found.insert(0, Fact("server", f"ZooKeeper {version[1]}{role}"))
    return found
