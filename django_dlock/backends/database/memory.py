"""What a row remembers of earlier leases and requests, as text; no I/O.

**Ends.** How the last leases ended, in the column ``past``: for each a code, the owner and a line
feed, the latest first. When the text is long, releases are dropped first: whoever repeats a release
that is not found here is told that its outcome is unknown, not that the lease was lost. Characters
after the last line feed say that ends were dropped.

**Late requests.** Requests of which a copy may still arrive, in the column ``cancelled``: for each
the end of that time, a space, the owner and a line feed, the latest last. One that was cancelled is
granted nothing. One that begins with ``GRANTED`` keeps the lease that it has and gets no other,
even if that lease is no longer among the ends.
"""

from __future__ import annotations

from typing import NamedTuple

LONG = 600
"""The length of ``past`` at which it is cut: about 17 leases."""
KEPT, RELEASES_KEPT = 300, 150
"""The length it is cut to; releases are added only up to the second one."""
CUT = "+"
"""Stands at the end of ``past`` once it has been cut."""
CANCELLED, GRANTED = "", "g"
"""The marks at the start of a late request."""
MOST = 2000
"""Late requests remembered for one name; the oldest are dropped first."""


def end_of(past: str, owner: str) -> str:
    """The code of how this owner's lease ended; empty if it is not known."""
    for line in past.split("\n")[:-1]:
        if line[1:] == owner:
            return line[:1]
    return ""


def with_end(past: str, code: str, owner: str) -> str:
    """``past`` with one more end."""
    if len(past) >= LONG:
        past = _cut(past)
    return f"{code}{owner}\n{past}"


def is_cut(past: str) -> bool:
    """Whether ends were dropped."""
    return past != "" and not past.endswith("\n")


def _cut(past: str) -> str:
    ends = past.split("\n")[:-1]
    kept: set[int] = set()
    length = 0
    for releases, room in ((False, KEPT), (True, RELEASES_KEPT)):
        for number, end in enumerate(ends):
            if end.startswith("r") is releases and length + len(end) < room:
                kept.add(number)
                length += len(end) + 1
    return "".join(f"{ends[number]}\n" for number in sorted(kept)) + CUT


class LateRequest(NamedTuple):
    """One of the late requests.

    Attributes:
        mark: ``CANCELLED`` or ``GRANTED``.
        until: Until when a copy may arrive.
    """

    mark: str
    until: int


def late_requests(text: str) -> dict[str, LateRequest]:
    """The late requests by owner, the latest last."""
    found: dict[str, LateRequest] = {}
    for line in text.split("\n")[:-1]:
        mark_and_end, _, owner = line.partition(" ")
        mark = GRANTED if mark_and_end.startswith(GRANTED) else CANCELLED
        until = mark_and_end[len(mark) :]
        if until.isdecimal():
            found[owner] = LateRequest(mark, int(until))
    return found


def is_awaited(text: str, now: int) -> bool:
    """Whether a copy of one of the late requests may still arrive."""
    return any(it.until > now for it in late_requests(text).values())


def with_late_request(text: str, owner: str, mark: str, until: int, now: int) -> str:
    """The text with one more late request; those whose copies cannot arrive any more are left out.

    Args:
        until: Until when a copy of it may arrive.
    """
    late = {known: it for known, it in late_requests(text).items() if it.until > now}
    late.pop(owner, None)
    late[owner] = LateRequest(mark, until)
    kept = list(late.items())[-MOST:]
    return "".join(f"{it.mark}{it.until} {known}\n" for known, it in kept)
