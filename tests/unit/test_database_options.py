"""Which ``OPTIONS`` of the database backend are refused; starts no server."""

from __future__ import annotations

from typing import Any

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"proof": 1}, "['OPTIONS']['proof'] is 1."),
        ({"proof": "session"}, "['OPTIONS']['proof'] is 'session'."),
        ({"proof": True}, "['OPTIONS']['proof'] is True, but DATABASES['default'] is 'sqlite'."),
        ({"connections": 2}, "['OPTIONS']['connections'] is 2."),
        ({"connections": True}, "['OPTIONS']['connections'] is True."),
        ({"poll_interval": 0}, "['OPTIONS']['poll_interval'] is 0."),
        ({"poll": 1}, "['OPTIONS'] has the unknown key 'poll'."),
    ],
)
def test_the_error_for_a_wrong_option_names_it(given: dict[str, Any], told: str) -> None:
    options = AliasOptions(alias="it", backend="database", options={"database": "default", **given})
    (problem,) = DatabaseBackend.problems(options)
    assert (problem.id, problem.message) == ("E008", f"DLOCKS['it']{told}")
    assert problem.hint


@pytest.mark.parametrize("given", [{"proof": False}, {"connections": 3}, {"poll_interval": 0.01}])
def test_correct_options_are_accepted(given: dict[str, Any]) -> None:
    options = AliasOptions(alias="it", backend="database", options={"database": "default", **given})
    assert DatabaseBackend.problems(options) == []
