"""Tables of leases and waiters, as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from django.core.management.color import Style, no_style

from ..lease import LeaseInfo, Waiter
from ..operators.blocking import LockId
from ..operators.inspection import age_text, duration
from ..text.printable import printable
from ..text.request_path import cut
from .columns import Column, aligned, cut_host, cut_middle, cut_task


def by_trouble(infos: Iterable[LeaseInfo], in_deadlock: Collection[LockId] = ()) -> list[LeaseInfo]:
    """What needs an operator first: deadlocks, damaged entries, dead holders, silent ones, late
    renewals; then the oldest ones."""

    def key(info: LeaseInfo) -> tuple[Any, ...]:
        trouble = (
            (info.alias, info.name) in in_deadlock,
            bool(info.damaged) or info.ttl is None,
            info.holder_state == "dead",
            info.holder_state == "silent",
            info.is_late,
            True,
        )
        return trouble.index(True), info.acquired_at, info.token

    return sorted(infos, key=key)


def lease_table(
    infos: Sequence[LeaseInfo],
    width: int | None,
    encoding: str = "utf-8",
    *,
    in_deadlock: Collection[LockId] = (),
    style: Style | None = None,
) -> Iterable[str]:
    """Lines of a table of leases; no longer than ``width``, if that is possible."""
    states = [_state(info, stuck=(info.alias, info.name) in in_deadlock) for info in infos]
    facts = [info.as_dict()["holder"] for info in infos]
    columns = (
        Column("NAME", _cells(info.name for info in infos), cut_middle),
        _state_column(states, style),
        Column("AGE", _cells(age_text(info) for info in infos), leaves=1),
        Column("WAITING", _cells(map(_waiting, infos)), leaves=2),
        Column("HOLDER", _cells(map(_where, facts)), cut_host, yields=6, leaves=3),
        Column("TASK", _cells(map(_what, facts)), cut_task),
        Column("TTL", _cells(map(_left, infos)), leaves=5, is_detail=True),
        Column("ALIAS", _cells(info.alias for info in infos), leaves=4, is_usual=True),
    )
    return aligned(columns, width, encoding)


def waiter_table(
    waiters: Sequence[Waiter],
    width: int | None,
    encoding: str = "utf-8",
    *,
    style: Style | None = None,
) -> Iterable[str]:
    """Lines of a table of waiters; no longer than ``width``, if that is possible."""
    facts = [waiter.as_dict()["waiter"] for waiter in waiters]
    columns = (
        Column("WAITS FOR", _cells(waiter.name for waiter in waiters), cut_middle),
        _state_column([_with_damage(waiter.state, waiter) for waiter in waiters], style),
        Column("SINCE", _cells(duration(waiter.waited) for waiter in waiters), leaves=1),
        Column("WAITER", _cells(map(_where, facts)), cut_host, yields=6, leaves=2),
        Column("TASK", _cells(map(_what, facts)), cut_task),
        Column("ALIAS", _cells(waiter.alias for waiter in waiters), leaves=3, is_usual=True),
    )
    return aligned(columns, width, encoding)


def who(facts: Mapping[str, Any]) -> str:
    """The process, and its task or request."""
    found = [text for text in (_where(facts), _what(facts)) if text != "-"]
    return " ".join(found) or "an unknown process"


def _cells(texts: Iterable[str]) -> list[str]:
    # A path or a damaged entry may contain terminal escape sequences.
    return [printable(text) for text in texts]


def _state_column(states: Sequence[str], style: Style | None) -> Column:
    # Only what is damaged may be cut: "dead" must not pass for "deadlock".
    narrowest = max(len(state.partition(":")[0]) + (":" in state) for state in states)
    paint = _paints(states, style or no_style())
    return Column("STATE", _cells(states), _cut_state, narrowest, paint=paint)


def _cut_state(text: str, size: int, mark: str) -> str:
    return text[: size - 1].rstrip(": ") + mark


def _paints(states: Sequence[str], style: Style) -> list[Callable[[str], str]]:
    bad, warning = {"deadlock", "dead"}, {"silent", "late"}

    def paint(state: str) -> Callable[[str], str]:
        words = {word.partition(":")[0] for word in state.split(", ")}
        if words & bad or "damaged" in words:
            return style.ERROR
        return style.WARNING if words & warning else str

    return list(map(paint, states))


def _state(info: LeaseInfo, *, stuck: bool) -> str:
    # That of a lease without a process is not known; its kind says why.
    state: str = info.holder_state if info.kind == "held" else info.kind
    if info.is_late and state == "alive":
        state += ", late"
    if stuck:
        state = "deadlock" if state == "alive" else f"{state}, deadlock"
    return _with_damage(state, info)


def _with_damage(state: str, it: LeaseInfo | Waiter) -> str:
    return f"{state}, damaged: {' '.join(it.damaged)}" if it.damaged else state


def _where(facts: Mapping[str, Any]) -> str:
    return f"{facts['host']}:{facts['pid']}" if facts["host"] else "-"


def _what(facts: Mapping[str, Any]) -> str:
    # A value of another program may be huge.
    what = cut(str(facts["task_name"] or facts["path"] or ""))
    if facts["task_id"]:
        what = f"{what}[{cut(str(facts['task_id']))}]"
    return what or "-"


def _waiting(info: LeaseInfo) -> str:
    return "unknown" if "waiting" in info.unknown else str(info.waiting)


def _left(info: LeaseInfo) -> str:
    if info.ttl is None:
        return "never ends"
    left = duration(info.ttl)
    return f"at most {left}" if "ttl" in info.unknown else left
