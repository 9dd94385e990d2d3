"""What an operator can do about a lock that does not move, and what each step would do."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from typing import NamedTuple

from django.utils.translation import gettext

from ..core.held_lease import RENEWALS_PER_TTL
from ..lease import LeaseInfo, Waiter
from ..operators.blocking import LockId
from ..operators.inspection import duration, is_running
from ..text.printable import printable
from .cells import left_text


class Reading(NamedTuple):
    """What the backend tells of one name.

    Attributes:
        problem: Why the alias did not answer; empty if it did.
        untold: Why the waiters are not known although it did.
    """

    info: LeaseInfo | None = None
    waiters: list[Waiter] = []
    problem: str = ""
    untold: str = ""

    @property
    def nobody_waits(self) -> bool:
        return not (self.waiters or self.untold or self.problem)


class Step(NamedTuple):
    """Something that an operator can do.

    Attributes:
        holder, waiters: What it does to them; empty if it does nothing to them.
        note: What else to know about it, such as its risk.
        code: What to type, if it is a command.
        url: The page that does it, if there is one.
    """

    title: str
    holder: str
    waiters: str
    note: str = ""
    code: str = ""
    url: str = ""

    @property
    def words(self) -> list[str]:
        """The words of the command; a narrow page breaks between them."""
        return self.code.split(" ")


def verdict(
    reading: Reading, waits: Sequence[Waiter], stuck: Collection[LockId], *, in_deadlock: bool
) -> str:
    """The reason, in one or two sentences.

    Args:
        waits: What the holder waits for; see ``Blocking.chain``.
        stuck: The locks that are part of a deadlock.
        in_deadlock: Whether this one is.
    """
    info, count = reading.info, len(reading.waiters)
    if reading.problem and info is None:
        return gettext("The alias does not answer, so nobody knows now who holds the lock.")
    if info is None:
        if not count:
            return gettext(
                "Nobody holds this lock now, and nobody is known to wait for it. If something does "
                "not move, it waits for something else."
            )
        return gettext("Nobody holds this lock now. Its waiters will try again within moments.")
    if info.ttl is None:
        return gettext("The entry of this lock is damaged, and would never end by itself.")
    if in_deadlock:
        return gettext(
            "Deadlock: the holder waits for a lock whose holder waits, perhaps through further "
            "locks, for this one. Neither moves until one of them gives up or is stopped. Stop the "
            "one whose work is easiest to do again."
        )
    if waits:
        last = waits[-1]
        text = gettext("The holder waits for another lock itself, “%(name)s”. Look there.")
        if (last.alias, last.name) in stuck:
            text = gettext("The holder waits for “%(name)s”, which is in a deadlock. Look there.")
        return text % {"name": printable(last.name)}
    return _OF_KIND.get(info.kind, _of_process)(info)


def _of_process(info: LeaseInfo) -> str:
    left = {"time": left_text(info)}
    if info.holder_state == "dead":
        return gettext("The holder is dead. Its lease ends in %(time)s, if nobody ends it.") % left
    if info.holder_state == "silent":
        return (
            gettext(
                "The holder gives no sign of life. Unless it wakes up, its lease ends in %(time)s."
            )
            % left
        )
    if info.holder_state == "alive":
        return gettext("The holder is alive: it is still working, or it hangs.")
    if info.process is not None:
        return gettext("Whether the holder lives is not known. Its lease ends in %(time)s.") % left
    return gettext("The holder's process is not known. Its lease ends in %(time)s.") % left


def _parked(info: LeaseInfo) -> str:
    return gettext("The lock is kept for a task that waits for its retry.")


def _cooling(info: LeaseInfo) -> str:
    return gettext("The lock was released, but its min_hold keeps it taken for %(time)s.") % {
        "time": duration(info.ttl or 0)
    }


def _reserved(info: LeaseInfo) -> str:
    return gettext("The lock is reserved for a task that waits in its queue.")


_OF_KIND = {"parked": _parked, "cooling": _cooling, "reserved": _reserved}


def steps_for(lock: LockId, reading: Reading, *, in_deadlock: bool, release_url: str) -> list[Step]:
    """The steps that make sense now, the least harmful one first.

    Args:
        release_url: Empty if the operator may not release locks.
    """
    info = reading.info
    if reading.problem:
        return [_diagnose(lock)]
    if info is None:
        return []
    steps = [_wait(info, in_deadlock)] if info.ttl is not None else []
    may_live = info.holder_state != "unknown" or info.process is not None
    if info.kind == "held" and info.holder_state != "dead" and may_live:
        steps.append(_stop(info))
    if release_url:
        steps.append(_release(info, release_url))
    if info.holder_state in ("dead", "silent") or info.ttl is None:
        steps.append(_clear(lock, info))
    if reading.nobody_waits:
        steps = [step._replace(waiters="") for step in steps]
    return [step for step in steps if any(step[1:])]


def _diagnose(lock: LockId) -> Step:
    return Step(
        gettext("Find out why the alias does not answer"),
        gettext("It keeps its lock if it reaches the backend again in time."),
        gettext("They wait for the backend as long as their settings allow."),
        code=f"python manage.py diagnose_locks --using {shlex.quote(lock[0])}",
    )


def _wait(info: LeaseInfo, in_deadlock: bool) -> Step:
    title, left = gettext("Wait"), {"time": duration(info.ttl or 0)}
    if in_deadlock:
        return Step(
            title,
            gettext("It goes on once another holder in the deadlock gives up."),
            gettext("They wait for that, too. A holder that waits without a limit never gives up."),
        )
    if info.kind == "cooling":
        return Step(title, "", _first_after(left))
    if info.kind != "held":
        return Step(
            title,
            gettext(
                "The task takes the lock over when it runs. If it never runs, the lease ends in "
                "%(time)s."
            )
            % left,
            gettext("They wait until that task has run, or the lease has ended."),
        )
    if info.holder_state == "dead":
        return Step(
            title,
            "",
            gettext(
                "The first one gets the lock in at most %(time)s; at once if it waits on the "
                "holder's machine."
            )
            % left,
        )
    if info.holder_state == "silent":
        return Step(
            title,
            gettext(
                "If it wakes up in time, it goes on. If not, it is told that it has lost the "
                "lock when it wakes up."
            ),
            _first_after(left),
        )
    return Step(
        title,
        gettext("It finishes its work. Its lease is renewed until then, or until its max_hold."),
        gettext("They get the lock one after the other, unless they give up first."),
    )


def _first_after(left: dict[str, str]) -> str:
    return gettext("The first one gets the lock in at most %(time)s.") % left


def _stop(info: LeaseInfo) -> Step:
    task, process = info.metadata.get("task_id"), info.process
    if isinstance(task, str) and task:
        return Step(
            gettext("Stop the task"),
            gettext(
                "A prefork worker, and no other, kills the process that runs it, and a transaction "
                "is rolled back. Its message is acknowledged: start the task again if it must run."
            ),
            gettext("The first one gets the lock when that process is gone."),
            code=f"app.control.revoke({task!r}, terminate=True)",
        )
    command = host = ""
    if process is not None:
        command, host = f"kill {process.pid}", printable(process.host)
        if info.holder_state == "silent":
            # A paused process gets the first signal only when it continues.
            command += f" && kill -CONT {process.pid}"
    return Step(
        gettext("Stop the process on %(host)s") % {"host": host} if host else gettext("Stop it"),
        gettext("This ends everything that the process does, not only this work."),
        gettext(
            "The first one gets the lock when the process ends normally; after a kill -9, in "
            "at most %(time)s."
        )
        % {"time": duration(info.ttl or 0)},
        code=command,
    )


def _two_at_work() -> str:
    return gettext("Until the holder learns of it, two may be running at once.")


def _release(info: LeaseInfo, url: str) -> Step:
    next_one = gettext("The first one gets the lock at once.")
    if not is_running(info):
        return Step(gettext("Release the lock"), "", next_one, url=url)
    if info.kind != "held":
        return Step(
            gettext("Release the lock although a task relies on it"),
            gettext("The waiting task loses its place: another task may run before it."),
            next_one,
            url=url,
        )
    renewal = duration((info.ttl or 0) / RENEWALS_PER_TTL)
    return Step(
        gettext("Release the lock although its holder may be running"),
        gettext(
            "It is not stopped. It learns of the release at its next renewal, usually within "
            "%(time)s; a LockedTask is then interrupted, and delivered again."
        )
        % {"time": renewal},
        next_one,
        _two_at_work(),
        url=url,
    )


def _clear(lock: LockId, info: LeaseInfo) -> Step:
    alias, name = map(shlex.quote, lock)
    silent = " --silent-for 60" if info.holder_state == "silent" else ""
    holder = note = ""
    if silent:
        holder = gettext(
            "It is treated as dead after a minute without a sign of life. If it wakes "
            "up, it learns that it has lost the lock."
        )
        note = _two_at_work()
    elif info.holder_state == "dead":
        note = gettext("The command finds the proof of a death only on the machine of the holder.")
    return Step(
        gettext("Clear stale locks"),
        holder,
        gettext("The first one gets the lock at once."),
        note,
        f"python manage.py clear_stale_locks --using {alias} --name {name}{silent}",
    )
