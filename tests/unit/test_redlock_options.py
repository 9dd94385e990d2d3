"""What the settings of a Redlock alias may be."""

from __future__ import annotations

import pytest
from django.core import checks as django_checks
from django.test import override_settings

from django_dlock import InvalidLockBackend, conf, locks
from django_dlock.checks import check_settings

THREE = [f"redis://10.0.0.{number}:6379/0" for number in (1, 2, 3)]


def entry(**changed):
    backend = "django_dlock.backends.redlock.RedlockBackend"
    return {"default": {"BACKEND": backend, "LOCATION": THREE, **changed}}


def ids_of(dlocks):
    with override_settings(DLOCKS=dlocks):
        locks.reset()
        return [message.id for message in check_settings()]


@pytest.fixture(autouse=True)
def forget():
    yield
    locks.reset()


def test_three_and_five_servers_are_right():
    assert ids_of(entry()) == []
    five = [*THREE, "rediss://redis-4", "unix:///run/redis.sock?db=1"]
    assert ids_of(entry(LOCATION=five)) == []
    assert ids_of(entry(OPTIONS={"max_ttl": 600, "clock_drift": 0, "connection_kwargs": {}})) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"LOCATION": "redis://10.0.0.1"}, "is not a list"),
        ({"LOCATION": None, "CACHE": "default"}, "has 'CACHE'"),
        ({"LOCATION": THREE[:1]}, "lists 1 servers"),
        ({"LOCATION": THREE[:2]}, "lists 2 servers"),
        ({"LOCATION": [*THREE, "redis://10.0.0.4"]}, "lists 4 servers"),
        ({"LOCATION": [*THREE[:2], "memcached://10.0.0.3"]}, "URL number 3"),
        ({"LOCATION": [*THREE[:2], "redis://10.0.0.3:port"]}, "URL number 3"),
        ({"LOCATION": [*THREE[:2], "redis://:password@:6379/0"]}, "URL number 3"),
        ({"LOCATION": [*THREE[:2], "redis://:password@10.0.0.1/5"]}, "10.0.0.1:6379 more than"),
        ({"LOCATION": [THREE[0], "redis://localhost", "redis://127.0.0.1:6379"]}, "more than once"),
    ],
)
def test_a_wrong_location_is_an_error(changed, message):
    dlocks = entry(**changed)
    if dlocks["default"]["LOCATION"] is None:
        del dlocks["default"]["LOCATION"]
    with override_settings(DLOCKS=dlocks):
        (problem,) = conf.problems()
        assert problem.id == "E006"
        assert message in problem.message
        assert "password" not in problem.message
        (error,) = check_settings()
        assert isinstance(error, django_checks.Error)
        with pytest.raises(InvalidLockBackend, match=r"LOCATION|CACHE"):
            locks["default"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_ttl": 29},
        {"max_ttl": "long"},
        {"max_ttl": float("inf")},
        {"clock_drift": 0.5},
        {"clock_drift": -0.1},
        {"clock_drift": True},
        {"sentinels": []},
        {"connection_kwargs": {"port": None, "wrong": 1}},
    ],
)
def test_wrong_options_are_refused(options):
    assert ids_of(entry(OPTIONS=options)) == ["django_dlock.E008"]


def test_what_it_cannot_do_is_refused():
    with override_settings(DLOCKS=entry()):
        locks.reset()
        backend = locks["default"]
        for capability in ("parking", "reservations", "wakeup"):
            with pytest.raises(ValueError, match=capability):
                backend.require(capability, "option")
