"""How holders and waiters are shown, and the links between the pages of locks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext

from ..lease import LeaseInfo, Waiter
from ..operators.blocking import Blocking, Line, LockId
from ..operators.inspection import age_text, duration
from ..process import ProcessIdentity, death_proof
from ..text.printable import printable
from .base import badge, breakable, local_text, may_see_users
from .cells import known, time_left, who, with_damage
from .filters import HOLDER_STATES, KINDS
from .links import lock_url

_STYLES = {"alive": "good", "silent": "warn", "dead": "bad", "unknown": "plain"}
DEEPEST = 8
"""Steps to the right that the style sheet knows; deeper lines are not moved any further."""


class People:
    """Shows them to one visitor, without data that this visitor may not see."""

    def __init__(self, request: HttpRequest, site: str) -> None:
        self._site, self._sees_users = site, may_see_users(request)

    def holder(self, info: LeaseInfo) -> dict[str, Any]:
        """The facts about a holder, and how its state is known."""
        return {
            "kind": dict(KINDS).get(info.kind, info.kind),
            "who": self._who(info.metadata, info.process),
            # A lease that no process holds has no state.
            "state": _state(info) if info.kind == "held" or info.damaged else "",
            "proof": _proof(info),
            "sign_of_life": _sign_of_life(info),
            "damaged": ", ".join(info.damaged),
            "since": "" if age_text(info) == "-" else local_text(info.acquired_at),
            "age": age_text(info),
            "ttl": time_left(info),
            "renewals": known(info, "renewals"),
            # Before the first renewal, it is the time since the grant.
            "renewed": _ago(info.renewed_ago)
            if info.renewals and info.renewed_ago is not None
            else "",
            # As text, because thousands separators would make it hard to compare with log lines.
            "token": str(known(info, "token")),
            "owner": printable(info.owner),
            "metadata": _pretty(self._visible(info.metadata)),
        }

    def link(self, waiter: Waiter) -> SafeString:
        """To the page of the lock that somebody waits for."""
        return self._link((waiter.alias, waiter.name))

    def waiter(self, blocking: Blocking, waiter: Waiter) -> dict[str, Any]:
        """A row of the table of waiters."""
        return {
            "who": self._who(waiter.metadata, waiter.process),
            "state": _state(waiter),
            "since": local_text(waiter.since),
            "waited": duration(waiter.waited),
            "holds": [self._link(lock) for lock in blocking.held_by(waiter)],
            "is_gone": waiter.state == "dead",
        }

    def wait(self, blocking: Blocking, start: LockId, waiter: Waiter) -> dict[str, Any]:
        """One link of the chain from a lock: whom a holder waits for, and since when."""
        lock = waiter.alias, waiter.name
        lease = blocking.leases.get(lock)
        return {
            "link": self._link(lock),
            "closes_circle": lock == start,
            "waited": duration(waiter.waited),
            "who": self._who(lease.metadata, lease.process) if lease is not None else "",
            "state": _state(lease) if lease is not None else "",
        }

    def deadlock(self, blocking: Blocking, circle: Sequence[LockId]) -> list[dict[str, Any]]:
        """The locks of a circle, each with its holder and with what that waits for."""
        found = []
        for lock, after in zip(circle, [*circle[1:], circle[0]], strict=True):
            lease = blocking.leases[lock]
            wait = next(it for it in blocking.waits_for(lock) if (it.alias, it.name) == after)
            found.append(
                {
                    "link": self._link(lock),
                    "who": self._who(lease.metadata, lease.process),
                    "waits_for": self._link(after),
                    "waited": duration(wait.waited),
                }
            )
        return found

    def line(self, line: Line) -> dict[str, Any]:
        """A row of the list of all that wait."""
        waiter, lease = line.waiter, line.lease
        row: dict[str, Any] = {
            "depth": min(line.depth, DEEPEST),
            "in_deadlock": line.in_deadlock,
            "is_lock": waiter is None,
        }
        if waiter is not None:
            return {
                **row,
                "what": gettext("waits"),
                "who": self._who(waiter.metadata, waiter.process),
                "state": _state(waiter),
                "for": duration(waiter.waited),
            }
        notes = [gettext("its waiters are shown elsewhere in this list")] if line.repeated else []
        if line.more:
            text = ngettext("%(count)d more waiter", "%(count)d more waiters", line.more)
            notes.append(text % {"count": line.more})
        return {
            **row,
            "what": self._link(line.lock),
            "notes": notes,
            "who": self._who(lease.metadata, lease.process) if lease else gettext("nobody"),
            "state": _state(lease) if lease else "",
            "for": age_text(lease) if lease else "",
        }

    def _link(self, lock: LockId) -> SafeString:
        alias, name = lock
        return format_html(
            '<a href="{}">{}</a> <span class="dlock-quiet">{}</span>',
            lock_url(self._site, alias, name),
            breakable(name),
            alias,
        )

    def _who(self, metadata: Mapping[str, Any], process: ProcessIdentity | None) -> str:
        return who(self._visible(metadata), process) or gettext("not known")

    def _visible(self, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._sees_users:
            return metadata
        return {key: value for key, value in metadata.items() if key != "user"}


def _state(it: LeaseInfo | Waiter) -> SafeString:
    state = it.state if isinstance(it, Waiter) else it.holder_state
    return with_damage(badge(_STYLES[state], dict(HOLDER_STATES)[state]), it)


def _sign_of_life(info: LeaseInfo) -> str:
    """When it was; empty if it is not known, or if ``_proof`` says it."""
    if info.silent_for is None or info.kind != "held" or info.holder_state in ("alive", "silent"):
        return ""
    return _ago(info.silent_for)


def _ago(seconds: float) -> str:
    return gettext("%(time)s ago") % {"time": duration(seconds)}


def _pretty(metadata: Mapping[str, Any]) -> str:
    if not metadata:
        return ""
    text = json.dumps(dict(metadata), indent=2, ensure_ascii=False, default=str)
    return printable(text, keep="\n")


def _proof(info: LeaseInfo) -> str:
    """How the state is known."""
    if info.kind != "held" or info.holder_state == "unknown":
        return ""
    if info.holder_state == "alive" and info.silent_for is None:
        return gettext(
            "Its lock was renewed in time, or its session with the store has not ended. Until that "
            "changes, this store does not know whether its process has died."
        )
    if info.holder_state == "alive":
        return gettext("Its process renewed a lock or reported %(time)s ago.") % {
            "time": duration(info.silent_for or 0.0)
        }
    if info.holder_state == "silent":
        silence = {"time": duration(info.silent_for or 0.0)}
        return (
            gettext(
                "Its process has not reported for %(time)s, but nothing proves that it is dead: it "
                "may be paused or cut off, and wake up."
            )
            % silence
        )
    proofs = {
        "gone": gettext("Proven: its process does not exist any more."),
        "rebooted": gettext("Proven: its machine has been rebooted since."),
    }
    found = death_proof(info.process, silent=True) if info.process is not None else None
    return proofs[found] if found else gettext("Proven: the store knows that its process ended.")
