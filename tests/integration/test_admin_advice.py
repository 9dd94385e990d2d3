"""What the page of a name advises about a holder that is dead, and about one that is silent."""

from __future__ import annotations

import pytest

from django_dlock.admin.advice import steps_for
from django_dlock.admin.why import read
from django_dlock.handler import locks
from tests.support.posed import pose_locks


@pytest.fixture
def posed(settings):
    settings.DLOCKS = {"default": {"BACKEND": "tests.support.posed.PictureBackend"}}
    locks.reset()
    pose_locks()
    yield
    locks.reset()


@pytest.mark.parametrize(
    ("name", "state", "told", "untold"),
    [
        ("stock:7", "dead", "finds the proof of a death only", "two are at work"),
        # Nothing is proven of a silent holder, on whichever machine: it may still be at work.
        ("report:daily", "silent", "two are at work", "proof of a death"),
    ],
)
def test_clearing_says_what_it_relies_on(posed, name, state, told, untold):
    lock = "default", name
    reading = read(lock)
    assert reading.info is not None
    assert reading.info.holder_state == state
    clear = steps_for(lock, reading, in_deadlock=False, release_url="")[-1]
    assert "clear_stale_locks" in clear.code
    assert ("--silent-for" in clear.code) == (state == "silent")
    assert told in clear.waiters
    assert untold not in clear.waiters
