"""What the page of a name advises about a holder that is dead, and about one that is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from django_dlock.admin.advice import steps_for
from django_dlock.admin.cells import time_left
from django_dlock.admin.lock_page import read
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
        ("stock:7", "dead", "finds the proof of a death only", "two may be running"),
        # Nothing is proven about a silent holder, on any machine: it may still be running.
        ("report:daily", "silent", "two may be running", "proof of a death"),
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
    text = f"{clear.holder} {clear.waiters} {clear.note}"
    assert told in text
    assert untold not in text


def test_a_paused_process_is_told_to_continue_so_that_it_can_end(posed):
    # Without a task, the way to stop the holder is a signal to its process.
    reading = read(("default", "report:daily"))
    assert reading.info is not None
    reading = reading._replace(info=replace(reading.info, metadata={}))
    stop = steps_for(("default", "report:daily"), reading, in_deadlock=False, release_url="")[1]
    assert reading.info.process is not None
    pid = reading.info.process.pid
    assert stop.code == f"kill {pid} && kill -CONT {pid}"


@pytest.mark.parametrize("name", ["stock:7", "report:daily", "invoice:2281"])
def test_no_step_promises_anything_to_waiters_that_do_not_exist(posed, name):
    lock, reading = ("default", name), read(("default", name))._replace(waiters=[])
    steps = steps_for(lock, reading, in_deadlock=False, release_url="/release/")
    assert {step.waiters for step in steps} == {""}
    # What a step risks does not depend on them.
    release = next(step for step in steps if step.url)
    assert bool(release.note) == (reading.info.holder_state != "dead")


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["held", "cooling", "parked", "reserved"])
@pytest.mark.parametrize("state", ["alive", "silent", "dead", "unknown"])
@pytest.mark.parametrize("ttl", [20.0, None])
def test_every_step_says_something(posed, waits, kind, state, ttl):
    reading = read(("default", "stock:7"))
    info = replace(reading.info, kind=kind, holder_state=state, ttl=ttl)
    reading = reading._replace(info=info, waiters=reading.waiters if waits else [])
    for release_url in ("", "/release/"):
        steps = steps_for(("default", "a"), reading, in_deadlock=False, release_url=release_url)
        for step in steps:
            assert step.holder or step.waiters or step.note or step.code or step.url, step
            assert "Nothing" not in step.holder
            assert "nothing" not in step.waiters
        helps = waits or kind in ("parked", "reserved") or (kind == "held" and state != "dead")
        assert ("Wait" in {step.title for step in steps}) == (helps and ttl is not None)


@pytest.mark.parametrize("unknown", [{"untold": "Not told."}, {"problem": "No answer."}])
def test_waiters_that_are_not_known_are_not_denied(posed, unknown):
    reading = read(("default", "stock:7"))._replace(waiters=[], **unknown)
    steps = steps_for(("default", "stock:7"), reading, in_deadlock=False, release_url="")
    assert all(step.waiters for step in steps)


@pytest.mark.parametrize(
    ("name", "style"), [("stock:7", "bad"), ("report:daily", "warn"), ("import:1207", "good")]
)
def test_the_time_left_has_the_colour_of_the_holder(posed, name, style):
    assert f"dlock-bar dlock-{style}" in time_left(read(("default", name)).info)
