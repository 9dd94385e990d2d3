"""What the settings of an alias with fail-over may be, and what follows from a read."""

from __future__ import annotations

import pytest
from django.test import override_settings

from django_dlock import Lock, clock, conf, locks
from django_dlock.backends.failover.health import in_a_row_after, pause_before
from django_dlock.backends.failover.record import LAST_EPOCH, Reading
from django_dlock.backends.failover.rules import view_of
from django_dlock.checks import check_settings

LOCAL = {"BACKEND": "django_dlock.backends.local.LocalBackend"}


def dlocks(options=None, **changed):
    entry = {
        "BACKEND": "django_dlock.backends.failover.FailoverBackend",
        "OPTIONS": {"primary": "one", "standby": "two", **(options or {})},
        **changed,
    }
    return {"default": entry, "one": LOCAL, "two": LOCAL}


@pytest.fixture(autouse=True)
def forget():
    yield
    locks.reset()


def problems(options=None, **changed):
    with override_settings(DLOCKS=dlocks(options, **changed)):
        locks.reset()
        return [(one.id, one.message) for one in conf.problems()]


def test_right_settings_are_no_problem():
    assert problems() == []
    options = {"view_ttl": 3, "max_ttl": 90.5, "failover_after": None, "failback_after": 60}
    assert problems(options) == []
    with override_settings(DLOCKS=dlocks()):
        locks.reset()
        assert check_settings() == []


@pytest.mark.parametrize(
    ("options", "check_id", "message"),
    [
        ({"primary": None}, "E008", "['primary'] is None"),
        ({"standby": 7}, "E008", "['standby'] is 7"),
        ({"standby": "one"}, "E008", "names 'one' as primary and as standby"),
        ({"standby": "three"}, "E009", "names the alias 'three', which DLOCKS does not define"),
        ({"standby": "default"}, "E009", "uses itself"),
        ({"nodes": []}, "E008", "has the unknown key 'nodes'"),
        ({"view_ttl": 2.9}, "E008", "['view_ttl'] is 2.9"),
        ({"view_ttl": True}, "E008", "['view_ttl'] is True"),
        ({"view_ttl": None}, "E008", "['view_ttl'] is None"),
        ({"max_ttl": 29}, "E008", "['max_ttl'] is 29"),
        ({"max_ttl": float("inf")}, "E008", "['max_ttl'] is inf"),
        ({"failover_after": 0}, "E008", "['failover_after'] is 0"),
        ({"failback_after": "soon"}, "E008", "['failback_after'] is 'soon'"),
        ({"command_timeout": 2.0}, "E008", "['view_ttl'] is not set"),
        ({"database": "elsewhere"}, "E006", "DATABASES['elsewhere']"),
        ({"database": 7}, "E006", "['database'] is 7"),
    ],
)
def test_a_wrong_option_is_an_error(options, check_id, message):
    found = problems(options)
    assert [each for each in found if each[0] == check_id and message in each[1]], found


@pytest.mark.parametrize("key", ["CACHE", "LOCATION"])
def test_the_stores_are_set_in_their_own_aliases(key):
    assert problems(**{key: "default"})[0][0] == "E006"


def test_a_ttl_that_is_too_long_is_refused():
    with override_settings(DLOCKS=dlocks({"max_ttl": 40.0})):
        locks.reset()
        with pytest.raises(ValueError, match="grants at most 40 s"):
            Lock("name", ttl=41)


READING = Reading(
    epoch=3,
    active="two",
    longest=35.0,
    quiet=35.0,
    elapsed=10.0,
    silent_for=0.0,
    reason="",
    switched_by="",
)


def test_a_view_counts_from_before_the_read_and_opens_after_the_answer():
    view = view_of(READING, asked_at=100.0, answered_at=102.0, view_ttl=5.0, max_ttl=30.0)
    assert (view.valid_until, view.latest_end) == (105.0, 135.0)
    # 35 s and one percent after the switch, of which 10 s had passed.
    assert view.opens_at == pytest.approx(102.0 + 35.0 * (1 + clock.DRIFT) - 10.0)


def test_a_view_of_an_old_switch_is_open():
    view = view_of(READING._replace(elapsed=36.0), 100.0, 102.0, 5.0, 30.0)
    assert view.opens_at <= 102.0


def test_g9_a_clock_that_was_set_back_opens_nothing_early():
    view = view_of(READING._replace(elapsed=-3600.0), 100.0, 102.0, 5.0, 30.0)
    assert view.opens_at == pytest.approx(102.0 + 35.0 * (1 + clock.DRIFT))


# -- switches in a row -------------------------------------------------------------------------


def after_switches(number: int, elapsed: float = 1e9) -> Reading:
    return READING._replace(in_a_row=number, elapsed=elapsed)


def test_switches_in_a_row_are_made_later_and_later():
    assert [pause_before(after_switches(number)) for number in range(5)] == [
        *(0.0, 0.0),
        *(70.0, 140.0, 280.0),
    ]
    assert pause_before(after_switches(1000)) == 3600.0


def test_switches_are_counted_until_there_was_none_for_a_while():
    assert in_a_row_after(after_switches(3, elapsed=3600.0)) == 4
    assert in_a_row_after(after_switches(3, elapsed=7200.0)) == 1


def test_at_that_pace_the_epochs_last_for_months():
    reading, days = READING._replace(in_a_row=0, elapsed=0.0), 0.0
    for _ in range(LAST_EPOCH):
        days += pause_before(reading) / 86400
        reading = reading._replace(in_a_row=in_a_row_after(reading))
    assert days > 80
