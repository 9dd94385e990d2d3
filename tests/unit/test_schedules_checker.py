"""The checker of the drawn schedules finds each kind of violation, in histories made by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from tests.faults.schedules.checker import Row, check, summary, tally
from tests.faults.schedules.report import Outcome, table

Event = dict[str, Any]
TTL, TIMEOUT, RECOVERY = 3.0, 1.0, 10.0


class History:
    """Writes down what a few clients did; times are seconds since the beginning."""

    def __init__(self) -> None:
        bed = {"ttl": TTL, "command_timeout": TIMEOUT, "recovery": RECOVERY}
        self.events: list[Event] = [{"event": "bed", "at": 0.0, **bed}]
        self._numbers = itertools.count(1)

    def call(
        self,
        at: float,
        until: float | None,
        outcome: str = "contended",
        *,
        op: str = "acquire",
        who: str = "one",
        **facts: Any,
    ) -> str:
        one = str(next(self._numbers))
        token = facts.pop("token", None)
        call = {"name": "n", "patience": 0.0, "pid": 1 if who == "one" else 2, **facts}
        self.events.append({"event": "call", "at": at, "id": one, "op": op, "who": who, **call})
        if until is not None:
            done = {"id": one, "outcome": outcome, "token": token}
            self.events.append({"event": "done", "at": until, **done})
        return one

    def hold(
        self, at: float, last: float, token: int, *, how: str = "released", who: str = "one"
    ) -> None:
        """Acquired at once, last seen held at ``last``, and then released or lost."""
        one = self.call(at - 0.1, at, "granted", token=token, who=who)
        ended = {"id": one, "last": last, "how": how}
        self.events.append({"event": "ended", "at": last, **ended})
        outcome = "released" if how == "released" else "lost"
        self.call(last, last + 0.1, outcome, op="release", who=who, grant=one)

    def fault(self, at: float, until: float, what: str = "fault", **facts: Any) -> None:
        number = next(self._numbers)
        facts = {"excuse": None, "harmless": False, **facts}
        self.events.append({"event": "fault", "at": at, "id": number, "what": what, **facts})
        self.events.append({"event": "healed", "at": until, "id": number})

    def end(self, at: float) -> None:
        self.events.append({"event": "end", "at": at})

    @property
    def kinds(self) -> list[str]:
        return [violation.kind for violation in check(self.events)]


@pytest.fixture
def history() -> History:
    return History()


def test_taking_turns_is_clean(history: History) -> None:
    history.hold(1.0, 2.0, 10)
    history.call(1.5, 1.5, who="two")
    history.hold(2.3, 3.0, 11, who="two")
    history.fault(3.5, 3.5, "flushed", excuse=0.0)
    history.hold(4.0, 5.0, 12)
    assert history.kinds == []
    assert summary(check(history.events)) == "clean"


@pytest.mark.parametrize("facts", [{}, {"harmless": True}])
def test_two_holders_are_an_overlap_whatever_the_network_does(
    history: History, facts: dict[str, Any]
) -> None:
    history.hold(1.0, 3.0, 10)
    history.fault(1.5, 1.6, "cut", **facts)
    history.hold(2.9, 4.0, 11, who="two")
    assert history.kinds == ["overlap"]
    (violation,) = check(history.events)
    assert violation.fault == "cut"


def test_a_store_that_lost_its_data_has_to_tell_the_first_holder_by_its_next_renewal(
    history: History,
) -> None:
    history.hold(1.0, 3.5, 10, how="refused")
    history.fault(1.5, 1.5, "flushed", excuse=0.0)
    history.hold(2.0, 4.0, 11, who="two")
    assert history.kinds == []
    history.hold(10.0, 15.0, 12, how="refused")
    history.fault(10.5, 10.5, "flushed", excuse=0.0)
    history.hold(11.0, 16.0, 13, who="two")
    assert history.kinds == ["told late"]


def test_data_lost_before_the_first_grant_or_after_the_second_is_no_excuse(
    history: History,
) -> None:
    history.fault(0.5, 0.6, "flushed", excuse=0.0)
    history.hold(1.0, 3.0, 10)
    history.hold(2.0, 3.0, 11, who="two")
    history.fault(2.5, 2.6, "flushed", excuse=0.0)
    assert history.kinds == ["overlap"]


def test_a_holder_that_cannot_renew_is_told_by_its_deadline(history: History) -> None:
    history.hold(1.0, 4.5, 10, how="expired")
    history.fault(1.5, 6.0, "restarted empty", excuse=0.0)
    history.hold(1.8, 5.0, 11, who="two")
    assert history.kinds == []


def test_a_process_that_stood_still_could_not_be_told(history: History) -> None:
    history.hold(1.0, 9.0, 10, how="expired")
    history.events.append({"event": "stall", "at": 1.9, "until": 8.9, "pid": 1})
    history.fault(1.5, 1.5, "flushed", excuse=0.0)
    history.hold(2.0, 8.0, 11, who="two")
    assert history.kinds == []


def test_a_token_that_does_not_rise(history: History) -> None:
    history.hold(1.0, 2.0, 10)
    history.hold(2.5, 3.0, 10, who="two")
    history.hold(3.5, 4.0, 9)
    assert history.kinds == ["token", "token", "token"]


@pytest.mark.parametrize(
    ("lost_at", "kinds"), [(5.0, []), (None, ["token"]), (7.5, ["token"])], ids=str
)
def test_the_time_that_was_ahead_is_forgotten_with_the_data(
    history: History, lost_at: float | None, kinds: list[str]
) -> None:
    history.fault(1.0, 3.0, "clock set ahead", leap=60.0)
    history.hold(2.0, 4.0, 10)
    if lost_at is not None:
        history.fault(lost_at, lost_at, "flushed", excuse=0.0)
    history.hold(6.0, 7.0, 9, who="two")
    assert history.kinds == kinds


def test_no_clock_was_ahead_for_as_long(history: History) -> None:
    history.fault(1.0, 3.0, "clock set ahead", leap=1.0)
    history.hold(2.0, 4.0, 10)
    history.fault(5.0, 5.0, "flushed", excuse=0.0)
    history.hold(6.0, 7.0, 9, who="two")
    assert history.kinds == ["token"]


def test_a_lease_lost_without_a_cause(history: History) -> None:
    history.fault(1.5, 1.5, "cut", harmless=True)
    history.hold(1.0, 4.0, 10, how="expired")
    assert history.kinds == ["loss"]


def test_a_lease_lost_to_an_outage_is_no_violation(history: History) -> None:
    history.fault(1.5, 3.5, "black hole")
    history.hold(1.0, 4.0, 10, how="expired")
    assert history.kinds == []


def test_an_outage_that_was_none(history: History) -> None:
    history.fault(1.0, 1.0, "connections forgotten", harmless=True)
    history.call(1.1, 2.9, "unavailable", patience=1.5)
    history.call(1.1, 1.9, "unavailable")
    history.call(0.9, 2.9, "unavailable", patience=1.5)
    assert history.kinds == ["outage"]
    history.fault(5.0, 5.5, "refused")
    history.call(6.0, 7.0, "unavailable", patience=1.5)
    assert history.kinds == ["outage"]


@pytest.mark.parametrize(
    ("longest", "answered", "last", "kinds"),
    [
        (0.0, 2.0, 13.0, ["stuck"]),
        # Not yet.
        (0.0, 2.0, 11.0, []),
        # Nobody knows that the store would have answered.
        (0.0, None, 13.0, []),
        (0.0, 6.0, 13.0, []),
        # Three faults in a row may explain it.
        (4.0, 2.0, 23.0, []),
        (4.0, 2.0, 26.0, ["stuck"]),
    ],
)
def test_a_process_that_gets_no_answer_while_another_one_does(
    history: History, longest: float, answered: float | None, last: float, kinds: list[str]
) -> None:
    history.fault(0.5, 0.5 + longest, "refused")
    history.hold(0.2, 0.3, 10)
    history.hold(0.2, 0.3, 11, who="two")
    if answered is not None:
        history.call(answered, answered + 0.1, who="two")
    for tenth in range(10, round(10 * last), 5):
        history.call(tenth / 10, tenth / 10 + 0.4, "unavailable")
    found = [one for one in check(history.events) if one.kind == "stuck"]
    assert [one.kind for one in found] == kinds
    assert all(one.fault == "refused" and one.at == 1.0 for one in found)


def test_a_process_that_stood_still_or_got_an_answer_is_not_stuck(history: History) -> None:
    history.fault(0.5, 0.5, "cut", harmless=True)
    history.call(1.0, 1.1, who="two")
    history.events.append({"event": "stall", "at": 1.2, "pid": 1, "until": 8.0})
    for second in range(1, 17):
        history.call(float(second), second + 0.4, "unavailable")
    for second in range(17, 34):
        outcome = "contended" if second == 26 else "unavailable"
        history.call(float(second), second + 0.4, outcome)
    assert "stuck" not in [one.kind for one in check(history.events)]


def test_a_call_beyond_its_bound(history: History) -> None:
    history.call(1.0, 3.9, patience=1.0)
    history.call(1.0, 4.1, patience=1.0)
    history.call(5.0, 7.1, "released", op="release", grant="0")
    assert history.kinds == ["bound", "bound"]


def test_a_call_that_never_ends_unless_its_process_was_killed(history: History) -> None:
    history.call(1.0, None)
    history.call(1.0, None, who="two")
    history.events.append({"event": "killed", "at": 1.5, "pid": 2})
    history.end(9.0)
    assert history.kinds == ["bound"]


def test_a_name_that_is_not_granted_after_the_fault(history: History) -> None:
    history.fault(1.0, 2.0)
    for second in range(2, 16):
        history.call(float(second), second + 0.1, "unavailable")
    assert "liveness" in history.kinds


def test_a_client_that_makes_no_progress(history: History) -> None:
    history.hold(0.5, 0.9, 10)
    history.hold(0.5, 0.9, 10, who="two")
    history.fault(1.0, 2.0)
    history.hold(3.0, 4.0, 12)
    history.call(3.0, 3.1, "unavailable", who="two")
    history.end(13.0)
    assert [one.kind for one in check(history.events) if one.kind == "progress"] == ["progress"]


def test_an_unexpected_error(history: History) -> None:
    history.call(1.0, 1.1, "TypeError: what")
    assert history.kinds == ["error"]


def test_the_table_has_a_row_for_each_fault(history: History) -> None:
    history.hold(0.5, 0.9, 10)
    history.fault(1.0, 1.1, "cut")
    history.hold(1.5, 3.0, 11)
    history.hold(2.0, 3.0, 12, who="two")
    cut, calm = tally(history.events)
    assert (cut.fault, cut.times, cut.grants, dict(cut.violations)) == ("cut", 1, 2, {"overlap": 1})
    assert (calm.fault, calm.times, calm.grants) == ("no fault", 0, 1)


def test_a_store_is_one_row_of_the_summary() -> None:
    rows = [
        Row("cut", 3, 40, Counter()),
        Row("paused", 2, 20, Counter(overlap=1)),
        Row("killed", 1, 10, Counter(overlap=1, bound=1)),
    ]
    etcd = Outcome("etcd", "etcd 3.4.23", "TTL 3 s", "7", 10.0, rows, [])
    sqlite = Outcome("sqlite", "SQLite 3.40.1", "TTL 3 s", "8", 0.5, rows[:1], [])
    text = table([etcd, sqlite], "2 processes")
    assert "| etcd | etcd 3.4.23 | 10 | `7` | 6 | 70 | 1 bound, 2 overlap |" in text
    assert "| sqlite | SQLite 3.40.1 | 0.5 | `8` | 3 | 40 | 0 |" in text
