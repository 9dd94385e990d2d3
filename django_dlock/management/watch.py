"""``list_locks --watch``: asks again and again, and shows how fresh the answer is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..inspection import AliasQuery, duration
from ..lease import LeaseInfo
from ..printable import printable
from .table import lease_table

__all__ = ["Answer", "Watch", "clock_time"]


class Answer(NamedTuple):
    """What the aliases said in one interval.

    Attributes:
        total: How many locks there are; more than ``infos`` if not all were asked for.
        seconds: How long the questions took.
    """

    infos: list[LeaseInfo]
    total: int
    problems: dict[str, str]
    seconds: float


@dataclass
class Outage:
    began_at: str
    since: float


class Watch:
    """Asks once per interval.

    Args:
        ask: Fills in the problems of its query; returns some locks, and how many there are.
        new_query: Makes the query of one interval, in which an alias that is down is asked once.
    """

    def __init__(
        self,
        ask: Callable[[AliasQuery], tuple[list[LeaseInfo], int]],
        new_query: Callable[[], AliasQuery],
        interval: float,
    ) -> None:
        self._ask, self._new_query, self.interval = ask, new_query, interval
        self._outages: dict[str, Outage] = {}

    def answers(self) -> Iterator[Answer]:
        """One answer per interval, for ever."""
        while True:
            started = time.monotonic()
            query = self._new_query()
            infos, total = self._ask(query)
            yield Answer(infos, total, query.problems, time.monotonic() - started)
            time.sleep(max(0.0, started + self.interval - time.monotonic()))

    def note_outages(self, answer: Answer) -> list[str]:
        """What has changed since the last answer: aliases that fail now, and that answer again."""
        changes: list[str] = []
        for alias in [alias for alias in self._outages if alias not in answer.problems]:
            outage = self._outages.pop(alias)
            away = duration(time.monotonic() - outage.since)
            changes.append(f"Alias {alias!r} answers again, after {away}.")
        for alias, problem in answer.problems.items():
            if alias not in self._outages:
                self._outages[alias] = Outage(clock_time(), time.monotonic())
                changes.append(f"Alias {alias!r}: {printable(problem)}")
        return changes

    def page(
        self, answer: Answer, nothing: str, size: tuple[int, int] | None, encoding: str = "utf-8"
    ) -> list[str]:
        """Lines for a person.

        Args:
            size: Columns and lines of the terminal; with ``None``, nothing is cut.
            encoding: That of the terminal or pipe.
        """
        locks = f"{answer.total} lock" if answer.total == 1 else f"{answer.total} locks"
        asked = f"asked in {answer.seconds * 1000:.0f} ms"
        lines = [f"{locks} at {clock_time()}, {asked}; every {self.interval:g} s, Ctrl-C ends"]
        for alias, problem in answer.problems.items():
            outage = self._outages[alias]
            away = duration(time.monotonic() - outage.since)
            lines.append(
                f"DOWN: alias {alias!r} since {outage.began_at} ({away}): {printable(problem)}"
            )
        lines.append("")
        if not answer.infos:
            # Nothing is known of the locks of an alias that does not answer.
            return [*lines, "No answer." if answer.problems else nothing]
        width, height = size or (None, len(lines) + len(answer.infos) + 1)
        shown = answer.infos
        if len(lines) + 1 + len(shown) > height or len(shown) < answer.total:
            shown = shown[: max(0, height - len(lines) - 2)]
        lines += lease_table(shown, width, encoding)
        if len(shown) < answer.total:
            lines.append(f"... and {answer.total - len(shown)} more; --name shows fewer")
        return lines


def clock_time() -> str:
    # In the zone of the settings, which Django makes that of the process.
    return time.strftime("%H:%M:%S")
